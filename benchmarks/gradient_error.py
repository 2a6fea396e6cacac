"""The error of each loop's gradient, against the number of microbatches in an update, on real text.

Every loop makes the same updates of 64 samples: GSM8K's questions and answers as bytes, where only the answer is a
target. A small Llama, trained for 100 updates, computes in float64. The learning rate is zero, so that all updates have
the same weights. The error is |g - g_uncut| / |g_uncut|: the optimizer gets g, and plain torch computes g_uncut with
the whole update in one forward. The loops are those of `benchmarks.speed`: the public API of each library, unmodified.
Writes benchmarks/results/gradient_error_*.json. Takes about 3 minutes on an idle core.
"""

import argparse
import contextlib
import io
import json
import logging
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import result
from benchmarks.speed.__main__ import GSM8K
from benchmarks.speed.contest import flat, function_of, relative
from benchmarks.speed.contestants import EVERYBODY
from benchmarks.speed.model import NO_TARGET, Sample, build, causal_loss, collate, optimizer_of
from benchmarks.speed.setting import Setting
from benchmarks.speed.task import Meter, Task

LOOPS = ("plain", "accelerate", "lightning", "hf", "megabatch")
UPDATE = 64  # samples
ACCUMULATION = (1, 8, 64)  # microbatches of an update
NUM_UPDATES = 3
LONGEST = 1024  # bytes of a question and its answer
TRAINED = 100  # updates before the measurement
SETTING = Setting(hidden=32, heads=2, intermediate=64, update_size=UPDATE, dtype="float64", learning_rate=0.0)
TRAINING = replace(SETTING, dtype="float32", learning_rate=3e-3)
State = dict[str, torch.Tensor]


def samples(path: Path, number: int) -> list[Sample]:
    """So many questions with their answers, by chance; -100 where the question stands."""
    pairs = [(row["question"] + "\n", row["answer"]) for row in map(json.loads, path.read_text("utf-8").splitlines())]
    fitting = [(q.encode(), a.encode()) for q, a in pairs if len(q.encode()) + len(a.encode()) <= LONGEST]
    chosen = np.random.default_rng(0).permutation(len(fitting))[:number]
    return [sample(*fitting[index]) for index in chosen]


def sample(question: bytes, answer: bytes) -> Sample:
    ids = torch.tensor([byte + 3 for byte in question + answer])
    labels = ids.clone()
    labels[: len(question)] = NO_TARGET
    return {"input_ids": ids, "labels": labels}


def task_of(given: Sequence[Sample], setting: Setting, state: State) -> Task:
    model = build(setting)
    model.load_state_dict(state)
    optimizer = optimizer_of(model, setting)
    return Task(model, optimizer, list(given), setting, Meter(model, optimizer, keep_gradients=True))


def uncut(given: Sequence[Sample], state: State) -> list[torch.Tensor]:
    """The gradient of each update in plain torch: one forward, one sum, one division."""
    task = task_of(given, SETTING, state)
    for update in task.updates():
        batch = collate(update)
        logits = task.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        num_targets = int((batch["labels"][:, 1:] != NO_TARGET).sum())
        causal_loss(logits, batch["labels"], logits.shape[-1], num_targets).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()
    return [flat(each) for each in task.meter.gradients]


def trained(given: Sequence[Sample]) -> State:
    """The weights after a short training, by megabatch."""
    model = build(TRAINING)
    task = Task(model, (made := optimizer_of(model, TRAINING)), list(given), TRAINING, Meter(model, made))
    function_of("megabatch")(task)
    return {name: each.double() for name, each in model.state_dict().items()}


def errors(name: str, num_microbatches: int, given: Sequence[Sample], state: State, exact: list[torch.Tensor]) -> Any:
    """The error of each update's gradient."""
    setting = replace(SETTING, micro_batch_size=UPDATE // num_microbatches)
    if name == "megabatch":  # it counts tokens: as many microbatches, or one more
        most = max(sum(len(s["input_ids"]) for s in given[i : i + UPDATE]) for i in range(0, len(given), UPDATE))
        setting = replace(setting, max_microbatch_tokens=max(LONGEST, 2 * most // num_microbatches))
    task = task_of(given, setting, state)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        function_of(name)(task)
    found = [flat(each) for each in task.meter.gradients]
    return [relative(*pair) for pair in zip(found, exact, strict=True)]


def measure(given: Sequence[Sample], state: State) -> list[dict[str, Any]]:
    exact, rows = uncut(given, state), []
    for name in LOOPS:
        for number in ACCUMULATION:
            start = time.perf_counter()
            found = errors(name, number, given, state, exact)
            rows.append({"loop": name, "title": EVERYBODY[name].title, "accumulation": number, "errors": found,
                         "median_error": statistics.median(found)})  # fmt: skip
            print(f"{name:12}{number:4} {rows[-1]['median_error']:10.2e}  {time.perf_counter() - start:5.1f} s")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradient_error")
    parser.add_argument("--gsm8k", type=Path, default=GSM8K, help="a JSON object a line: question, answer")
    parser.add_argument("--trained", type=int, default=TRAINED, help="updates before the measurement")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    made = result.made_with(["transformers", "accelerate", "lightning"])
    drawn = samples(asked.gsm8k, (NUM_UPDATES + asked.trained) * UPDATE)
    given, rest = drawn[: NUM_UPDATES * UPDATE], drawn[NUM_UPDATES * UPDATE :]
    found = {"claim": str(__doc__).partition("\n")[0], "data": "GSM8K, answers are the targets", "update": UPDATE,
             "updates_before": asked.trained, "rows": measure(given, trained(rest))}  # fmt: skip
    print(result.write(result.dated("gradient_error"), found | made))


if __name__ == "__main__":
    main()

"""The trainer's own CPU time: to its first update, and of each update beside forward, backward and step.

A fresh process runs recipes/stdlib.toml with a tiny model from tokenized data. Another one imports torch and
transformers, and makes one update of such a model by hand: what any trainer of transformers' models takes. Repeats are
interleaved; numbers are medians. Writes benchmarks/results/trainer_host_*.json.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import result

NUM_REPEATS, WARMUP, UPDATES = 5, 20, 500
WIDTHS = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
TINY = {f"model.config.{key}": value for key, value in {**WIDTHS, "num_key_value_heads": 1}.items()}
RECIPE = {**TINY, "data.pack_tokens": 64, "update.micro_batch_size": 8, "eval.num_samples": 0, "run.save_every": "none"}
PLAIN = """
import time
import torch
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(LlamaConfig(vocab_size=384, **{widths!r}))
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(0, 384, (8, 64))  # [B, T]
model(tokens, labels=tokens).loss.backward()
optimizer.step()
print(time.process_time())
"""


class Clock:
    """CPU seconds of this process that pass inside some functions."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.process_time() - start

        return call

    def timed_items(self, name: str, items: Iterator[Any]) -> Iterator[Any]:
        following = self.timed(name, lambda: next(items, None))
        while (item := following()) is not None:
            yield item


def train(folder: str) -> dict[str, float]:
    """Train in this process; return CPU seconds to the first update, and milliseconds of an update."""
    from megabatch.__main__ import main as megabatch
    from megabatch.train import loop

    clock, times = Clock(), list[tuple[float, dict[str, float]]]()
    loop.load_data = clock.timed("data", loop.load_data)
    make_update, remaining_updates = loop.make_update, loop.remaining_updates

    def make(context: Any, batch: Any) -> None:
        if not times:
            context.learner.forward_backward = clock.timed("forward_backward", context.learner.forward_backward)
            context.learner.optim_step = clock.timed("step", context.learner.optim_step)
        make_update(context, batch)
        times.append((time.process_time(), dict(clock.seconds)))

    def remaining(context: Any) -> Iterator[Any]:
        return remaining_updates(context) if times else clock.timed_items("samples", remaining_updates(context))

    loop.make_update, loop.remaining_updates = make, remaining
    values = {**RECIPE, "run.folder": folder, "run.max_steps": UPDATES}
    sys.argv = ["megabatch", "train", str(result.ROOT / "recipes" / "stdlib.toml")]
    sys.argv += [f"--{key}={value}" for key, value in values.items()]
    with suppress(SystemExit):  # its status is the run's; a run without its updates has no times
        megabatch()
    (first, at_first), (begun, before), (ended, after) = times[0], times[WARMUP], times[-1]
    own = {key: 1000 * (after[key] - before[key]) / (UPDATES - 1 - WARMUP) for key in after}
    whole = 1000 * (ended - begun) / (UPDATES - 1 - WARMUP)
    parts = {f"{key}_ms": own[key] for key in ("forward_backward", "step", "samples")}
    return {
        "start_s": first - at_first["data"],
        "start_data_s": at_first["data"],
        **parts,
        "beside_ms": whole - sum(parts.values()),
    }


def output_of(arguments: list[str]) -> str:
    """Return the last line that a fresh process prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(result.ROOT)}
    found = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=True)
    return found.stdout.splitlines()[-1]


def main() -> None:
    """Run, print and write the result beside what it was measured with."""
    made_with, repeats = result.made_with(["transformers", "tensorboard", "datasets"]), list[dict[str, float]]()
    for _ in range(NUM_REPEATS + 1):
        with TemporaryDirectory() as folder:
            plain = float(output_of(["-c", PLAIN.format(widths=WIDTHS)]))
            repeats.append({"plain_start_s": plain, **json.loads(output_of(["-m", "benchmarks.trainer_host", folder]))})
    rows = {name: round(statistics.median(each[name] for each in repeats[1:]), 3) for name in repeats[0]}
    for name, number in rows.items():
        print(f"{name:20} {number:7.3f}")
    claim = (
        "without reading data, a run begins within a second of torch and transformers; "
        "its updates cost half a millisecond more"
    )
    found = {"claim": claim, **made_with, "rows": rows, "repeats": repeats[1:]}
    print(result.write(result.dated("trainer_host"), found))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(train(str(Path(sys.argv[1]) / "run"))))
    else:
        main()

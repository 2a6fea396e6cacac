"""A torchtune recipe's training loop on a tiny Llama: `python -m tests.integrations.tune_runs RECIPE OUT [seconds]`.

The recipe's `setup` reads a checkpoint and a tokenizer of the hub, so its attributes are given here instead.
`train` and `_loss_step` are the recipe's.
"""

import contextlib
import importlib.util
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchtune.models.llama3 import llama3
from torchtune.modules.loss import CEWithChunkedOutputLoss

from megabatch import LossContractError

IGNORED, STEPS = -100, 4
Batch = dict[str, Tensor]


def padded(samples: list[list[int]]) -> Batch:
    """As the recipe's collate function: padded on the right, every token a target, also the first."""
    longest = max(map(len, samples))
    tokens, labels = (torch.full((len(samples), longest), fill) for fill in (0, IGNORED))
    for row, sample in enumerate(samples):
        tokens[row, : len(sample)] = labels[row, : len(sample)] = torch.tensor(sample)
    return {"tokens": tokens, "labels": labels}


def run(
    path: Path, batches: list[Batch], loss: Any, *, steps: int = STEPS, width: int = 16, at_step: Any = None
) -> tuple[list[list[Tensor]], Any]:
    """Train for an epoch. Return the gradient of each update, and the recipe; ``at_step`` is called in its place."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model = llama3(vocab_size=64, num_layers=2, num_heads=2, num_kv_heads=2, embed_dim=width, max_seq_len=256)
    model.to(torch.float64 if at_step is None else torch.float32).set_num_output_chunks(loss.num_output_chunks)
    optimizer, gradients = torch.optim.SGD(model.parameters(), lr=0.0), []

    def note(*_: Any) -> None:
        gradients.append([each.grad.clone() for each in model.parameters()])

    optimizer.register_step_pre_hook(at_step or note)
    loader = DataLoader(batches, batch_size=None, sampler=DistributedSampler(batches, 1, 0, shuffle=False))
    recipe = object.__new__(module.FullFinetuneRecipeSingleDevice)
    vars(recipe).update(
        _model=model, _optimizer=optimizer, _dataloader=loader, _loss_fn=loss, _device=torch.device("cpu"),
        _gradient_accumulation_steps=steps, _clip_grad_norm=None, _optimizer_in_bwd=False, _compile=False,
        _lr_scheduler=None, _profiler=SimpleNamespace(start=int, step=int, stop=int), _log_every_n_steps=1,
        _log_peak_memory_stats=False, _metric_logger=SimpleNamespace(log_dict=lambda *_, **__: None), epochs_run=0,
        total_epochs=1, _steps_per_epoch=len(batches) // steps,
        max_steps_per_epoch=None, global_step=0, profiler_profile_memory=False,
        activations_handling_ctx=contextlib.nullcontext(), ignore_labels_cache=torch.full((8, 1), IGNORED),
        save_checkpoint=lambda epoch: None,
    )  # fmt: skip
    recipe.train()
    return gradients, recipe


def uncut(model: Any, batches: list[Batch]) -> list[Tensor]:
    """The gradient of all batches, in plain torch: the sum of all over the number of targets."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for each in batches:
        logits, labels = torch.cat(model(each["tokens"]), dim=1)[:, :-1], each["labels"][:, 1:]
        total = total + torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count += int((labels != IGNORED).sum())
    return list(torch.autograd.grad(total / count, list(model.parameters())))


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error of a parameter's gradient."""
    return max(float((mine - right).norm() / right.norm()) for mine, right in zip(found, expected, strict=True))


class InDouble(CEWithChunkedOutputLoss):
    """torchtune's loss without its cast to float32."""

    def compute_cross_entropy(self, logits: Tensor, labels: Tensor, normalize: bool = True) -> Tensor:
        return torch.nn.functional.cross_entropy(logits, labels, ignore_index=self.ignore_index, reduction="sum")


def times(path: Path, rows: int) -> list[tuple[float, float]]:
    """The CPU time, and the time, at each of six updates of 32 samples of 2 to 200 tokens."""
    generator, num_updates, of_update = torch.Generator().manual_seed(1), 6, 32
    lengths = torch.empty(num_updates * of_update).log_normal_(3.0, 1.0, generator=generator).clamp(2, 200).int()
    samples = [torch.randint(1, 64, (int(length),), generator=generator).tolist() for length in lengths]
    batches = [padded(samples[first : first + rows]) for first in range(0, len(samples), rows)]
    found = []
    run(path, batches, CEWithChunkedOutputLoss(), steps=of_update // rows, width=96,
        at_step=lambda *_: found.append((time.process_time(), time.perf_counter())))  # fmt: skip
    assert len(found) == num_updates
    return found


def main(path: Path, out: Path) -> None:
    """Write the errors of both updates: one of four microbatches, and an epoch's tail of two."""
    torch.manual_seed(1)
    lengths = [(3, 30), (5, 4), (40, 7), (3, 3), (12, 20), (4, 3)]
    batches = [padded([torch.randint(1, 64, (length,)).tolist() for length in pair]) for pair in lengths]
    void = [{**each, "labels": torch.full_like(each["labels"], IGNORED)} for each in batches[:STEPS]]

    def given(chosen: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**each} for each in chosen]  # the recipe pops the labels

    gradients, recipe = run(path, given(batches), InDouble())
    updates = [batches[:STEPS], batches[STEPS:]]
    errors = [distance(found, uncut(recipe._model, each)) for found, each in zip(gradients, updates, strict=False)]
    try:
        told = f"{len(run(path, given(void), InDouble())[0])} updates"
    except LossContractError as error:
        told = str(error)
    out.write_text(json.dumps({"errors": errors, "without_targets": told}))


if __name__ == "__main__":
    if sys.argv[3:] == ["seconds"]:
        torch.set_num_threads(1)
        Path(sys.argv[2]).write_text(json.dumps({rows: times(Path(sys.argv[1]), rows) for rows in (1, 2, 4, 8)}))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))

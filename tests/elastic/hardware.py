"""Faults of one rank's hardware, planted in updates of a small model, and what the check says of them.

`python -m tests.elastic.hardware` plants sixty under DDP and sixty under FSDP2, measures what the check costs, and
writes hardware.json.
"""

import importlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, Learner, MegabatchError, losses
from megabatch.train.callbacks.hardware_check import HardwareCheck
from megabatch.train.context import Callback, Callbacks, RunContext
from megabatch.train.loop import make_update
from megabatch.train.model.build import ParallelModel
from megabatch.train.parallel.wrap import WrapperChoice
from megabatch.train.runtime.ranks import Ranks
from tests.train.contexts import config_of, context_of
from tests.train.on_ranks import on_ranks

KINDS = {
    "ddp": ("weight", "summand", "sum", "forward"),
    "fsdp2": ("summand", "sum", "forward"),  # a weight that one rank holds is the same wrong one on all
}
WIDTH, VOCABULARY = 24, 32
RESULT = Path(__file__).with_suffix(".json")
NUM_RANKS, NUM_FAULTS = 3, 60
EVERY = (10, 100)  # updates, of which the last is checked


@dataclass(frozen=True)
class Fault:
    """A bit that is flipped on one rank: of any weight, or of the largest element of a gradient.

    "summand": of a layer's output, before ranks add theirs. "sum": of a parameter, afterwards.

    "forward": the output of a layer is a little off, whenever this rank computes it.
    """

    kind: str
    rank: int
    parameter: int
    element: int
    bit: int


class Model(nn.Module):
    """Logits of the next token by an embedding and two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


class Planted(Callback):
    """Plants a fault in the update itself, once: the check's own forwards and backwards are whole."""

    fault: Fault | None = None

    def around_backward(self, context: RunContext, batch: Sequence[Any], forward_backward: Callable[..., Any]) -> None:
        fault = self.fault if self.fault is not None and self.fault.rank == context.ranks.rank else None
        base = context.model.base
        if fault is not None and fault.kind == "summand":
            left, layer = [fault], base.layers[fault.parameter % 2]

            def flip_gradient(_: Any, __: Any, output: Tensor) -> None:
                output.register_hook(lambda gradient: flipped(gradient, left.pop()) if left else gradient)

            hook = layer.register_forward_hook(flip_gradient)
            forward_backward(batch)
            hook.remove()
        else:
            forward_backward(batch)
        if fault is not None and fault.kind == "sum":
            gradient = list(base.parameters())[fault.parameter].grad
            assert gradient is not None
            flip(gradient, fault)


def flipped(tensor: Tensor, fault: Fault) -> Tensor:
    """A copy with one bit of one element flipped."""
    changed = tensor.detach().clone().contiguous()
    flip(changed, fault)
    return changed


def flip(tensor: Tensor, fault: Fault) -> None:
    """Flip a bit in place, as a fault of memory does: torch does not know of it."""
    flat = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().view(-1)
    place = fault.element % len(flat) if fault.kind == "weight" else int(flat.abs().argmax())
    bits = flat.numpy().view("uint32")
    bits[place] ^= 1 << fault.bit


def samples_of(draw: torch.Generator, rank: int, step: int, longer: int = 1) -> list[dict[str, Tensor]]:
    """A rank's samples of an update: other numbers of them and other lengths on each."""
    found = []
    for _ in range(3 + (rank + step) % 3):
        ids = torch.randint(VOCABULARY, (longer * int(torch.randint(4, 20, (), generator=draw)),), generator=draw)
        found.append({"input_ids": ids, "labels": ids.clone()})
    return found


def context_on(
    ranks: Ranks, dtype: torch.dtype, every: int | None, wrapper: str = "ddp", width: int = WIDTH
) -> tuple[RunContext, Planted]:
    torch.manual_seed(0)
    model = Model(width).to(dtype)
    if wrapper == "fsdp2":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    run = DistributedDataParallel(model) if ranks.size > 1 and wrapper == "ddp" else model
    gradient = GradientAccumulator(run, micro_batch_size=2)
    learner = Learner(run, torch.optim.SGD(model.parameters(), lr=0.05), gradient, max_norm=1.0)
    config = config_of(
        model={"config": {}, "dtype": str(dtype).removeprefix("torch.")}, run={"check_hardware_every": every}
    )
    parallel_model = ParallelModel(run, model, WrapperChoice(wrapper, ""), [], [], {})
    context = context_of(learner, losses.next_token, ranks=ranks, config=config, parallel_model=parallel_model)
    planted = Planted()
    context.callbacks = Callbacks([planted, *([HardwareCheck(context)] if every else [])])
    return context, planted


def healthy(ranks: Ranks, dtype: str, num: int, wrapper: str = "ddp") -> list[str]:
    """The findings of the check on updates without a fault."""
    context, _ = context_on(ranks, getattr(torch, dtype), 1, wrapper)
    draw, said = torch.Generator().manual_seed(ranks.rank), list[str]()
    for step in range(num):
        try:
            make_update(context, samples_of(draw, ranks.rank, step))
        except MegabatchError as error:
            said.append(str(error))
    return said


def faults(seed: int, wrapper: str, num_ranks: int, num: int) -> list[Fault]:
    """Any bit of weights, and of gradients one of the exponent: others are rounding."""
    draw = Random(seed)
    found = []
    for number in range(num):
        kind = KINDS[wrapper][number % len(KINDS[wrapper])]
        bit = draw.randrange(32) if kind == "weight" else draw.randrange(24, 31)
        found.append(Fault(kind, draw.randrange(num_ranks), draw.randrange(7), draw.randrange(10_000), bit))
    return found


def found_by(ranks: Ranks, planted: list[Fault], wrapper: str) -> list[str]:
    """The findings of the check on each fault, in the second update of a run of its own; "" for nothing."""
    return [words_of(ranks, fault, wrapper) for fault in planted]


def words_of(ranks: Ranks, fault: Fault, wrapper: str) -> str:
    context, planting = context_on(ranks, torch.float32, 1, wrapper)
    draw, base = torch.Generator().manual_seed(ranks.rank), context.model.base
    make_update(context, samples_of(draw, ranks.rank, 0))
    if fault.rank == ranks.rank and fault.kind == "weight":
        flip(list(base.parameters())[fault.parameter], fault)
    if fault.rank == ranks.rank and fault.kind == "forward":
        base.layers[fault.parameter % 2].register_forward_hook(lambda _, __, output: output * 1.01)
    planting.fault, before = fault, bits_of(base)
    try:
        make_update(context, samples_of(draw, ranks.rank, 1))
    except MegabatchError as error:
        same = all(map(torch.equal, before, bits_of(base)))
        return str(error) if same else f"after the step: {error}"
    return ""


def bits_of(model: nn.Module) -> list[Tensor]:
    """Copies of the weights that this rank has, as whole numbers."""
    parts = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
    return [each.detach().clone().view(torch.int32) for each in parts]


def is_named(fault: Fault, said: Sequence[str]) -> bool:
    """Return True if every rank has named the rank of a fault, before the step."""
    start = f"a fault of the hardware at rank {fault.rank} of {len(said)}, found in update 2: "
    return len(set(said)) == 1 and said[0].startswith(start)


def cpu_seconds(ranks: Ranks, every: int | None, num: int) -> float:
    """Seconds that the processors have worked on some updates, on all ranks."""
    context, _ = context_on(ranks, torch.float32, every, width=256)
    draw = torch.Generator().manual_seed(ranks.rank)
    batches = [samples_of(draw, ranks.rank, step, longer=8) for step in range(num)]
    started = process_time()
    for batch in batches:
        make_update(context, batch)
    return ranks.sum([process_time() - started])[0]


def costs(ranks: Ranks) -> list[float]:
    """The part of a run's processor time that the check takes, for each of `EVERY`: the median of three in turn."""
    cpu_seconds(ranks, 1, 2)
    found = [[cpu_seconds(ranks, every, 100) for every in (None, *EVERY)] for _ in range(3)]
    return [median(of_all[number + 1] / of_all[0] - 1 for of_all in found) for number in range(len(EVERY))]


def main() -> None:
    result: dict[str, Any] = {"command": "python -m tests.elastic.hardware", "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as place:
        for wrapper in KINDS:
            planted = faults(NUM_FAULTS, wrapper, NUM_RANKS, NUM_FAULTS)
            said = [*zip(*on_ranks(NUM_RANKS, Path(place), found_by, planted, wrapper), strict=True)]
            result[wrapper] = {
                "planted": NUM_FAULTS,
                "found": sum(all(each) for each in said),
                "named": sum(map(is_named, planted, said)),
            }
        found = on_ranks(NUM_RANKS, Path(place), costs)[0]
    result["cost_percent_of_cpu_seconds"] = {
        every: round(100 * each, 2) for every, each in zip(EVERY, found, strict=True)
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    importlib.import_module("tests.elastic.hardware").main()  # ranks find no function of __main__

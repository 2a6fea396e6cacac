"""Faults of one rank's hardware, planted in updates of a small model under DDP, and what the check says of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, Learner, MegabatchError, losses
from megabatch.train.callbacks.hardware_check import HardwareCheck
from megabatch.train.context import Callback, Callbacks, RunContext
from megabatch.train.loop import make_update
from megabatch.train.model.build import ParallelModel
from megabatch.train.parallel.wrap import Wrapper
from megabatch.train.runtime.ranks import Ranks
from tests.train.contexts import config_of, context_of

KINDS = ("weight", "summand", "sum", "forward")
WIDTH, VOCABULARY = 24, 32


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

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

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
    flat = tensor.detach().view(-1)
    place = fault.element % len(flat) if fault.kind == "weight" else int(flat.abs().argmax())
    bits = flat.numpy().view("uint32")
    bits[place] ^= 1 << fault.bit


def samples_of(draw: torch.Generator, rank: int, step: int) -> list[dict[str, Tensor]]:
    """A rank's samples of an update: other numbers of them and other lengths on each."""
    found = []
    for _ in range(3 + (rank + step) % 3):
        ids = torch.randint(VOCABULARY, (int(torch.randint(4, 20, (), generator=draw)),), generator=draw)
        found.append({"input_ids": ids, "labels": ids.clone()})
    return found


def context_on(ranks: Ranks, dtype: torch.dtype, every: int | None, width: int = WIDTH) -> tuple[RunContext, Planted]:
    torch.manual_seed(0)
    model = Model().to(dtype)
    ddp = DistributedDataParallel(model) if ranks.size > 1 else model
    gradient = GradientAccumulator(ddp, micro_batch_size=2)
    learner = Learner(ddp, torch.optim.SGD(model.parameters(), lr=0.05), gradient, max_norm=1.0)
    config = config_of(
        model={"config": {}, "dtype": str(dtype).removeprefix("torch.")}, run={"check_hardware_every": every}
    )
    laid = ParallelModel(ddp, model, Wrapper("ddp", ""), [], [], {})
    context = context_of(learner, losses.next_token, ranks=ranks, config=config, laid=laid)
    planted = Planted()
    context.callbacks = Callbacks([planted, *([HardwareCheck(context)] if every else [])])
    return context, planted


def healthy(ranks: Ranks, dtype: str, num: int) -> list[str]:
    """The findings of the check on updates without a fault."""
    context, _ = context_on(ranks, getattr(torch, dtype), 1)
    draw, said = torch.Generator().manual_seed(ranks.rank), list[str]()
    for step in range(num):
        try:
            make_update(context, samples_of(draw, ranks.rank, step))
        except MegabatchError as error:
            said.append(str(error))
    return said


def faults(seed: int, num_ranks: int, num: int) -> list[Fault]:
    """Any bit of weights, and of gradients one of the exponent: others are rounding."""
    draw = Random(seed)
    found = []
    for number in range(num):
        kind = KINDS[number % len(KINDS)]
        bit = draw.randrange(32) if kind == "weight" else draw.randrange(24, 31)
        found.append(Fault(kind, draw.randrange(num_ranks), draw.randrange(7), draw.randrange(10_000), bit))
    return found


def found_by(ranks: Ranks, planted: list[Fault]) -> list[str]:
    """The findings of the check on each fault, in the second update of a run of its own; "" for nothing."""
    return [words_of(ranks, fault) for fault in planted]


def words_of(ranks: Ranks, fault: Fault) -> str:
    context, planting = context_on(ranks, torch.float32, 1)
    draw, base = torch.Generator().manual_seed(ranks.rank), context.model.base
    make_update(context, samples_of(draw, ranks.rank, 0))
    if fault.rank == ranks.rank and fault.kind == "weight":
        flip(list(base.parameters())[fault.parameter], fault)
    if fault.rank == ranks.rank and fault.kind == "forward":
        base.layers[fault.parameter % 2].register_forward_hook(lambda _, __, output: output * 1.01)
    planting.fault, before = fault, [each.detach().clone() for each in base.parameters()]
    try:
        make_update(context, samples_of(draw, ranks.rank, 1))
    except MegabatchError as error:
        same = [torch.equal(one.view(torch.int32), two.view(torch.int32))
                for one, two in zip(before, base.parameters(), strict=True)]  # fmt: skip
        return str(error) if all(same) else f"after the step: {error}"
    return ""


def seconds(ranks: Ranks, every: int | None, num: int) -> float:
    """Seconds of some updates."""
    context, _ = context_on(ranks, torch.float32, every)
    draw = torch.Generator().manual_seed(ranks.rank)
    batches = [samples_of(draw, ranks.rank, step) for step in range(num)]
    ranks.barrier()
    started = perf_counter()
    for batch in batches:
        make_update(context, batch)
    ranks.barrier()
    return perf_counter() - started


def cost(ranks: Ranks, every: int, num: int) -> float:
    """The part of a run's time that the check takes, at its best of five."""
    pairs = [(seconds(ranks, None, num), seconds(ranks, every, num)) for _ in range(5)]
    return min(two for _, two in pairs) / min(one for one, _ in pairs) - 1

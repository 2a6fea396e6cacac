"""Deferred batches: cells that are run with each, how often each sample was loaded, and how many microbatches lived."""

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megabatch import GradientAccumulator, LossContractError, PlanError
from megabatch.batching.samples import Deferred, pad_right
from tests.exact import harness, oracle
from tests.exact.cells import Cell
from tests.unit import small


class Microbatch(dict[str, torch.Tensor]):
    """One that a weak reference can be kept of."""


class Census:
    """A collate function that knows how many of its microbatches were alive at once."""

    def __init__(self) -> None:
        self._changes: list[int] = []  # appending is atomic, whichever thread does it

    def __call__(self, samples: list[Any]) -> Microbatch:
        made = Microbatch(pad_right(samples))
        self._changes.append(1)
        weakref.finalize(made, self._changes.append, -1)
        return made

    @property
    def most(self) -> int:
        return max(itertools.accumulate(self._changes, initial=0))


def counted(samples: Sequence[Any], loads: list[int], **told: Any) -> Deferred:
    """The samples, deferred; the indices that are loaded are appended to ``loads``."""

    def load(index: int) -> Any:
        loads.append(index)
        return samples[index]

    return Deferred(load, [harness.length(sample) for sample in samples], **told)


class DeferredRun(harness.CellRun):
    """A cell whose batches are deferred, with weights told where the loss counts one number."""

    def __init__(self, cell: Cell, told: bool, look_ahead: int) -> None:
        self.told, self.look_ahead = told, look_ahead
        self.census = Census()
        self.loads: list[tuple[int, list[int]]] = []  # of each call: samples of this rank, and what was loaded
        super().__init__(cell)

    def bound(self, updates: list[list[harness.Call]]) -> dict[str, Any]:
        return super().bound(updates) | {"collate": self.census}

    def batch(self, call: harness.Call) -> Deferred:
        share = call[self.rank]
        self.loads.append((len(share), []))
        weights = [int(self.weights(oracle.collate([sample]))["loss"]) for sample in share]
        told = weights if self.told else None
        return counted(share, self.loads[-1][1], weights=told, look_ahead=self.look_ahead)

    def times(self) -> list[int]:
        """How often samples were loaded: the numbers that occur."""
        counts = ([Counter(loads)[index] for index in range(size)] for size, loads in self.loads)
        return sorted(set(itertools.chain.from_iterable(counts)))


def job(name: str) -> Any:
    """A cell, "told or untold;look_ahead;cell", or a mistake of `_refused`."""
    return _run_cell(name) if ";" in name else _refused(name)


def _run_cell(name: str) -> dict[str, Any]:
    told, look_ahead, cell = name.split(";")
    this = DeferredRun(Cell.parse(cell), told == "told", int(look_ahead))
    return harness.run(this) | {"times": this.times(), "most": this.census.most}


def _told(work: Callable[[], Any]) -> str:
    try:
        work()
    except (PlanError, LossContractError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _broken(index: int) -> Any:
    raise OSError(f"sample {index} is gone")


def _refused(name: str) -> list[str]:
    """Rank 1 is told of its own mistake and rank 0 of rank 1's; then both run an update that is right."""
    here = dist.get_rank() == 1
    model = small.model_of_integers()
    samples = small.samples([3, 1, 4])
    lengths, weights = [len(sample["x"]) for sample in samples], [3, 1, 4]
    load = _broken if here else samples.__getitem__
    batches = {
        "load": Deferred(load, lengths),
        "weights": Deferred(samples.__getitem__, lengths, [3, 1, -4] if here else weights),
        "dummy microbatch": Deferred(load, lengths, weights)
        if here
        else [],  # rank 0 needs a sample and has never had one
        "told wrong": Deferred(samples.__getitem__, lengths, [3, 1, 5] if here else weights),  # seen at the end
    }
    gradient = GradientAccumulator(model, micro_batch_size=1)

    def update(batch: Any) -> None:
        gradient.forward_backward(batch, small.weighed)
        gradient.finalize()

    told = _told(lambda: update(batches[name]))
    dropped = all(each is None for each in small.gradients(model))
    update(Deferred(samples.__getitem__, lengths, weights))
    right = small.same_bits(small.gradients(model), small.expected(model, samples + samples))
    return [told, "no gradient" if dropped else "a gradient", "right" if right else "wrong"]

"""A deferred batch has the gradient of the same batch at once; what it loads, and when, is as it says."""

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabatch import GradientAccumulator, LossContractError, PlanError, loss, verify
from megabatch.batching.deferred import Deferred
from megabatch.core.right_padding import pad_right
from tests.exact import harness, oracle
from tests.exact.cells import MAIN, Cell
from tests.exact.launch import of_ranks
from tests.exact.test_exact import check
from tests.tiers import some
from tests.unit import small
from tests.unit.failures.table import names
from tests.unit.small import count, expected, gradients, model_of_integers, same_bits, samples, squares, weighed


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
        kept = {"kept_bytes": 0} if self.look_ahead == 1 else {}
        return counted(share, self.loads[-1][1], weights=told, look_ahead=self.look_ahead, **kept)

    def times(self) -> list[int]:
        """Return the numbers of times that samples were loaded."""
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


TARGETS = [3, 1, 0, 5, 2, 4, 1]  # 16 in 7 samples
BATCH = samples(TARGETS)
LENGTHS = [len(sample["x"]) for sample in BATCH]
ROWS = (  # told, look_ahead, case, kind, loss, bound, way
    ("told", 1, "uneven-ranks", "list", "weigh", "one-sample", "forward_backward"),
    ("told", 2, "C-R", "list", "weigh", "tokens", "forward_backward"),
    ("told", 0, "short-tail", "images", "weigh", "one-sample", "forward_backward"),
    ("told", 1, "calls-empty-ranks", "list", "mixed", "two-samples", "forward_backward"),
    ("told", 3, "empty-first-rank", "list", "weigh", "two-samples", "forward_backward"),
    ("untold", 1, "C4c", "list", "weigh", "two-samples", "forward_backward"),
    ("untold", 1, "uneven-ranks", "list", "late", "two-samples", "forward_backward"),
    ("untold", 2, "fewer-than-ranks", "list", "terms", "one-sample", "forward_backward"),
)  # fmt: skip
JOBS = [
    f"{told};{look_ahead};bits:{wrapper}:2:auto:{case}:{kind}:{loss}:{bound}:{way}:no-clip"
    for told, look_ahead, case, kind, loss, bound, way in ROWS
    for wrapper in MAIN
]
GONE = ("OSError: sample 2 is gone", "PlanError: data rank 1 of 2: OSError: sample 2 is gone")
NEGATIVE = "sample 2 … -4"
DIFFER = "LossContractError: … counted 9 … weight 8 … data rank 1 of 2"
REFUSED = {  # what rank 1, where the mistake is, and rank 0 are told
    "load": GONE,
    "dummy microbatch": GONE,
    "weights": (f"PlanError: … {NEGATIVE}", f"PlanError: data rank 1 of 2 … {NEGATIVE}"),
    "told wrong": (DIFFER, DIFFER),
}


def accumulator(**settings: Any) -> GradientAccumulator:
    return GradientAccumulator(model_of_integers(), **{"micro_batch_size": 2, **settings})


def no_thread_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("megabatch")]


of_two_ranks = of_ranks("tests.exact.test_deferred:job", {2: [*JOBS, *REFUSED]})


@pytest.mark.slow
@pytest.mark.parametrize("job", some(JOBS, 2))
def test_same_bits_loads_and_memory_on_two_ranks(of_two_ranks, job):
    told, look_ahead, name = job.split(";")
    cell = Cell.parse(name)
    keeps = told == "untold" and cell.loss != "late" and look_ahead != "1"
    times = {1} if told == "told" or cell.loss == "late" or keeps else {1, 2}  # the last sample is kept
    for result in of_two_ranks.results(job):
        check(cell, result)
        found = result["value"]
        assert set(found["times"]) <= times
        assert keeps or found["most"] <= int(look_ahead) + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_on_one_rank_is_told_to_both(of_two_ranks, name):
    own, other = REFUSED[name]
    for (told, gradient, then), expected_text in zip(of_two_ranks(name), (other, own), strict=True):
        assert names(told, expected_text)
        assert (gradient, then) == ("no gradient", "right")


@pytest.mark.parametrize("look_ahead", [0, 1, 2, 99])
@pytest.mark.parametrize("told", [None, TARGETS])
@pytest.mark.parametrize("loss_fn", [weighed, squares])
@pytest.mark.parametrize("kept_bytes", [0, 400, 2**20])  # for no microbatch, some, and all
def test_same_bits_loads_and_memory(look_ahead, told, loss_fn, kept_bytes):
    census, loads = Census(), []
    gradient = accumulator(collate=census)
    gradient.forward_backward(
        counted(BATCH, loads, weights=told, look_ahead=look_ahead, kept_bytes=kept_bytes), loss_fn
    )
    gradient.finalize()
    assert same_bits(gradients(gradient.model), expected(gradient.model, BATCH))
    is_early = told is None and loss_fn is weighed
    twice = set(range(6)) if is_early and kept_bytes == 0 else set()  # the last sample is kept
    if is_early and kept_bytes == 400:
        twice = {each for each in loads if loads.count(each) == 2}
        assert 0 < len(twice) < 6
    assert sorted(loads) == sorted([*range(7), *twice])
    assert is_early or census.most <= look_ahead + 1
    assert kept_bytes or census.most <= look_ahead + 1
    assert no_thread_is_left()


def test_to_plan_loads_nothing():
    loads: list[int] = []
    batch = counted(BATCH, loads, weights=TARGETS)
    assert accumulator().plan(batch) == accumulator().plan(BATCH)
    assert loads == []


def test_the_next_microbatch_is_made_while_one_runs():
    arrived = [threading.Event() for _ in BATCH]
    waited: list[bool] = []
    gradient = accumulator()
    order = gradient.plan(BATCH).microbatches

    def load(index: int) -> Any:
        arrived[index].set()
        return BATCH[index]

    def waiting(model, microbatch):
        now = len(waited)
        waited.append(all(arrived[row].wait(10) for rows in order[: now + 2] for row in rows))
        far = [row for rows in order[now + 2 :] for row in rows]
        assert not any(arrived[row].is_set() for row in far)
        return squares(model, microbatch)

    gradient.forward_backward(Deferred(load, LENGTHS, TARGETS), loss(weigh=count)(waiting))
    assert waited == [True] * 4


def test_a_load_that_raises_in_the_middle_leaves_nothing():
    gradient = accumulator()
    broken = gradient.plan(BATCH).microbatches[2][0]

    def load(index: int) -> Any:
        if index == broken:
            raise OSError("the disk is gone")
        return BATCH[index]

    with pytest.raises(OSError, match="the disk is gone"):
        gradient.forward_backward(Deferred(load, LENGTHS, TARGETS), weighed)
    assert all(each is None for each in gradients(gradient.model))
    assert no_thread_is_left()
    gradient.forward_backward(Deferred(BATCH.__getitem__, LENGTHS, TARGETS), weighed)
    gradient.finalize()
    assert same_bits(gradients(gradient.model), expected(gradient.model, BATCH))


def test_a_loss_that_raises_ends_the_thread():
    gradient, loads = accumulator(), []

    def broken(model, microbatch):
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError):
        gradient.forward_backward(counted(BATCH, loads), broken)
    assert no_thread_is_left()
    assert set(loads) <= {row for rows in gradient.plan(BATCH).microbatches[:2] for row in rows}


@pytest.mark.parametrize("told", [[4, *TARGETS[1:]], [0] * 7, [*TARGETS[:-1], 2]])
def test_a_wrong_weight_is_an_error(told):
    gradient = accumulator()
    batch = Deferred(BATCH.__getitem__, LENGTHS, told)
    with pytest.raises(LossContractError, match=r"weigh counted \d+ from the data but the loss returned"):
        gradient.forward_backward(batch, weighed)
    assert all(each is None for each in gradients(gradient.model))


def test_it_is_a_sequence_and_can_be_verified():
    batch = Deferred(BATCH.__getitem__, LENGTHS)
    assert (len(batch), batch[-1] is BATCH[-1]) == (7, True)
    assert [each is other for each, other in zip(batch[1:3], BATCH[1:3], strict=True)] == [True, True]
    assert all(map(torch.equal, [each["x"] for each in batch], [each["x"] for each in BATCH]))
    assert verify(model_of_integers(), weighed, batch).ok

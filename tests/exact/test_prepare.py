"""A batch that was prepared before its call has the gradient of the same batch; one that was changed, its own."""

import copy
import functools
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megabatch import GradientAccumulator, JointLoss, LossContractError, PlanError, loss, losses
from megabatch.batching import early_preparation
from megabatch.batching.samples import Deferred, pad_right
from megabatch.errors import MicrobatchLimit
from tests.exact import harness
from tests.exact.cells import MAIN, Cell
from tests.exact.launch import of_ranks
from tests.exact.test_exact import check
from tests.tiers import some
from tests.unit import small
from tests.unit.failures.table import names
from tests.unit.small import count, expected, gradients, model_of_integers, same_bits, samples, squares

THREAD = "megabatch-prepare"
TARGETS = [3, 1, 0, 5, 2, 4, 1]  # 16 in 7 samples
OTHERS = [2, 2, 6, 1, 0, 5]  # 16 in 6


class Preparing(GradientAccumulator):
    """Prepares every batch before its call."""

    def forward_backward(self, batch: Any, loss_fn: Any, *, plan: Any = None) -> Any:
        self.prepare(batch, loss_fn)
        assert len(self._early.batches) == 1
        made = super().forward_backward(batch, loss_fn, plan=plan)
        assert not self._early.batches  # taken
        return made


def finish(gradient: Any) -> None:
    """Wait for the threads."""
    for each in gradient._early.batches:
        each.result()


class Noting:
    """Counts targets, and notes in which threads."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []  # the thread, and the microbatch
        self.prepared: list[Any] = []  # microbatches that the thread has weighed
        self.loss_fn: Any = loss(weigh=self.weigh)(lambda model, microbatch: squares(model, microbatch))

    def weigh(self, microbatch: Any) -> Tensor:
        self.calls.append((threading.current_thread().name.removesuffix("_0"), microbatch))
        return count(microbatch)

    def take(self) -> set[str]:
        """Return the threads since the last time, without the calls that weigh a prepared microbatch again."""
        calls, self.calls = self.calls, []
        self.prepared += [microbatch for thread, microbatch in calls if thread == THREAD]
        known = set(map(id, self.prepared))
        return {thread for thread, microbatch in calls if thread == THREAD or id(microbatch) not in known}


def job(name: str) -> Any:
    """A cell whose calls are all prepared before, or a mistake of one rank."""
    if ":" not in name:
        return _refused()
    harness.GradientAccumulator = Preparing  # pyright: ignore[reportPrivateImportUsage]
    try:
        return harness.run_cell(name)
    finally:
        harness.GradientAccumulator = GradientAccumulator  # pyright: ignore[reportPrivateImportUsage]


def _refused() -> list[Any]:
    """Rank 1 prepares a bad batch while an update is open; both finish that update, and are told in the next call."""
    here = dist.get_rank() == 1
    batch, following = samples([3, 1, 4]), samples([2, 2, 4])
    bad = [*following, {"x": torch.ones(3)}] if here else following
    gradient, told = GradientAccumulator(model_of_integers(), micro_batch_size=2), "nothing"
    gradient.forward_backward(batch, small.weighed)
    gradient.prepare(bad, small.weighed)
    gradient.finalize()
    first = same_bits(gradients(gradient.model), expected(gradient.model, batch + batch))
    try:
        gradient.forward_backward(bad, small.weighed)
    except PlanError as error:
        told = str(error)
    gradient.prepare(following, small.weighed)
    gradient.forward_backward(following, small.weighed)
    gradient.finalize()
    return [first, told, same_bits(gradients(gradient.model), expected(gradient.model, following + following))]


ROWS = (  # case, kind, loss, bound
    ("uneven-ranks", "list", "weigh", "tokens"),
    ("calls-empty-ranks", "list", "mixed", "one-sample"),
    ("C4c", "rows", "terms", "two-samples"),
)
JOBS = {
    world: [f"bits:{wrapper}:{world}:auto:{case}:{kind}:{loss}:{bound}:forward_backward:no-clip"
            for case, kind, loss, bound in ROWS for wrapper in MAIN if case != "calls-empty-ranks" or world > 1]
    for world in (1, 2, 3)
}  # fmt: skip
of_some_ranks = of_ranks("tests.exact.test_prepare:job", {**JOBS, 2: [*JOBS[2], "refused"]})


@pytest.mark.slow
@pytest.mark.parametrize("job", [*some(JOBS[1], 3), *some(JOBS[2], 2), *some(JOBS[3], 4)])
def test_same_bits_on_ranks(of_some_ranks, job):
    for result in of_some_ranks.results(job):
        check(Cell.parse(job), result)


@pytest.mark.slow
def test_a_mistake_on_one_rank_is_told_to_both_in_its_call(of_some_ranks):
    own = "weigh asks for … samples of one batch have the keys … give it to all"
    for (first, told, then), text in zip(of_some_ranks("refused"), (f"data rank 1 of 2: {own}", own), strict=True):
        assert first
        assert names(told, text)
        assert then


def accumulator(**settings: Any) -> GradientAccumulator:
    return GradientAccumulator(model_of_integers(), **{"micro_batch_size": 2, **settings})


def is_right(gradient: GradientAccumulator, batch: list[dict[str, Tensor]]) -> bool:
    return same_bits(gradients(gradient.model), expected(gradient.model, batch))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10  # one that has told its result is about to end
    while any(each.name.startswith("megabatch") for each in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [each for each in threading.enumerate() if each.name.startswith("megabatch")]


@pytest.mark.parametrize("kind", ["list", "rows"])
def test_a_loop_that_prepares_the_next_batch(kind):
    of_shape = [samples([number] * 4) for number in (2, 4, 1, 8)]
    updates = [samples(TARGETS), samples(OTHERS), [], samples(TARGETS)] if kind == "list" else of_shape
    batches: list[Any] = updates if kind == "list" else [pad_right(each) for each in updates]
    gradient, noting = accumulator(), Noting()
    for number, batch in enumerate(batches):
        gradient.forward_backward(batch, noting.loss_fn)
        assert noting.take() == {THREAD if number else "MainThread"} or not len(batch)
        if number + 1 < len(batches):
            gradient.prepare(batches[number + 1], noting.loss_fn)
        gradient.finalize()
        assert not len(batch) or is_right(gradient, updates[number])


def test_two_batches():
    first, second, third = samples(TARGETS), samples(OTHERS), samples(TARGETS)
    gradient, noting = accumulator(), Noting()
    for batch in (third, first, second):  # the last two are kept
        gradient.prepare(batch, noting.loss_fn)
        finish(gradient)
    noting.take()
    gradient.forward_backward(second, noting.loss_fn)
    gradient.forward_backward(first, noting.loss_fn)
    assert {thread for thread, _ in noting.calls} == {"MainThread"}
    assert noting.take() == set()  # prepared microbatches are weighed again, and no others
    noting.take()
    gradient.finalize()
    assert is_right(gradient, first + second)
    gradient.forward_backward(third, noting.loss_fn)
    assert noting.take() == {"MainThread"}


def test_a_weight_that_has_changed_since_is_counted_anew():
    batch, scale, gradient = samples(TARGETS), [1.0], accumulator()

    def weigh(microbatch: Any) -> Any:
        return count(microbatch) * scale[0]

    halved = loss(weigh=weigh)(lambda model, microbatch: (squares(model, microbatch)[0], weigh(microbatch)))
    found: list[Any] = []
    for is_prepared in (False, True):
        scale[0] = 1.0
        if is_prepared:
            gradient.prepare(batch, halved)
            finish(gradient)
        scale[0] = 0.5
        gradient.forward_backward(batch, halved)
        gradient.finalize()
        found.append([None if each is None else each.clone() for each in gradients(gradient.model)])
    assert same_bits(*found)


def test_samples_of_a_class_of_ones_own_are_not_prepared():
    class Lazy(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            return super().__getitem__(name) + (name == "labels")

    gradient = accumulator()
    gradient.prepare([Lazy(each) for each in samples(TARGETS)], squares)
    assert not gradient._early.batches


def test_a_joint_loss_and_a_loss_that_counts_nothing():
    batch = samples(TARGETS)
    joint = JointLoss(lambda model, microbatch: squares_by_sample(model, microbatch), lambda sums: (sums.sum(), 16))
    for loss_fn in (joint, squares):
        gradient = Preparing(model_of_integers(), micro_batch_size=2)
        gradient.forward_backward(batch, loss_fn)
        gradient.finalize()
        assert is_right(gradient, batch)


def squares_by_sample(model: Any, microbatch: Any) -> Tensor:
    errors = (model(microbatch["x"]).squeeze(-1) - microbatch["labels"]) ** 2
    return (errors * (microbatch["labels"] != small.IGNORED)).sum(1)


def write(batch: list[dict[str, Tensor]]) -> None:
    batch[3]["labels"][:2] = small.IGNORED


def replace(batch: list[dict[str, Tensor]]) -> None:
    batch[3]["labels"] = batch[3]["labels"].clone().fill_(1)


def shorten(batch: list[dict[str, Tensor]]) -> None:
    batch[3].update({name: each[:4] for name, each in batch[3].items()})  # in the same memory


def swap_names(batch: list[dict[str, Tensor]]) -> None:
    for each in batch:
        each["spare"], each["labels"] = each.pop("labels"), each.pop("spare")  # the tensors keep their places


def append(batch: list[dict[str, Tensor]]) -> None:
    batch.append(small.sample(9, 8) | {"spare": torch.zeros(9).long()})


def write_data(batch: list[dict[str, Tensor]]) -> None:
    batch[3]["labels"].data = torch.ones_like(batch[3]["labels"])


CHANGES: dict[str, Callable[[list[dict[str, Tensor]]], Any]] = {
    "write": write, "write data": write_data, "shorten": shorten, "replace": replace,
    "swap names": swap_names, "append": append,
    "remove": lambda batch: batch.pop(2), "reverse": lambda batch: batch.reverse(),
}  # fmt: skip


def run_changed(change: Callable[[list[dict[str, Tensor]]], Any]) -> tuple[bool, set[str]]:
    """Change a batch after its preparation. Return if its gradient is right, and the threads that weighed it."""
    batch, noting, gradient = samples(TARGETS), Noting(), accumulator()
    for each in batch:
        each["spare"] = each["labels"].abs()  # what was to be ignored is a target here
    gradient.prepare(batch, noting.loss_fn)
    finish(gradient)
    noting.take()
    change(batch)
    gradient.forward_backward(batch, noting.loss_fn)
    gradient.finalize()
    pairs = zip(gradients(gradient.model), expected(gradient.model, batch), strict=True)  # of an odd weight
    is_near = all(one is other or torch.allclose(one, other, rtol=1e-12, atol=0) for one, other in pairs)
    return is_near, noting.take()


@pytest.mark.parametrize("change", CHANGES)
def test_a_batch_that_was_changed_is_prepared_anew(change):
    assert run_changed(CHANGES[change]) == (True, {"MainThread"})


def test_other_containers_of_the_same_tensors_are_the_same_batch():
    batch = samples(TARGETS)
    gradient, noting = accumulator(), Noting()
    gradient.prepare(batch, noting.loss_fn)
    gradient.forward_backward([dict(each) for each in batch], noting.loss_fn)
    assert noting.take() == {THREAD}
    gradient.finalize()
    assert is_right(gradient, batch)


def test_what_is_in_a_batch_for_a_while_is_not_prepared():
    batch, noting, changed = samples(TARGETS), Noting(), threading.Event()
    gradient = accumulator(length=lambda each: len(each["x"]) * changed.wait(10))
    gradient.prepare(batch, noting.loss_fn)
    kept = [each["labels"] for each in batch]
    for each in batch:
        each["labels"] = torch.zeros_like(each["labels"])
    changed.set()
    finish(gradient)
    for each, labels in zip(batch, kept, strict=True):
        each["labels"] = labels
    gradient.forward_backward(batch, noting.loss_fn)
    assert noting.take() == {THREAD}
    gradient.finalize()
    assert is_right(gradient, batch)


@pytest.mark.parametrize("what", ["writes", "tensors", "names"])
def test_a_comparison_that_leaves_a_part_out_is_seen(monkeypatch, what):
    """Planted: a stale batch is then taken for the one that is given."""
    index, same_as = early_preparation.BatchSnapshot._fields.index(what), early_preparation.BatchSnapshot.same_as
    monkeypatch.setattr(
        early_preparation.BatchSnapshot,
        "same_as",
        lambda self, other: same_as(self, other._replace(**{what: self[index]})),
    )
    stale = {"writes": write, "tensors": shorten, "names": swap_names}[what]
    assert run_changed(stale) == (False, set())


def test_another_loss_limit_or_plan_is_prepared_anew():
    batch, other = samples(TARGETS), Noting()
    for settle in (
        lambda gradient, noting: gradient.forward_backward(batch, other.loss_fn),
        lambda gradient, noting: gradient.forward_backward(batch, noting.loss_fn, plan=gradient.plan(batch)),
        lambda gradient, noting: (
            gradient.lower_limit(MicrobatchLimit(1, 100)), gradient.forward_backward(batch, noting.loss_fn)
        ),
    ):  # fmt: skip
        gradient, noting = accumulator(), Noting()
        gradient.prepare(batch, noting.loss_fn)
        settle(gradient, noting)
        limit = gradient.oom_limit
        assert max(map(len, gradient.last_plan.microbatches)) == (1 if limit else 2)
        gradient.finalize()
        assert is_right(gradient, batch)
        assert "MainThread" in noting.take() | other.take()


def test_functions_that_may_draw_random_numbers_run_in_the_call():
    batch, threads = samples(TARGETS), list[str]()

    def note(microbatch: Any) -> Any:
        threads.append(threading.current_thread().name)
        return microbatch

    own = loss(weigh=count, prepare=note)(lambda model, microbatch: squares(model, microbatch))
    deferred = Deferred(lambda index: note(batch[index]), [len(each["x"]) for each in batch])
    scalars = [each | {"number": [1, 2]} for each in batch]
    for settings, given, loss_fn in (
        ({"collate": lambda rows: pad_right(note(rows))}, batch, small.weighed),
        ({}, batch, own),
        ({}, deferred, small.weighed),
        ({}, scalars, own),
    ):
        gradient = accumulator(**settings)
        gradient.prepare(given, loss_fn)
        assert not threads
        gradient.forward_backward(given, loss_fn)
        gradient.finalize()
        assert is_right(gradient, batch)
        assert threads[0] in ("MainThread", "megabatch-deferred_0")
        threads.clear()


@pytest.mark.parametrize("loss_fn", [losses.mse, losses.next_token, losses.classification, partial(squares)])
def test_losses_of_the_library_draw_nothing(loss_fn):
    """A hook of one's own may be inside of anything that looks like the library's."""
    gradient = accumulator()
    batch = [{"x": torch.ones(2, 3), "labels": torch.ones(2, dtype=torch.long)}] * 3
    gradient.prepare(batch, loss_fn)
    finish(gradient)
    assert len(gradient._early.batches) == 1

    @functools.wraps(losses.mse.prepare)
    def own(microbatch: Any) -> Any:
        raise AssertionError

    for hook in (own, partial(own), _Owner(losses.mse.prepare)):
        gradient = accumulator()
        gradient.prepare(batch, loss(weigh=count, prepare=hook)(lambda model, microbatch: squares(model, microbatch)))
        assert gradient._early is None


class _Owner:
    """A callable of one's own around a hook of the library's."""

    def __init__(self, func: Any) -> None:
        self.func = func

    def __call__(self, microbatch: Any) -> Any:
        raise AssertionError


def test_mse_is_prepared_early_and_refuses_padding_in_its_call():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    batch = [
        {"x": torch.ones(3, dtype=torch.float64) * k, "labels": torch.ones(1, dtype=torch.float64)} for k in range(5)
    ]
    padded = [{"x": torch.ones(3), "labels": torch.ones(1 + k)} for k in range(2)]
    found: list[Any] = []
    for prepares in (False, True):
        gradient = GradientAccumulator(model, micro_batch_size=2)
        if prepares:
            gradient.prepare(batch, losses.mse)
            assert len(gradient._early.batches) == 1
        gradient.forward_backward(batch, losses.mse)
        assert not prepares or not gradient._early.batches, "taken"
        gradient.finalize()
        found.append([each.grad.clone() for each in model.parameters()])
    assert same_bits(*found)
    gradient.prepare(padded, losses.mse)
    with pytest.raises(LossContractError, match="were padded with -100"):
        gradient.forward_backward(padded, losses.mse)


def test_an_error_is_raised_in_its_call_alone():
    gradient, following = accumulator(), samples(OTHERS)

    def weigh(microbatch: Any) -> Tensor:
        return count(microbatch) - (100 if 8 in microbatch["x"].shape else 0)

    loss_fn = loss(weigh=weigh)(lambda model, microbatch: squares(model, microbatch))
    gradient.forward_backward(samples([3, 1, 4]), loss_fn)
    gradient.prepare(following, loss_fn)
    gradient.finalize()
    assert is_right(gradient, samples([3, 1, 4]))
    with pytest.raises(LossContractError, match="finite and not negative"):
        gradient.forward_backward(following, loss_fn)
    gradient.prepare(samples(TARGETS), loss_fn)
    assert copy.deepcopy(gradient).plan(following) == gradient.plan(following)
    unknown = GradientAccumulator(model_of_integers())  # an "auto" limit that is not measured yet
    unknown.prepare(following, loss_fn)

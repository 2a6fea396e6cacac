"""A batch that was prepared before its call has the gradient of the same batch."""

import functools
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megabatch import GradientAccumulator, JointLoss, LossContractError, PlanError, loss, losses
from megabatch.batching.deferred import Deferred
from megabatch.batching.early_preparation import EarlyRows, EarlySamples
from megabatch.core.right_padding import pad_right
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
        early = self.prepare(batch, loss_fn)
        assert is_early(early)
        return super().forward_backward(early, loss_fn, plan=plan)


def is_early(batch: Any) -> bool:
    return isinstance(batch, EarlyRows | EarlySamples)


def finish(early: Any) -> None:
    """Wait for the thread."""
    early.preparation._result.result()


class Noting:
    """Counts targets, and notes in which threads microbatches were made."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.made: list[Any] = []  # by a thread; a call weighs them again
        self.loss_fn: Any = loss(weigh=self.weigh)(lambda model, microbatch: squares(model, microbatch))

    def weigh(self, microbatch: Any) -> Tensor:
        name = threading.current_thread().name.removesuffix("_0")
        if name == THREAD:
            self.made.append(microbatch)
        if name == THREAD or all(microbatch is not each for each in self.made):
            self.threads.add(name)
        return count(microbatch)

    def take(self) -> set[str]:
        """Return the threads since the last time."""
        threads, self.threads = self.threads, set()
        return threads


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
    early = gradient.prepare(bad, small.weighed)
    gradient.finalize()
    first = same_bits(gradients(gradient.model), expected(gradient.model, batch + batch))
    try:
        gradient.forward_backward(early, small.weighed)
    except PlanError as error:
        told = str(error)
    gradient.forward_backward(gradient.prepare(following, small.weighed), small.weighed)
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
    batch = batches[0]
    for number, following in enumerate([*batches[1:], []]):
        gradient.forward_backward(batch, noting.loss_fn)
        if number == 0:
            assert noting.take() == {"MainThread"}, "and compares a new loss"
        assert noting.take() <= {THREAD}
        batch = gradient.prepare(following, noting.loss_fn)
        gradient.finalize()
        assert not updates[number] or is_right(gradient, updates[number])


def test_several_batches_wait_for_their_calls():
    batches = [samples(TARGETS), samples(OTHERS)]
    gradient, noting = accumulator(), Noting()
    gradient.forward_backward(batches[0], noting.loss_fn)
    gradient.discard()
    early = [gradient.prepare(batch, noting.loss_fn) for batch in batches]
    for batch in early:
        finish(batch)
    noting.take()
    for batch in reversed(early):
        gradient.forward_backward(batch, noting.loss_fn)
    gradient.finalize()
    assert noting.take() == set()
    assert is_right(gradient, [sample for batch in batches for sample in batch])


def test_a_second_call_with_the_batch_prepares_it_itself():
    batch, noting, gradient = samples(TARGETS), Noting(), accumulator()
    early = gradient.prepare(batch, noting.loss_fn)
    for threads in ({THREAD, "MainThread"}, {"MainThread"}):
        gradient.forward_backward(early, noting.loss_fn)
        gradient.finalize()
        assert is_right(gradient, batch)
        assert noting.take() <= threads


def test_samples_of_a_class_of_ones_own_are_not_prepared():
    class Lazy(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            return super().__getitem__(name) + (name == "labels")

    gradient = accumulator()
    batch = [Lazy(each) for each in samples(TARGETS)]
    assert gradient.prepare(batch, squares) is batch


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


def test_a_batch_that_was_written_to_is_prepared_anew():
    batch, noting, gradient = samples(TARGETS), Noting(), accumulator()
    early = gradient.prepare(batch, noting.loss_fn)
    finish(early)
    noting.take()
    batch[3]["labels"][:2] = small.IGNORED
    gradient.forward_backward(early, noting.loss_fn)
    gradient.finalize()
    assert noting.take() == {"MainThread"}
    assert gradient.last_plan is not None
    pairs = zip(gradients(gradient.model), expected(gradient.model, batch), strict=True)  # of an odd weight
    assert all(one is other or torch.allclose(one, other, rtol=1e-12, atol=0) for one, other in pairs)


@pytest.mark.parametrize("kind", ["list", "rows"])
def test_other_tensors_in_a_dict_are_not_those_of_the_prepared_batch(kind):
    texts = samples([4] * 4)
    batch: Any = samples([4] * 4) if kind == "list" else pad_right(texts)
    gradient = accumulator()
    early = gradient.prepare(batch, small.weighed)
    for each in batch if kind == "list" else [batch]:
        each["labels"] = torch.zeros_like(each["labels"])
    gradient.forward_backward(early, small.weighed)
    gradient.finalize()
    assert is_right(gradient, texts)
    assert len(early) == len(batch)
    assert (early[0] if kind == "list" else early).keys() == texts[0].keys()


@pytest.mark.parametrize("other", ["loss", "limit", "plan", "accumulator"])
def test_another_setting_than_the_prepared_one_prepares_anew(other: str):
    batch, gradient, noting = samples(TARGETS), accumulator(), Noting()
    early = gradient.prepare(batch, Noting().loss_fn if other == "loss" else noting.loss_fn)
    finish(early)
    noting.take()
    if other == "limit":
        gradient.lower_limit(MicrobatchLimit(1, 100))
    if other == "accumulator":
        gradient = accumulator(micro_batch_size=3)
    plan = gradient.plan(batch) if other == "plan" else None
    gradient.forward_backward(early, noting.loss_fn, plan=plan)
    assert noting.take() == {"MainThread"}
    assert max(map(len, gradient.last_plan.microbatches)) == {"limit": 1, "accumulator": 3}.get(other, 2)
    gradient.finalize()
    assert is_right(gradient, batch)


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
        assert gradient.prepare(given, loss_fn) is given
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
    finish(gradient.prepare(batch, loss_fn))

    @functools.wraps(losses.mse.prepare)
    def own(microbatch: Any) -> Any:
        raise AssertionError

    for hook in (own, partial(own), _Owner(losses.mse.prepare)):
        gradient = accumulator()
        own_loss = loss(weigh=count, prepare=hook)(lambda model, microbatch: squares(model, microbatch))
        assert gradient.prepare(batch, own_loss) is batch


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
        gradient = (Preparing if prepares else GradientAccumulator)(model, micro_batch_size=2)
        gradient.forward_backward(batch, losses.mse)
        gradient.finalize()
        found.append([each.grad.clone() for each in model.parameters()])
    assert same_bits(*found)
    with pytest.raises(LossContractError, match="were padded with -100"):
        gradient.forward_backward(gradient.prepare(padded, losses.mse), losses.mse)


def test_an_error_is_raised_in_its_call_alone():
    gradient, following = accumulator(), samples(OTHERS)

    def weigh(microbatch: Any) -> Tensor:
        return count(microbatch) - (100 if 8 in microbatch["x"].shape else 0)

    loss_fn = loss(weigh=weigh)(lambda model, microbatch: squares(model, microbatch))
    gradient.forward_backward(samples([3, 1, 4]), loss_fn)
    early = gradient.prepare(following, loss_fn)
    gradient.finalize()
    assert is_right(gradient, samples([3, 1, 4]))
    with pytest.raises(LossContractError, match="finite and not negative"):
        gradient.forward_backward(early, loss_fn)


def test_a_limit_that_is_not_measured_yet_is_found_in_the_call():
    gradient = GradientAccumulator(model_of_integers())  # "auto", which a CPU measures too
    early = gradient.prepare(samples(OTHERS), small.weighed)
    gradient.forward_backward(early, small.weighed)
    gradient.finalize()
    assert is_right(gradient, samples(OTHERS))

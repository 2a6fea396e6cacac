"""Planners and extensions of the user's, on one rank and on several."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from megabatch import Extension, MegabatchError, Plan, PlanError, Planner, losses
from tests.exact.inputs import User, mean_square, numbers, refused, regressor, right
from tests.exact.inputs_windows import FIRST, SECOND, WRAPS, Wrap, num_rows, two_calls


class Uneven(Planner):
    """One large microbatch and many of one sample, and a number that differs between ranks."""

    def cut(self, lengths: Sequence[int], samples: Sequence[Any]) -> list[list[int]]:
        rows = list(range(len(samples)))
        assert all(samples[row]["x"].ndim for row in rows)
        return [rows[1:4], [], *([row] for row in [*rows[:1], *rows[4:]])]


class Returns(Planner):
    def __init__(self, cut: Any) -> None:
        self.returned = cut

    def cut(self, lengths: Sequence[int], samples: Sequence[Any]) -> Any:
        return self.returned


class Counter(Extension):
    def __init__(self) -> None:
        self.num_steps = self.num_updates = 0

    def surround_steps(self, steps: Any, call: Any) -> Any:
        for step in steps:
            yield step
            self.num_steps += 1

    def after_finalize(self, gradient: Any, update: Any) -> None:
        self.num_updates += 1


@right(2, 3, **WRAPS)
def a_planner_of_ones_own(user: User, variant: Wrap) -> None:
    reference = regressor()
    counter = Counter()
    accumulator = user.accumulator(
        variant(copy.deepcopy(reference)), micro_batch_size=None, planner=Uneven(), extensions=[counter]
    )
    accumulator.open(weights=num_rows(user))
    two_calls(accumulator, user)
    update = accumulator.finalize()
    assert (counter.num_steps, counter.num_updates) == (update.num_microbatches, 1)
    mean_square(reference, FIRST, SECOND)
    user.expect(accumulator.model, reference)


@refused(PlanError, "cut() returned sample", 1, 2, twice=[[0, 1], [1]], beyond=[[0, 9]], not_all=[[0]])
def a_planner_that_leaves_samples_out_or_repeats_them(user: User, variant: Any) -> None:
    rows = {key: value[:3] for key, value in numbers().items()}
    user.accumulator(regressor(), micro_batch_size=None, planner=Returns(variant)).forward_backward(rows, losses.mse)


@refused(PlanError, "return a list of lists", 1, none=None, numbers=[0, 1], words=[["a"]])
def a_planner_that_returns_no_lists(user: User, variant: Any) -> None:
    accumulator = user.accumulator(regressor(), micro_batch_size=None, planner=Returns(variant))
    accumulator.forward_backward(numbers(), losses.mse)


@refused(
    PlanError, "leave one of the two out", 1, rows={"micro_batch_size": 2}, tokens={"max_microbatch_tokens": 8},
    auto={"max_microbatch_tokens": "auto"},
)  # fmt: skip
def a_planner_beside_another_rule(user: User, variant: Any) -> None:
    user.accumulator(regressor(), **({"micro_batch_size": None} | variant), planner=Uneven())


@refused(PlanError, "planner is [[", 1, 2)
def a_planner_that_is_none(user: User) -> None:
    user.accumulator(regressor(), micro_batch_size=None, planner=[[0, 1]])


class FailsOnOneRank(Extension):
    def before_call(self, gradient: Any, batch: Any, loss_fn: Any) -> None:
        if gradient.ranks.degree == 1 or torch.distributed.get_rank() == 0:
            raise PlanError("not this call")


@refused(MegabatchError, "not this call", 1, 2, 3)
def an_extension_that_fails_on_one_rank(user: User) -> None:
    user.update(regressor(), user.rows(numbers()), losses.mse, extensions=[FailsOnOneRank()])


@refused(PlanError, "cut them apart", 1, 2, planner=True, plan=False)
def a_cut_that_puts_samples_of_two_kinds_together(user: User, variant: bool) -> None:
    """Clips of two and four frames, which padding would make alike."""
    generator = torch.Generator().manual_seed(0)
    clips = [{"x": torch.randn(num_frames, 2, 2, generator=generator).double()} for num_frames in (2, 4)]
    model = torch.nn.Linear(2, 1).double()
    settings: dict[str, Any] = {"planner": Returns([[0, 1]])} if variant else {"micro_batch_size": 2}
    plan = None if variant else Plan(((0, 1),), (2, 4), (0, 1))

    def add(model: Any, batch: Any) -> Any:
        return model(batch["x"]).sum(), len(batch["x"])

    user.accumulator(model, **settings).forward_backward(clips, add, plan=plan)

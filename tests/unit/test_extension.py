"""Extensions of one's own: which events are called, in which order, and what a state keeps."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from megabatch import Extension, GradientAccumulator, MegabatchError, PlanError
from megabatch.planners import Rows, SameBits

BATCH = [{"x": torch.full((2,), float(number)), "y": torch.zeros(1)} for number in range(4)]


def squares(model: Any, microbatch: Any) -> tuple[torch.Tensor, int]:
    return (model(microbatch["x"]) - microbatch["y"]).square().sum(), len(microbatch["x"])


class Recorder(Extension):
    """Notes every event, and counts updates."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events, self.num_updates = name, events, 0

    def attach(self, gradient: GradientAccumulator) -> None:
        self.events.append(f"{self.name} attach")

    def before_call(self, gradient: Any, batch: Any, loss_fn: Any) -> None:
        self.events.append(f"{self.name} before {len(batch)} samples")

    def check_call(self, gradient: Any, batch: Any, prepared: Any, loss_fn: Any) -> None:
        self.events.append(f"{self.name} check {len(prepared.plan.microbatches)} microbatches")

    def surround_steps(self, steps: Any, call: Any) -> Any:
        for step in steps:
            yield step
            self.events.append(f"{self.name} step {step.index} of {len(call.plan.microbatches)}")

    def after_finalize(self, gradient: Any, update: Any) -> None:
        self.events.append(f"{self.name} after {update.num_samples} samples")
        self.num_updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {self.name: self.num_updates}

    def load_state_dict(self, gradient: Any, state: dict[str, Any]) -> None:
        self.num_updates = state.pop(self.name, 0)


def test_events_come_in_the_order_of_the_extensions() -> None:
    events: list[str] = []
    model = nn.Linear(2, 1)
    extensions = [Recorder("a", events), Recorder("b", events)]
    gradient = GradientAccumulator(model, micro_batch_size=2, extensions=extensions)
    gradient.forward_backward(BATCH, squares)
    gradient.finalize()
    assert events == [
        "a attach", "b attach", "a before 4 samples", "b before 4 samples", "a check 2 microbatches",
        "b check 2 microbatches",
        "a step 0 of 2", "b step 0 of 2", "a step 1 of 2", "b step 1 of 2", "a after 4 samples", "b after 4 samples",
    ]  # fmt: skip


def test_an_extension_does_not_change_the_gradient() -> None:
    model = nn.Linear(2, 1).double()
    batch = [{name: value.double() for name, value in sample.items()} for sample in BATCH]
    gradients: list[torch.Tensor] = []
    for extensions in ((), (Recorder("a", []),)):
        gradient = GradientAccumulator(model, micro_batch_size=1, extensions=extensions)
        gradient.forward_backward(batch, squares)
        gradient.finalize()
        gradients.append(model.weight.grad.clone())  # pyright: ignore[reportOptionalMemberAccess]
    assert torch.equal(*gradients)


def test_a_state_is_given_back_to_its_extension() -> None:
    first, second = Recorder("a", []), Recorder("a", [])
    gradient = GradientAccumulator(nn.Linear(2, 1), micro_batch_size=2, extensions=[first])
    gradient.forward_backward(BATCH, squares)
    gradient.finalize()
    state = gradient.state_dict()
    assert state == {"a": 1}
    GradientAccumulator(nn.Linear(2, 1), micro_batch_size=2, extensions=[second]).load_state_dict(state)
    assert second.num_updates == 1
    with pytest.raises(PlanError, match="the state has a, which"):
        GradientAccumulator(nn.Linear(2, 1), micro_batch_size=2).load_state_dict(state)


def test_what_is_no_extension_is_refused() -> None:
    with pytest.raises(PlanError, match=r"extensions has a list; give objects of megabatch\.Extension"):
        GradientAccumulator(nn.Linear(2, 1), micro_batch_size=2, extensions=[[]])  # pyright: ignore[reportArgumentType]


class Refusing(Extension):
    def attach(self, gradient: GradientAccumulator) -> None:
        gradient.planner.check_goes_with("an extension that runs samples anew")


def test_a_pair_is_refused_where_it_is_attached() -> None:
    model = nn.Linear(2, 1)
    GradientAccumulator(model, micro_batch_size=2, extensions=[Refusing()])
    with pytest.raises(PlanError, match="SameBits and an extension that runs samples anew"):
        GradientAccumulator(model, planner=SameBits(Rows(2)), extensions=[Refusing()])


def test_an_error_of_an_extension_drops_the_update() -> None:
    class Failing(Extension):
        def surround_steps(self, steps: Any, call: Any) -> Any:
            for step in steps:
                yield step
                raise ValueError("seen")

    model = nn.Linear(2, 1)
    gradient = GradientAccumulator(model, micro_batch_size=2, extensions=[Failing()])
    with pytest.raises(ValueError, match="seen"):
        gradient.forward_backward(BATCH, squares)
    assert model.weight.grad is None
    assert gradient.open_update is None


def test_an_extension_hears_that_an_update_was_dropped() -> None:
    class Counting(Extension):
        num_dropped = 0

        def after_drop(self, gradient: Any) -> None:
            assert gradient.model.weight.grad is None
            self.num_dropped += 1

    def failing(model: Any, microbatch: Any) -> tuple[torch.Tensor, int]:
        raise ValueError("a loss that fails")

    counting = Counting()
    gradient = GradientAccumulator(nn.Linear(2, 1), micro_batch_size=2, extensions=[counting])
    gradient.forward_backward(BATCH, squares)
    gradient.finalize()
    assert counting.num_dropped == 0
    gradient.forward_backward(BATCH, squares)
    gradient.discard()
    assert counting.num_dropped == 1
    with pytest.raises(ValueError, match="fails"):
        gradient.forward_backward(BATCH, failing)
    assert counting.num_dropped == 2


def test_an_extension_belongs_to_one_accumulator() -> None:
    shared = Recorder("a", [])
    GradientAccumulator(nn.Linear(2, 1), micro_batch_size=2, extensions=[shared])
    with pytest.raises(PlanError, match="a Recorder in extensions belongs to another accumulator"):
        GradientAccumulator(nn.Linear(2, 1), micro_batch_size=2, extensions=[shared])


def test_two_states_of_one_name_are_refused() -> None:
    gradient = GradientAccumulator(
        nn.Linear(2, 1), micro_batch_size=2, extensions=[Recorder("a", []), Recorder("a", [])]
    )
    with pytest.raises(PlanError, match="two extensions save a state as 'a'"):
        gradient.state_dict()


@pytest.mark.parametrize(
    "options",
    [{}, {"planner": Rows(2, "measure")}, {"micro_batch_size": 2, "extensions": [Extension()]}],
    ids=["auto", "cost", "own"],
)
def test_an_accumulator_is_freed_with_its_last_reference(options: dict[str, Any]) -> None:
    gradient = GradientAccumulator(nn.Linear(2, 1), **options)
    gradient.forward_backward(BATCH, squares)
    gradient.finalize()
    alive = weakref.ref(gradient)
    gc.disable()  # a cycle would wait for it
    try:
        del gradient
        assert alive() is None
    finally:
        gc.enable()


def test_a_limit_is_measured_again_after_a_loss_that_failed() -> None:
    fails = True

    def sometimes(model: Any, microbatch: Any) -> tuple[torch.Tensor, int]:
        if fails and microbatch["x"].shape[1] > 2:
            raise ArithmeticError("once")
        return microbatch["x"].sum() * model.weight.sum(), len(microbatch["x"])

    gradient = GradientAccumulator(nn.Linear(2, 1))
    gradient.forward_backward([{"x": torch.ones(2)}], sometimes)
    gradient.finalize()
    longer = [{"x": torch.ones(40)}]
    with pytest.raises(PlanError, match="once"):
        gradient.forward_backward(longer, sometimes)
    fails = False
    gradient.forward_backward(longer, sometimes)
    assert gradient.finalize().num_samples == 1


class Repeating(Extension):
    def __init__(self, times: list[int]) -> None:
        self.times = times

    def surround_steps(self, steps: Any, call: Any) -> Any:
        for step, times in zip(steps, self.times, strict=False):
            for _ in range(times):
                yield step


@pytest.mark.parametrize(
    ("times", "words"),
    [([1, 0, 1, 1], "left a microbatch out"), ([1, 2, 1, 1], "yielded one twice"), ([1, 1], "ended before the last")],
)
def test_a_microbatch_that_an_extension_leaves_out_or_repeats_is_an_error(times: list[int], words: str) -> None:
    gradient = GradientAccumulator(nn.Linear(2, 1), micro_batch_size=1, extensions=[Repeating(times)])
    with pytest.raises(MegabatchError, match=words):
        gradient.forward_backward(BATCH, squares)
    with pytest.raises(MegabatchError, match="no update is open"):
        gradient.finalize()


def test_a_second_try_after_a_refused_extension_takes_the_first_again() -> None:
    first = Extension()
    with pytest.raises(PlanError, match="an extension that runs samples anew"):
        GradientAccumulator(nn.Linear(2, 1), planner=SameBits(Rows(2)), extensions=[first, Refusing()])
    GradientAccumulator(nn.Linear(2, 1), micro_batch_size=2, extensions=[first])

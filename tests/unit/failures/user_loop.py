"""Misuse of microbatch(), the loop that is not megabatch's."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megabatch import GradientAccumulator, JointLoss, LossContractError, MegabatchError
from megabatch.guards.error_broadcast import SECONDS_TO_LOOK
from tests.unit.failures.table import SAMPLES, Failure, accumulator, here, squares, told, weighed_squares

Work = Callable[[GradientAccumulator, Any], object]


def total_of(gradient: GradientAccumulator) -> Tensor:
    return squares(gradient.model, SAMPLES[0])[0]


def scaled(gradient: GradientAccumulator, part: Any) -> None:
    part.scale(total_of(gradient)).backward()


def loop(work: Work = scaled, *, indices: Any = range(2), of: Any = 2, sum_over: float | None = 1, **said: Any) -> None:
    """An update whose microbatches do ``work``."""
    gradient = accumulator()
    for index in indices:
        with gradient.microbatch(index, of=of, sum_over=sum_over, **said) as part:
            work(gradient, part)
    gradient.finalize()


def own(gradient: GradientAccumulator, part: Any) -> None:
    total_of(gradient).backward()


def own_twice(gradient: GradientAccumulator, part: Any) -> None:
    for _ in range(1 + part.index):
        own(gradient, part)


def own_and_scaled(*given: Any) -> None:
    own(*given)
    scaled(*given)


def in_turns(*works: Work) -> Work:
    """One work for each microbatch."""
    return lambda gradient, part: works[part.index](gradient, part)


def scale(of: Callable[[Tensor], Any], *given: Any, **said: Any) -> Work:
    """Scale what is made of the sum, and differentiate it."""
    return lambda gradient, part: part.scale(of(total_of(gradient)), *given, **said).backward()


def same(total: Tensor) -> Tensor:
    return total


def after(change: Callable[[Tensor], Tensor]) -> Work:
    return lambda gradient, part: change(part.scale(total_of(gradient))).backward()


def then_change(change: Callable[[nn.Module], object], work: Work = scaled) -> Work:
    """The work of a microbatch, and a change in the body of the second."""

    def run(gradient: GradientAccumulator, part: Any) -> None:
        work(gradient, part)
        if part.index:
            change(gradient.model)

    return run


def dropped_and_own(gradient: GradientAccumulator, part: Any) -> None:
    loss = total_of(gradient)
    gradient.model.zero_grad()
    loss.backward()


def dropped_and_own_twice(gradient: GradientAccumulator, part: Any) -> None:
    """New gradients with the writes that one backward makes to old ones, and the addresses of these."""
    parameters = list(gradient.model.parameters())
    dropped = [each.grad for each in parameters]
    gradient.model.zero_grad()
    for _ in range(2):
        own(gradient, part)
    others = [torch.empty(0) for _ in range(10_000)]  # so that no other place is free
    for parameter in parameters:
        address = id(dropped.pop(0))
        assert id(parameter.grad) == address  # torch makes the object now, where the last one was freed
    others.clear()


def in_float16(gradient: GradientAccumulator, part: Any) -> None:
    with torch.autocast("cpu", torch.float16):
        loss = total_of(gradient)
    part.scale(loss).backward()


def with_scaler(use: Callable[[torch.amp.GradScaler, torch.optim.Optimizer], object]) -> Callable[[], None]:
    """An update of two microbatches; the scaler is used before finalize()."""

    def run() -> None:
        scaler, gradient = torch.amp.GradScaler("cpu"), accumulator()
        for index in range(2):
            with gradient.microbatch(index, of=2, sum_over=1) as part:
                part.scale(total_of(gradient), scaler).backward()
        use(scaler, torch.optim.SGD(gradient.model.parameters(), lr=0.0))
        gradient.finalize()

    return run


def in_turn_scalers() -> Work:
    scalers = [torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")]
    return lambda gradient, part: part.scale(total_of(gradient), scalers[part.index]).backward()


def twice(loss: Tensor) -> Tensor:
    loss.backward(retain_graph=True)
    return loss


def of_changes() -> None:
    gradient = accumulator()
    for index, of in enumerate((3, 2)):
        with gradient.microbatch(index, of=of, sum_over=1) as part:
            scaled(gradient, part)


def changed(*said: dict[str, Any]) -> Callable[[], None]:
    """The weights that the update is told, by microbatch."""

    def run() -> None:
        gradient = accumulator()
        for index, each in enumerate(said):
            with gradient.microbatch(index, of=len(said), **each) as part:
                scaled(gradient, part)
        gradient.finalize()

    return run


def then(work: Callable[[GradientAccumulator], object]) -> Callable[[], None]:
    """Something else after the first of two microbatches."""

    def run() -> None:
        gradient = accumulator()
        with gradient.microbatch(0, of=2, sum_over=1) as part:
            scaled(gradient, part)
        work(gradient)

    return run


def nested() -> None:
    gradient = accumulator()
    with gradient.microbatch(0, of=2, sum_over=1), gradient.microbatch(1, of=2, sum_over=1):
        pass


def after_a_call() -> None:
    gradient = accumulator()
    gradient.forward_backward(SAMPLES, weighed_squares)
    with gradient.microbatch(0, of=1, sum_over=1):
        pass


def interrupted() -> None:
    """An error in the second body loses the first microbatch too."""
    gradient = accumulator()
    try:
        for index in range(2):
            with gradient.microbatch(index, of=2, sum_over=1) as part:
                scaled(gradient, part)
                1 / (1 - index)
    except ZeroDivisionError:
        pass
    gradient.finalize()


def miscounted(labels: list[int], mean_over: float, *, divide: bool = False) -> None:
    model = nn.Linear(1, 3)
    gradient = GradientAccumulator(model)
    with gradient.microbatch(0, of=1, mean_over=mean_over) as part:
        loss = cross_entropy(model(torch.ones(2, 1)), torch.tensor(labels))
        part.scale(loss.log() * 0 / 0 if divide else loss).backward()


def some_scalers(gradient: GradientAccumulator, part: Any) -> None:
    scaler = torch.amp.GradScaler("cpu") if part.index else None
    part.scale(total_of(gradient), scaler).backward()


def divide_by_divisor(gradient: GradientAccumulator, part: Any) -> None:
    (total_of(gradient) / part.divisor).backward()


def scale_and_divisor(gradient: GradientAccumulator, part: Any) -> None:
    part.scale(total_of(gradient) / part.divisor).backward()


def divisor_after_scale(gradient: GradientAccumulator, part: Any) -> None:
    (part.scale(total_of(gradient)) / part.divisor).backward()


FIRST, SECOND = "microbatch 0 of 2", "microbatch 1 of 2"
FAILURES = {
    "an index that is left out": Failure(
        "microbatch 2 of 3 … 1 is next", lambda: loop(indices=(0, 2), of=3), MegabatchError
    ),
    "an index that is repeated": Failure("microbatch 0 of 2 … 1 is next", lambda: loop(indices=(0, 0)), MegabatchError),
    "an index after the last": Failure("microbatch 2 … last of 2", lambda: loop(indices=range(3)), MegabatchError),
    "a loop that begins late": Failure("microbatch 1", lambda: loop(indices=(1,)), MegabatchError),
    "another number of microbatches": Failure("of= is 2 … was 3", of_changes, MegabatchError),
    "no microbatches": Failure("of= is 0", lambda: loop(of=0)),
    "half a microbatch": Failure("of is 1.5", lambda: loop(of=1.5)),
    "microbatches inside of others": Failure("microbatch()", nested, MegabatchError),
    "no backward in a loop of one's own": Failure(FIRST, lambda: loop(lambda gradient, part: None), MegabatchError),
    "a scaled loss without a backward": Failure(
        FIRST, lambda: loop(lambda gradient, part: part.scale(total_of(gradient))), MegabatchError
    ),
    "two backwards of a scaled loss": Failure(f"{FIRST} … 2 backwards", lambda: loop(after(twice)), MegabatchError),
    "two backwards in a loop of one's own": Failure(
        "microbatch 1 of 3 ran 2 backwards", lambda: loop(own_twice, indices=range(3), of=3), MegabatchError
    ),
    "clip_grad_norm_ in a loop of one's own": Failure(
        "written to 2 times in microbatch 1 of 3",
        lambda: loop(
            then_change(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)), indices=range(3), of=3
        ),
        MegabatchError,
    ),
    "zero_grad after a backward in a loop of one's own": Failure(
        "dropped in microbatch 1 of 2", lambda: loop(then_change(nn.Module.zero_grad)), MegabatchError
    ),
    "zero_grad before a backward in a loop of one's own": Failure(
        "replaced in microbatch 1 of 2", lambda: loop(dropped_and_own), MegabatchError
    ),
    "zero_grad before two backwards in a loop of one's own": Failure(
        "microbatch 1 of 2 ran 2 backwards", lambda: loop(in_turns(own, dropped_and_own_twice)), MegabatchError
    ),
    "a step in a loop of one's own": Failure(
        "parameters were written to in microbatch 1",
        lambda: loop(then_change(lambda model: torch.optim.SGD(model.parameters(), lr=1.0).step())),
        MegabatchError,
    ),
    "unscale_ before finalize": Failure(
        "GradScaler was used before", with_scaler(lambda scaler, optimizer: scaler.unscale_(optimizer)), MegabatchError
    ),
    "a new scale before finalize": Failure(
        "GradScaler was used before", with_scaler(lambda scaler, optimizer: scaler.update(2.0)), MegabatchError
    ),
    "two scalers": Failure("another GradScaler", lambda: loop(in_turn_scalers()), MegabatchError),
    "float16 without a scaler": Failure("no GradScaler", lambda: loop(in_float16), MegabatchError),
    "a scaled loss that is divided": Failure(
        f"{FIRST} … multiplied by 0.5", lambda: loop(after(lambda loss: loss / 2)), MegabatchError
    ),
    "a loss that is divided by the number of microbatches": Failure(
        f"{FIRST} … by 2", lambda: loop(scale(lambda total: total / 2)), LossContractError
    ),
    "a mean for a sum": Failure(
        FIRST, lambda: loop(scale(lambda total: total[None].mean()), sum_over=3), LossContractError
    ),
    "a mean that nobody scales": Failure(FIRST, lambda: loop(own, sum_over=None, mean_over=1), LossContractError),
    "a loss of an unknown kind": Failure(FIRST, lambda: loop(own, sum_over=None), LossContractError),
    "a scaled loss of an unknown kind": Failure(FIRST, lambda: loop(sum_over=None), LossContractError),
    "a loss of weight 0 that nobody scales": Failure(f"{FIRST} … 0", lambda: loop(own, sum_over=0), LossContractError),
    "two losses in a microbatch": Failure(
        FIRST, lambda: loop(lambda *given: (scaled(*given), scaled(*given))), MegabatchError
    ),
    "a scaled loss that has run its own backward": Failure(
        f"gradients changed … {FIRST}", lambda: loop(in_turns(own_and_scaled)), LossContractError
    ),
    "a divisor beside a scaled loss": Failure(FIRST, lambda: loop(scale_and_divisor), MegabatchError),
    "a scaled loss beside a divisor": Failure("microbatch 0", lambda: loop(divisor_after_scale), MegabatchError),
    "a divisor for a mean": Failure(
        "a mean", lambda: loop(divide_by_divisor, sum_over=None, mean_over=1), LossContractError
    ),
    "some losses scaled": Failure(SECOND, lambda: loop(in_turns(scaled, own)), MegabatchError),
    "some losses multiplied": Failure("GradScaler", lambda: loop(some_scalers), MegabatchError),
    "a loss without a gradient": Failure(FIRST, lambda: loop(scale(lambda total: total.detach())), LossContractError),
    "a joint loss in a loop of one's own": Failure(
        f"{FIRST} … JointLoss", lambda: loop(scale(lambda _: JointLoss(squares, squares))), LossContractError
    ),
    "a sum and a mean": Failure("sum_over and mean_over", lambda: loop(mean_over=1)),
    "a sum that is divided": Failure("divided=True", lambda: loop(divided=True)),
    "a weight that is told twice": Failure(FIRST, lambda: loop(scale(same, sum_over=1))),
    "a weight of what is divided": Failure(FIRST, lambda: loop(scale(same, sum_over=1), sum_over=None, divided=True)),
    "a weight in words": Failure("sum_over is a str", lambda: loop(sum_over="three")),
    "several weights": Failure("sum_over is of shape (2,)", lambda: loop(sum_over=torch.ones(2))),
    "a weight below 0": Failure("sum_over is -1.0", lambda: loop(sum_over=-1)),
    "weights that do not add up": Failure(
        "update_weight is 3 … 2 … data rank 0 of 1", lambda: loop(update_weight=3), LossContractError
    ),
    "another weight of the update": Failure(
        "update_weight= is 3 … was 2", changed({"update_weight": 2}, {"update_weight": 3}), MegabatchError
    ),
    "a loss that is divided no longer": Failure(
        "divided=", changed({"divided": True}, {"sum_over": 1}), MegabatchError
    ),
    "a mean over another number": Failure("by 1 … mean_over is 2", lambda: miscounted([0, -100], 2), LossContractError),
    "a mean over nothing in a loop of one's own": Failure(
        "nan … weight is 0", lambda: miscounted([0, 1], 0, divide=True), LossContractError
    ),
    "finalize before the last microbatch": Failure(
        "1 of 2 microbatches", then(lambda gradient: gradient.finalize()), MegabatchError
    ),
    "a call beside a loop of one's own": Failure(
        "microbatch()", then(lambda gradient: gradient.forward_backward(SAMPLES, weighed_squares)), MegabatchError
    ),
    "a loop of one's own after a call": Failure("microbatch()", after_a_call, MegabatchError),
    "the state of a loop of one's own": Failure(
        "state_dict()", then(lambda gradient: gradient.state_dict()), MegabatchError
    ),
    "gradients dropped inside of a loop of one's own": Failure(
        "gradients were dropped",
        then(lambda gradient: (gradient.model.zero_grad(), gradient.microbatch(1, of=2, sum_over=1).__enter__())),
        MegabatchError,
    ),
    "an error inside of a loop of one's own": Failure("no update is open", interrupted, MegabatchError),
}


def numbers_differ() -> str:
    gradient = accumulator()
    return told(lambda: gradient.microbatch(0, of=here(2, 3), sum_over=1).__enter__())


def one_has_none() -> str:
    gradient = accumulator()
    return told(lambda: gradient.microbatch(0, of=here(0, 3), sum_over=1).__enter__())


def one_knows_its_weight() -> str:
    gradient = accumulator()
    return told(lambda: gradient.microbatch(0, of=2, **here({"update_weight": 1}, {"sum_over": 1})).__enter__())


def one_changed_its_model() -> str:
    gradient = accumulator()
    gradient.model.weight.requires_grad_(here(False, True))
    return told(lambda: gradient.microbatch(0, of=2, sum_over=1).__enter__())


def one_miscounts() -> str:
    gradient = accumulator()
    with gradient.microbatch(0, of=1, sum_over=1, update_weight=here(3, 1)) as part:
        scaled(gradient, part)
    return told(gradient.finalize)


def one_does_not_scale() -> str:
    gradient = accumulator()
    with gradient.microbatch(0, of=1, sum_over=1) as part:
        here(own, scaled)(gradient, part)
    return told(gradient.finalize)


def one_fails_in_its_body() -> str:
    """Both ranks are told, whoever fails; the next update is whole again."""
    gradient, heard = accumulator(), list[str]()

    def update(failing: set[int]) -> str:
        def work(part: Any) -> None:
            if dist.get_rank() in failing:
                raise ZeroDivisionError("a bad row")
            time.sleep(SECONDS_TO_LOOK * (1.5 if failing else 0.0))
            scaled(gradient, part)

        def run() -> None:
            for index in range(2):
                with gradient.microbatch(index, of=2, sum_over=1) as part:
                    work(part)
            gradient.finalize()

        heard[:] = [told(run), ""]
        dist.all_gather_object(heard, heard[0])
        gradient.discard()
        return heard[0]

    assert update({0, 1}).startswith("ZeroDivisionError")
    assert heard[0] == heard[1]
    assert update({0}).startswith("ZeroDivisionError")
    assert "rank 0 of 2 failed in microbatch 0 of 2 (ZeroDivisionError" in heard[1]
    text = update({1})
    assert heard[1] == "ZeroDivisionError: a bad row"
    assert update(set()) == "nothing"
    return text


JOBS: dict[str, tuple[Callable[[], str], str]] = {
    "other numbers of microbatches in loops": (numbers_differ, "PlanError: of= is 3, 2 on data ranks 0 to 1"),
    "no microbatches on one rank": (one_has_none, "PlanError: of= is 3, 0 on data ranks 0 to 1"),
    "a weight that one rank knows": (one_knows_its_weight, "PlanError: update_weight= … some ranks"),
    "a model that one rank changed": (one_changed_its_model, "PlanError: … frozen"),
    "weights that do not add up on one rank": (
        one_miscounts,
        "LossContractError: update_weight is 3 … 1 on data rank 1 of 2",
    ),
    "an error in the body of one rank": (
        one_fails_in_its_body,
        "MegabatchError: rank 1 of 2 failed in microbatch 0 of 2 (ZeroDivisionError: a bad row)",
    ),
    "a loss that one rank does not scale": (one_does_not_scale, "LossContractError: … finalize()"),
}

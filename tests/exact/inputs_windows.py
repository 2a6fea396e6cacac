"""Input mutations of updates of several calls that `open` begins."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megabatch import LossContractError, MegabatchError, PlanError, loss, losses
from tests.exact.inputs import Sample, User, as_samples, mean_square, numbers, refused, regressor, right, squares

FIRST, SECOND = numbers(), numbers(3)
Wrap = Callable[[nn.Module], nn.Module]


def sharded(model: nn.Module) -> nn.Module:
    for block in (model[0], model[2]):
        fully_shard(block)
    return fully_shard(model)


WRAPS: dict[str, Wrap] = {"plain": lambda model: model, "ddp": DistributedDataParallel, "fsdp2": sharded}


def two_calls(accumulator: Any, user: User, between: Callable[[], object] = lambda: None) -> None:
    accumulator.forward_backward(user.rows(FIRST), squares)
    between()
    accumulator.forward_backward(user.rows(SECOND), squares)


def num_rows(user: User) -> int:
    return 2 * len(user.part(range(8)))


@right(2, 3, **WRAPS)
def opened_and_left_and_opened_again(user: User, variant: Wrap) -> None:
    """An update that is dropped before its first call, after one call, and one that is whole, thrice."""
    reference = regressor()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), sync="last")
    accumulator.open(weights=3)
    accumulator.discard()
    accumulator.open(weights=num_rows(user))
    accumulator.forward_backward(user.rows(FIRST), squares)
    accumulator.discard()
    for _ in range(2):
        accumulator.open(weights=num_rows(user))
        two_calls(accumulator, user)
        accumulator.finalize()
    mean_square(reference, FIRST, SECOND)
    user.expect(accumulator.model, reference)
    accumulator.forward_backward(user.rows(FIRST), squares)  # which reduces as ever
    accumulator.finalize()
    reference.zero_grad()
    mean_square(reference, FIRST)
    user.expect(accumulator.model, reference)


@right(2, 3, **WRAPS)
def a_call_that_fails_on_every_rank_loses_the_update(user: User, variant: Wrap) -> None:
    reference = regressor()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), sync="last")

    def fails(model: nn.Module, batch: Sample) -> Any:
        model(batch["x"])
        raise ArithmeticError("a bad batch")

    accumulator.open(weights=num_rows(user))
    accumulator.forward_backward(user.rows(FIRST), squares)
    with contextlib.suppress(ArithmeticError):
        accumulator.forward_backward(user.rows(SECOND), fails)
    with contextlib.suppress(MegabatchError):
        accumulator.open(weights=num_rows(user))
        raise AssertionError("open() took up an update that was lost")
    accumulator.discard()
    accumulator.open(weights=num_rows(user))
    two_calls(accumulator, user)
    accumulator.finalize()
    mean_square(reference, FIRST, SECOND)
    user.expect(accumulator.model, reference)


@right(2, 3, **WRAPS)
def nothing_but_an_open_update(user: User, variant: Wrap) -> None:
    """Weights of 0, and no call: an update without weight, then one with."""
    reference = regressor()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), sync="last")
    for weights in (0, None, {"a": 0, "b": 0.0}):
        accumulator.open(weights)
        update = accumulator.finalize(max_norm=1.0)
        assert not update.finite
        assert update.problem() is None
        assert all(each.grad is None for each in accumulator.model.parameters())
    accumulator.open(torch.tensor(num_rows(user)))
    two_calls(accumulator, user)
    accumulator.finalize()
    mean_square(reference, FIRST, SECOND)
    user.expect(accumulator.model, reference)


@right(2, 3, **WRAPS)
def samples_of_no_weight(user: User, variant: Wrap) -> None:
    accumulator = user.accumulator(variant(regressor()), sync="last")
    accumulator.open(weights=0)
    accumulator.forward_backward(user.rows(FIRST), lambda model, batch: (0 * squares(model, batch)[0], 0))
    assert not accumulator.finalize().finite
    assert all(each.grad is None for each in accumulator.model.parameters())
    reference = regressor()
    mean_square(reference, FIRST)
    accumulator.forward_backward(user.rows(FIRST), squares)
    accumulator.finalize()
    user.expect(accumulator.model, reference)


class Unused(nn.Module):
    """Two heads, of which a microbatch uses the one that its first label asks for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(3)).double()
        self.frozen = nn.Linear(4, 4).double().requires_grad_(False)

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.frozen(x))


def by_sign(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
    return F.mse_loss(model(batch["x"], int(batch["labels"][0] > 0)), batch["labels"], reduction="sum"), 1


@right(
    2, 3, ddp=DistributedDataParallel, plain=lambda model: model,
    finding=lambda model: DistributedDataParallel(model, find_unused_parameters=True),
)  # fmt: skip
def parameters_that_some_ranks_do_not_use(user: User, variant: Wrap) -> None:
    reference = Unused()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), micro_batch_size=1)
    accumulator.open(weights=num_rows(user))
    for batch in (FIRST, SECOND):
        accumulator.forward_backward(user.rows(batch), by_sign)
    accumulator.finalize()
    total = sum(
        by_sign(reference, {k: v[None] for k, v in row.items()})[0] for b in (FIRST, SECOND) for row in as_samples(b)
    )
    (total / 16).backward()
    user.expect(accumulator.model, reference)


@right(2, 3, ddp=DistributedDataParallel, plain=lambda model: model)
def saved_between_its_calls(user: User, variant: Wrap) -> None:
    reference = regressor()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)))
    accumulator.open(weights=num_rows(user))
    accumulator.forward_backward(user.rows(FIRST), squares)
    state = accumulator.state_dict()
    accumulator.forward_backward(user.rows(FIRST), squares)
    accumulator.load_state_dict(state)
    other = user.accumulator(variant(copy.deepcopy(reference)))
    other.load_state_dict(state)
    for each in (accumulator, other):
        each.forward_backward(user.rows(SECOND), squares)
        assert each.finalize().finite
        reference.zero_grad()
        mean_square(reference, FIRST, SECOND)
        user.expect(each.model, reference)


@right(2, 3, **WRAPS)
def an_open_loop_in_an_opened_update(user: User, variant: Wrap) -> None:
    reference = regressor()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), sync="last")
    accumulator.open(weights={"error": num_rows(user)})
    for batch in (FIRST, SECOND):
        for microbatch in accumulator.microbatches(user.rows(batch)):
            accumulator.backward({"error": squares(accumulator.model, microbatch)})
    accumulator.finalize()
    mean_square(reference, FIRST, SECOND)
    user.expect(accumulator.model, reference)


@right(2, 3, **WRAPS)
def wider_gradients(user: User, variant: Wrap) -> None:
    reference = regressor()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), sync="last", accumulate_dtype=torch.float64)
    accumulator.open(weights=num_rows(user))
    two_calls(accumulator, user)
    accumulator.finalize()
    mean_square(reference, FIRST, SECOND)
    user.expect(accumulator.model, reference)


@right(2, 3, **WRAPS)
def a_loss_that_takes_the_divisor(user: User, variant: Wrap) -> None:
    """Told beforehand, it needs no weigh."""
    reference = regressor()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), sync="last")

    def divided(model: nn.Module, batch: Sample, divisor: float) -> tuple[Tensor, int]:
        total, weight = squares(model, batch)
        return total / divisor, weight

    accumulator.open(weights=num_rows(user))
    for batch in (FIRST, SECOND):
        accumulator.forward_backward(user.rows(batch), divided)
    accumulator.finalize()
    mean_square(reference, FIRST, SECOND)
    user.expect(accumulator.model, reference)


@right(2, 3, **WRAPS)
def a_term_in_each_call(user: User, variant: Wrap) -> None:
    """One term in the first call, another in the second: each with a divisor of its own."""
    reference = regressor()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), sync="last")
    accumulator.open(weights={"error": num_rows(user) / 2, "size": num_rows(user)})
    accumulator.forward_backward(user.rows(FIRST), lambda model, batch: {"error": squares(model, batch)})
    accumulator.forward_backward(
        user.rows(SECOND), lambda model, batch: {"size": (model(batch["x"]).square().sum(), 2 * len(batch["x"]))}
    )
    accumulator.finalize()
    mean_square(reference, FIRST)
    (reference(SECOND["x"]).square().sum() / 16).backward()
    user.expect(accumulator.model, reference)


@refused(LossContractError, "give every sample that was counted", 1, 2, 3, half=1, too_many=3)
def a_sum_that_is_another(user: User, variant: int) -> None:
    """Half of what was told is left out, or given once more."""
    accumulator = user.accumulator(regressor())
    accumulator.open(weights=num_rows(user))
    for batch in (FIRST, SECOND, SECOND)[:variant]:
        accumulator.forward_backward(user.rows(batch), squares)
    accumulator.finalize()


@refused(LossContractError, "give every sample that was counted", 2, 3, ddp=DistributedDataParallel, fsdp2=sharded)
def calls_that_never_come(user: User, variant: Wrap) -> None:
    accumulator = user.accumulator(variant(regressor()), sync="last")
    accumulator.open(weights=num_rows(user))
    accumulator.finalize()


@refused(LossContractError, "give every sample that was counted", 2, 3)
def a_sum_over_ranks_told_on_each(user: User) -> None:
    accumulator = user.accumulator(regressor())
    accumulator.open(weights=16)
    two_calls(accumulator, user)
    accumulator.finalize()


@refused(LossContractError, "one for each, by its name", 1, 2, number=16, other={"b": 16})
def a_term_that_was_not_told(user: User, variant: Any) -> None:
    accumulator = user.accumulator(regressor())
    accumulator.open(weights=variant)
    for name in ("a", "c"):
        accumulator.forward_backward(user.rows(FIRST), lambda model, batch, name=name: {name: squares(model, batch)})


@refused(LossContractError, "but the differentiable terms are", 1, 2)
def a_weigh_of_other_terms(user: User) -> None:
    accumulator = user.accumulator(regressor())
    accumulator.open(weights={"a": num_rows(user)})
    counted = loss(weigh=lambda batch: {"b": len(batch["x"])})
    accumulator.forward_backward(user.rows(FIRST), counted(lambda model, batch: {"a": squares(model, batch)}))


@refused(LossContractError, "tell the weight of each before the first", 1, 2)
def several_terms_in_calls_that_were_not_opened(user: User) -> None:
    accumulator = user.accumulator(regressor())
    accumulator.open()
    counted = loss(weigh=lambda batch: {"a": len(batch["x"]), "b": len(batch["x"])})
    terms = counted(lambda model, batch: dict.fromkeys(("a", "b"), squares(model, batch)))
    for batch in (FIRST, SECOND):
        accumulator.forward_backward(user.rows(batch), terms)


@refused(LossContractError, "must be finite and not negative", 1, 2, 3, negative=-1.0, nan=float("nan"))
def a_weight_that_is_none(user: User, variant: Any) -> None:
    user.accumulator(regressor()).open(weights=variant if user.rank == 0 else 1.0)


@refused(PlanError, "or leave weights out", 1, 2, none={}, many={str(number): 1 for number in range(9)})
def too_few_or_many_weights(user: User, variant: Any) -> None:
    user.accumulator(regressor()).open(weights=variant)


@refused(PlanError, "name the same everywhere and in one order", 2, 3)
def other_terms_on_one_rank(user: User) -> None:
    user.accumulator(regressor()).open(weights={"a": 1} if user.rank else {"b": 1})


@refused(MegabatchError, "open() was called in an open update", 1, 2)
def opened_twice(user: User) -> None:
    accumulator = user.accumulator(regressor())
    accumulator.open()
    accumulator.open()


@refused(MegabatchError, "open() was called in an open update", 2, 3)
def opened_twice_on_one_rank(user: User) -> None:
    accumulator = user.accumulator(regressor())
    if user.rank == 0:
        accumulator._open = object()  # as if a call had been made on this rank alone
    accumulator.open()


@refused(PlanError, "open() was told the weight before", 1, 2)
def two_divisors(user: User) -> None:
    accumulator = user.accumulator(regressor())
    accumulator.open(weights=num_rows(user))
    two_calls(accumulator, user)
    accumulator.finalize(weight=3.0)


@refused(PlanError, "leave open() or step_in_backward() out", 1)
def an_optimizer_that_steps_in_backward(user: User) -> None:
    model = regressor()
    accumulator = user.accumulator(model)
    accumulator.step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    accumulator.open()


@refused(MegabatchError, "finalize() it before", 1, 2)
def a_loop_of_ones_own(user: User) -> None:
    accumulator = user.accumulator(regressor())
    accumulator.open()
    with accumulator.microbatch(0, of=1, sum_over=1):
        pass


@refused(PlanError, "cannot be saved", 2)
def saved_while_fsdp_holds_it(user: User) -> None:
    accumulator = user.accumulator(sharded(regressor()), sync="last")
    accumulator.open()
    accumulator.forward_backward(user.rows(FIRST), losses.mse)
    accumulator.state_dict()


@refused(PlanError, "holds its reduction back", 2)
def a_state_of_ddp_in_a_model_without(user: User) -> None:
    accumulator = user.accumulator(DistributedDataParallel(regressor()))
    accumulator.open()
    accumulator.forward_backward(user.rows(FIRST), squares)
    user.accumulator(regressor()).load_state_dict(accumulator.state_dict())

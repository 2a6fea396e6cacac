"""Input mutations of opened updates: foreign backwards, states of another policy, lists of models, lost updates."""

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from megabatch import MegabatchError
from tests.exact.inputs import Sample, User, mean_square, refused, regressor, right, squares
from tests.exact.inputs_windows import FIRST, SECOND, WRAPS, Wrap, num_rows, sharded, two_calls


def with_hook(model: nn.Module) -> nn.Module:
    model = DistributedDataParallel(model)
    model.register_comm_hook(model.process_group, allreduce_hook)
    return model


@right(2, 3, **WRAPS)
def a_backward_between_open_and_the_first_call(user: User, variant: Wrap) -> None:
    reference = regressor()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), sync="last")
    accumulator.open(weights=num_rows(user))
    accumulator.model(FIRST["x"]).sum().backward()
    two_calls(accumulator, user)
    accumulator.finalize()
    mean_square(reference, FIRST, SECOND)
    user.expect(accumulator.model, reference)


@right(2, 3)
def a_list_of_which_one_model_has_a_communication_hook(user: User) -> None:
    references = nn.ModuleList([regressor(), regressor()])
    accumulator = user.accumulator([wrap(copy.deepcopy(each)) for wrap, each in
                                    zip((DistributedDataParallel, with_hook), references, strict=True)])  # fmt: skip

    def both(models: Any, batch: Sample) -> tuple[Tensor, int]:
        outputs = models[0](batch["x"]) + models[1](batch["x"])
        return (outputs - batch["labels"]).square().sum(), len(batch["x"])

    accumulator.open(weights=num_rows(user))
    for batch in (FIRST, SECOND):
        accumulator.forward_backward(user.rows(batch), both)
    accumulator.finalize()
    ((both(references, FIRST)[0] + both(references, SECOND)[0]) / 16).backward()
    for model, reference in zip(accumulator.model, references, strict=True):
        user.expect(model, reference)


@right(2, 3)
def a_model_of_a_list_that_an_update_does_not_use(user: User) -> None:
    """Its gradient is None, as without `open`: zeros would let AdamW move it."""
    accumulator = user.accumulator([sharded(regressor()), sharded(regressor())], sync="last")
    losses = [lambda models, batch, index=index: squares(models[index], batch) for index in (0, 1)]
    for used in ((1, 0), (0, 0)):
        accumulator.open(weights=num_rows(user))
        for index, batch in zip(used, (FIRST, SECOND), strict=True):
            accumulator.forward_backward(user.rows(batch), losses[index])
        accumulator.finalize()
    reference = regressor()
    mean_square(reference, FIRST, SECOND)
    user.expect(accumulator.model[0], reference)
    assert all(each.grad is None for each in accumulator.model[1].parameters())


@right(2, 3)
def a_buffer_that_ddp_is_told_to_ignore(user: User) -> None:
    reference = regressor()
    model = copy.deepcopy(reference)
    model.register_buffer("seen", torch.full((2,), float(user.rank)))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["seen"])
    accumulator = user.accumulator(DistributedDataParallel(model))
    accumulator.open(weights=num_rows(user))
    two_calls(accumulator, user)
    accumulator.finalize()
    mean_square(reference, FIRST, SECOND)
    user.expect(accumulator.model, reference)
    assert model.seen.tolist() == [user.rank] * 2


@refused(MegabatchError, "discard() it, and give its samples again", 1, 2, 3)
def a_first_call_that_fails_loses_what_was_told(user: User) -> None:
    accumulator = user.accumulator(regressor())
    accumulator.open(weights=num_rows(user))

    def fails(model: nn.Module, batch: Sample) -> Any:
        model(batch["x"])
        raise ArithmeticError("a bad batch")

    with contextlib.suppress(ArithmeticError):
        accumulator.forward_backward(user.rows(FIRST), fails)
    accumulator.forward_backward(user.rows(SECOND), squares)

"""Dtypes of gradients that cannot be, and an optimizer that steps too early for what is asked."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from megabatch import JointLoss, Learner, MegabatchError
from tests.unit.failures.pipeline import pipeline
from tests.unit.failures.table import SAMPLES, Failure, accumulator, linear, squares, weighed_squares
from tests.unit.failures.wrappers import fsdp1, mesh

HALF = {"accumulate_dtype": torch.float32}
OF_FLOAT16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)


def hooked_ddp() -> nn.Module:
    model = DistributedDataParallel(bfloat16())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return model


def bfloat16() -> nn.Module:
    return linear().bfloat16()


def stepping(update: Callable[[Any], Any], model: nn.Module | None = None, kind: Any = torch.optim.SGD) -> None:
    gradient = accumulator(model or linear())
    gradient.step_in_backward(kind(gradient.model.parameters(), lr=0.1))
    update(gradient)


class Counting(torch.optim.SGD):
    """Moves less with each step, by a count of its own."""

    def step(self, closure: Any = None) -> None:
        self.count = getattr(self, "count", 0) + 1
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            parameter.grad /= self.count
        super().step()


class Waiting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None: ...


def hooked(parameters: Any, lr: float) -> torch.optim.Optimizer:
    def log(*_: object) -> None: ...

    optimizer = torch.optim.SGD(parameters, lr=lr)
    optimizer.register_step_post_hook(log)
    return optimizer


def twice(gradient: Any) -> None:
    gradient.forward_backward(SAMPLES, weighed_squares)
    gradient.forward_backward(SAMPLES, weighed_squares)


def finalized(**settings: float) -> Callable[[Any], Any]:
    def update(gradient: Any) -> None:
        gradient.forward_backward(SAMPLES, weighed_squares)
        gradient.finalize(**settings)

    return update


def clipped_by_a_learner(gradient: Any) -> None:
    optimizer = torch.optim.SGD(gradient.model.parameters(), lr=0.1)
    Learner(gradient.model, optimizer, gradient, max_norm=1.0).forward_backward(SAMPLES, weighed_squares)


class Repeated(nn.Module):
    """Calls a layer twice, and computes it again in each of two backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.linear, x.requires_grad_(), use_reentrant=True)
        return x


class CountingInGroups(torch.optim.SGD):
    """Keeps a number in its parameter groups, once it is told to."""

    counts = True

    def step(self, closure: Any = None) -> None:
        super().step()
        if self.counts:
            self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1


def counting_later() -> None:
    gradient = accumulator(linear())
    optimizer = CountingInGroups(gradient.model.parameters(), lr=0.1)
    optimizer.counts = False
    gradient.step_in_backward(optimizer)
    optimizer.counts = True
    gradient.forward_backward(SAMPLES, weighed_squares)


def in_two_parts() -> None:
    """Refused before anything has moved."""
    model = Repeated()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        stepping(lambda gradient: gradient.forward_backward(SAMPLES, weighed_squares), model)
    finally:
        assert all(map(torch.equal, before, model.parameters()))


def half_total() -> None:
    accumulator().forward_backward(SAMPLES, lambda model, batch: (squares(model, batch)[0].half(), 1))


FAILURES = {
    "accumulate in float16": Failure(
        "accumulate_dtype is torch.float16", lambda: accumulator(bfloat16(), accumulate_dtype=torch.float16)
    ),
    "parameters in float16": Failure("'weight' … torch.float16", lambda: accumulator(linear().half())),
    "a total in float16": Failure("'loss' … torch.float16", half_total),
    "LBFGS in backward": Failure(
        "TypeError … step() … missing 1 required … 'closure'", lambda: stepping(twice, kind=torch.optim.LBFGS)
    ),
    "a count of steps in backward": Failure("steps by itself", lambda: stepping(twice, kind=Counting)),
    "a step in backward that moves nothing": Failure("in 3 steps", lambda: stepping(twice, kind=Waiting)),
    "a hook of the step in backward": Failure("'log'", lambda: stepping(twice, kind=hooked)),
    "two calls and a step in backward": Failure("in one update", lambda: stepping(twice)),
    "a late weight and a step in backward": Failure(
        "has no weigh", lambda: stepping(lambda gradient: gradient.forward_backward(SAMPLES, squares))
    ),
    "clipping after a step in backward": Failure(
        "max_norm … is 1.0 … finalize()", lambda: stepping(finalized(max_norm=1.0))
    ),
    "another weight after a step in backward": Failure(
        "weight … is 2.0 … finalize()", lambda: stepping(finalized(weight=2.0))
    ),
    "a Learner that clips, and a step in backward": Failure("max_norm", lambda: stepping(clipped_by_a_learner)),
    "a joint loss and a step in backward": Failure(
        "JointLoss", lambda: stepping(lambda gradient: gradient.forward_backward(SAMPLES, JointLoss(squares, squares)))
    ),
    "a gradient in two parts": Failure("(1,) … use_reentrant=True … FSDP2", in_two_parts),
    "an optimizer that counts in its groups": Failure(
        "CountingInGroups", lambda: stepping(twice, kind=CountingInGroups)
    ),
    "an optimizer that counts in its groups later": Failure(
        "stepped 1 of … 2 parameters", counting_later, MegabatchError
    ),
}
IN_A_GROUP = {
    "wider than DDP with a static graph": Failure(
        "accumulate_dtype … torch.float32 … DDP … static_graph=True",
        lambda: accumulator(DistributedDataParallel(bfloat16(), static_graph=True), **HALF),
    ),
    "wider than DDP with a hook": Failure(
        "accumulate_dtype … torch.float32 … DDP … hook", lambda: accumulator(hooked_ddp(), **HALF)
    ),
    "FSDP2 that computes in float16": Failure(
        "FSDP2 … param_dtype … torch.float16",
        lambda: accumulator(fully_shard(linear(), mesh=mesh("dp"), mp_policy=OF_FLOAT16)),
    ),
    "wider than FSDP1": Failure(
        "accumulate_dtype … torch.float32 … FSDP1", lambda: accumulator(fsdp1(bfloat16()), **HALF)
    ),
    "wider than FSDP2 reduces": Failure(
        "accumulate_dtype … torch.float32 … FSDP2 … torch.bfloat16",
        lambda: accumulator(fully_shard(bfloat16(), mesh=mesh("dp")), **HALF),
    ),
    "FSDP2 in float16": Failure(
        "FSDP2 … reduce_dtype … torch.float16",
        lambda: accumulator(
            fully_shard(bfloat16(), mesh=mesh("dp"), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
        ),
    ),
    "FSDP1 in float16": Failure(
        "FSDP1 … MixedPrecision … torch.float16",
        lambda: accumulator(fsdp1(bfloat16(), mixed_precision=MixedPrecision(reduce_dtype=torch.float16))),
    ),
    "wider than a pipeline": Failure(
        "accumulate_dtype … torch.float32", lambda: accumulator(pipeline(bfloat16()), **HALF)
    ),
    "a step in the backward of DDP": Failure(
        "DistributedDataParallel", lambda: stepping(twice, DistributedDataParallel(linear()))
    ),
}

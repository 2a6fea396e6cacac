"""Dtypes of gradients that cannot be, and an optimizer that steps too early for what is asked."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from megabatch import JointLoss, Learner, MegabatchError, PlanError, verify
from tests.unit.failures.pipeline import pipeline
from tests.unit.failures.table import SAMPLES, Failure, accumulator, linear, squares, weighed_squares
from tests.unit.failures.wrappers import fsdp1, mesh

UNDERFLOW = "dividing the loss by the update's weight before backward underflows in float16; use bfloat16"
LEAVE_OUT = "or leave step_in_backward() out"
HALF = {"accumulate_dtype": torch.float32}


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


def clipped(gradient: Any) -> None:
    gradient.forward_backward(SAMPLES, weighed_squares)
    gradient.finalize(max_norm=1.0)


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


def half_total() -> None:
    accumulator().forward_backward(SAMPLES, lambda model, batch: (squares(model, batch)[0].half(), 1))


FAILURES = {
    "accumulate in float16": Failure(
        PlanError, f"accumulate_dtype is torch.float16; {UNDERFLOW}",
        lambda: accumulator(bfloat16(), accumulate_dtype=torch.float16),
    ),
    "parameters in float16": Failure(
        PlanError, f"parameter 'weight' is torch.float16; {UNDERFLOW}", lambda: accumulator(linear().half())
    ),
    "a total in float16": Failure(PlanError, f"the total of 'loss' is torch.float16; {UNDERFLOW}", half_total),
    "LBFGS in backward": Failure(
        PlanError,
        "LBFGS failed when a copy was tried on small parameters, together and one by one (TypeError: LBFGS.step() "
        f"missing 1 required positional argument: 'closure'); take another optimizer, {LEAVE_OUT}",
        lambda: stepping(twice, kind=torch.optim.LBFGS),
    ),
    "a count of steps in backward": Failure(
        PlanError,
        "Counting counts its steps by itself, or keeps something else that is not of one parameter, so that it cannot "
        f"step parameter by parameter; take another optimizer, {LEAVE_OUT}",
        lambda: stepping(twice, kind=Counting),
    ),
    "a step in backward that moves nothing": Failure(
        PlanError,
        "Waiting moved nothing in 3 steps of a copy on small parameters, so that nobody knows whether it can step "
        f"parameter by parameter; take another optimizer, {LEAVE_OUT}",
        lambda: stepping(twice, kind=Waiting),
    ),
    "a hook of the step in backward": Failure(
        PlanError,
        f"SGD has the step hook 'log', which would run once for each parameter; remove the hook, {LEAVE_OUT}",
        lambda: stepping(twice, kind=hooked),
    ),
    "two calls and a step in backward": Failure(
        PlanError,
        "a second call in one update, but the optimizer has stepped in the last backward of the first; give all "
        f"samples to one forward_backward, {LEAVE_OUT}",
        lambda: stepping(twice),
    ),
    "a late weight and a step in backward": Failure(
        PlanError,
        "the loss has no weigh, and an optimizer that steps in backward cannot wait for the weight; count it with "
        f"@megabatch.loss(weigh=...), {LEAVE_OUT}",
        lambda: stepping(lambda gradient: gradient.forward_backward(SAMPLES, squares)),
    ),
    "clipping after a step in backward": Failure(
        PlanError,
        "max_norm is 1.0, but the optimizer steps in backward, before finalize() can scale a gradient; leave max_norm "
        f"out, {LEAVE_OUT}",
        lambda: stepping(clipped),
    ),
    "a Learner that clips, and a step in backward": Failure(
        PlanError,
        "the Learner clips to max_norm, but its optimizer steps in backward, before a norm is known; leave max_norm or "
        "step_in_backward() out",
        lambda: stepping(clipped_by_a_learner),
    ),
    "a joint loss and a step in backward": Failure(
        PlanError,
        "a JointLoss has a backward of its own, in which no optimizer steps; leave step_in_backward() out",
        lambda: stepping(lambda gradient: gradient.forward_backward(SAMPLES, JointLoss(squares, squares))),
    ),
    "a gradient in two parts": Failure(
        PlanError,
        "a parameter of shape (1,) got its gradient in two parts of one backward (checkpointing with "
        "use_reentrant=True, or a module that FSDP2 wraps and the model calls twice), and the optimizer would step "
        f"with the first alone; change this, {LEAVE_OUT}",
        lambda: stepping(lambda gradient: gradient.forward_backward(SAMPLES, weighed_squares), Repeated()),
    ),
    "an optimizer that counts in its groups": Failure(
        PlanError,
        "CountingInGroups writes to its parameter groups in a step, so that it cannot step parameter by parameter; "
        f"take another optimizer, {LEAVE_OUT}",
        lambda: stepping(twice, kind=CountingInGroups),
    ),
    "an optimizer that counts in its groups later": Failure(
        MegabatchError,
        "the last backward failed after the optimizer had stepped 1 of 2 parameters, so the model is between two "
        "updates; go back to a checkpoint (PlanError: CountingInGroups writes to its parameter groups in a step, so "
        f"that it cannot step parameter by parameter; take another optimizer, {LEAVE_OUT})",
        counting_later,
    ),
    "verify a joint loss": Failure(
        PlanError,
        "verify was given a JointLoss, which sees all samples at once however they are cut; compare it with the loss "
        "of all representations yourself",
        lambda: verify(linear(), JointLoss(squares, squares), SAMPLES),
    ),
}  # fmt: skip
IN_A_GROUP = {
    "wider than DDP with a static graph": Failure(
        PlanError,
        "accumulate_dtype is torch.float32, and DDP with static_graph=True or a communication hook cannot reduce after "
        "the last backward; leave both of these, or accumulate_dtype, out",
        lambda: accumulator(DistributedDataParallel(bfloat16(), static_graph=True), **HALF),
    ),
    "wider than FSDP1": Failure(
        PlanError,
        "accumulate_dtype is torch.float32 but FSDP1 accumulates in the parameters' dtype; shard with fully_shard and "
        "MixedPrecisionPolicy(reduce_dtype=torch.float32), or leave accumulate_dtype out",
        lambda: accumulator(fsdp1(bfloat16()), **HALF),
    ),
    "wider than FSDP2 reduces": Failure(
        PlanError,
        "accumulate_dtype is torch.float32 but FSDP2 reduces gradients in torch.bfloat16; give "
        "MixedPrecisionPolicy(reduce_dtype=torch.float32)",
        lambda: accumulator(fully_shard(bfloat16(), mesh=mesh("dp")), **HALF),
    ),
    "FSDP2 in float16": Failure(
        PlanError, f"FSDP2's reduce_dtype is torch.float16; {UNDERFLOW}",
        lambda: accumulator(
            fully_shard(bfloat16(), mesh=mesh("dp"), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
        ),
    ),
    "FSDP1 in float16": Failure(
        PlanError, f"a dtype of FSDP1's MixedPrecision is torch.float16; {UNDERFLOW}",
        lambda: accumulator(fsdp1(bfloat16(), mixed_precision=MixedPrecision(reduce_dtype=torch.float16))),
    ),
    "wider than a pipeline": Failure(
        PlanError,
        "accumulate_dtype is torch.float32, but a pipeline adds gradients in the parameters' dtype; leave "
        "accumulate_dtype out",
        lambda: accumulator(pipeline(bfloat16()), **HALF),
    ),
    "a step in the backward of DDP": Failure(
        PlanError,
        "the model has DistributedDataParallel, whose whole gradient is there only after the backward; an optimizer "
        "can step in it for a plain model on one rank and for FSDP2 without a pipeline; shard with fully_shard, "
        f"{LEAVE_OUT}",
        lambda: stepping(twice, DistributedDataParallel(linear())),
    ),
}  # fmt: skip

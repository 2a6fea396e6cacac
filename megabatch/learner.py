"""Learner: two verbs for all of training."""

from typing import Any, cast

import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from megabatch.accumulator import GradientAccumulator
from megabatch.batching.samples import Batch
from megabatch.engine.update import Update
from megabatch.errors import LossContractError, PlanError
from megabatch.losses.contract import JointLoss, LossFunction, Term


class Learner:
    """A model, its optimizer and its schedule, moved by updates.

    Call `forward_backward` as often as data comes, then `optim_step`.

    Args:
        model: The model that ``gradient`` was made for.
        optimizer: Any torch optimizer over its parameters.
        gradient: Computes the gradient of an update.
        scheduler: Stepped once per update that was stepped.
        max_norm: Clips each update's gradient to this norm.

    Raises `PlanError` for a scheduler that is stepped with a metric.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        gradient: GradientAccumulator,
        *,
        scheduler: optim.lr_scheduler.LRScheduler | None = None,
        max_norm: float | None = None,
    ) -> None:
        if isinstance(getattr(scheduler, "scheduler", scheduler), optim.lr_scheduler.ReduceLROnPlateau):
            raise PlanError(
                "ReduceLROnPlateau is stepped with a metric, and the Learner steps its scheduler with none; leave "
                "scheduler out and call scheduler.step(metric) yourself"
            )
        self.model = model
        self.optimizer = optimizer
        self.gradient = gradient
        self.scheduler = scheduler
        self.max_norm = max_norm
        gradient.reserve_for(optimizer)
        self.step = 0  # updates so far, stepped or not

    def forward_backward(self, batch: Batch, loss_fn: LossFunction | JointLoss) -> dict[str, Term]:
        """Add this rank's samples to the update; returns this rank's sums of this call."""
        if self.max_norm is not None and self.gradient.steps_in_backward:
            raise PlanError(
                "the Learner clips to max_norm, but its optimizer steps in backward, before a norm is known; leave "
                "max_norm or step_in_backward() out"
            )
        return self.gradient.forward_backward(batch, loss_fn)

    def optim_step(self) -> Update:
        """Close the update and step optimizer and scheduler once; neither, where ``update.finite`` is false.

        Raises `LossContractError` where the weight that was counted is not the weight that was returned.
        """
        update = self.gradient.finalize(max_norm=self.max_norm)
        if update.finite:  # the one wait for the device
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        elif isinstance(problem := update.problem(), LossContractError):
            self.optimizer.zero_grad(set_to_none=True)
            raise problem
        self.step += 1
        return update

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer, schedule and step, under names and shards that torch.distributed.checkpoint can re-deal."""
        is_new = not self.optimizer.state
        model, optimizer = self._described_new() if is_new else get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": self.step}
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        return state

    def _described_new(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What torch says of an optimizer that has made no step: it makes one with zeros, to have something to say.

        That step is not counted, and nothing of it stays. Gradients, of which torch would say less, are kept aside.
        """
        kept = {each: each.grad for group in self.optimizer.param_groups for each in group["params"]}
        for parameter in kept:
            parameter.grad = None
        model, optimizer = get_state_dict(self.model, self.optimizer)
        self.optimizer.state.clear()
        for parameter, gradient in kept.items():
            parameter.grad = gradient
        for state in cast(dict[str, Any], optimizer.get("state", {})).values():
            if "step" in state:
                state["step"] = torch.zeros_like(torch.as_tensor(state["step"]))
        return cast(dict[str, Any], model), cast(dict[str, Any], optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        if state["step"] == 0:  # what is described is not the optimizer's own
            self.optimizer.state.clear()
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]

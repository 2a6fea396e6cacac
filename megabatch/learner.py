"""Training in two calls, `Learner.forward_backward` and `Learner.optim_step`."""

from typing import Any, cast

import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from megabatch.core.contract import CoupledLoss, LossFunction, Term
from megabatch.core.samples import Batch
from megabatch.core.update import Update
from megabatch.errors import LossContractError, PlanError
from megabatch.gradient_accumulator import GradientAccumulator


class Learner:
    """A model with its optimizer, schedule and gradient accumulator.

    Call `forward_backward` for each batch of an update, then `optim_step` once.

    Args:
        model: The model of ``gradient``.
        optimizer: Any torch optimizer over its parameters.
        gradient: Computes the gradient of an update.
        scheduler: Steps once after each step of the optimizer.
        max_norm: Clips each update's gradient to this norm.

    Raises:
        PlanError: The scheduler needs a metric in each step.
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

    def forward_backward(self, batch: Batch, loss_fn: LossFunction | CoupledLoss) -> dict[str, Term]:
        """Add this rank's samples to the update. Collective.

        Args:
            batch: A mapping of tensors with samples in dim 0, or a list of samples.
            loss_fn: ``loss_fn(model, microbatch)`` returns ``(total, weight)`` or a mapping of names to such pairs.

        Returns:
            This rank's sums in this call, by name of the term, detached.

        Raises:
            PlanError: The batch cannot be used.
            LossContractError: The loss breaks its contract.
        """
        return self.gradient.forward_backward(batch, loss_fn)

    def optim_step(self) -> Update:
        """Finalize the update, and step optimizer and scheduler once. Step neither if ``update.finite`` is false.

        Returns:
            The update: its loss, terms, norm and counts.

        Raises:
            LossContractError: The counted weight differs from the weight that the loss returned.
        """
        return self.apply(self.gradient.finalize(max_norm=self.max_norm))

    def apply(self, update: Update) -> Update:
        """Step optimizer and scheduler with an update whose gradient is in ``p.grad``, as `optim_step` does.

        Returns:
            The update.

        Raises:
            LossContractError: The counted weight differs from the weight that the loss returned.
        """
        if update.finite:  # the only wait for the device
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        elif isinstance(problem := update.problem(), LossContractError):
            self.optimizer.zero_grad(set_to_none=True)
            raise problem
        self.step += 1
        return update

    def state_dict(self) -> dict[str, Any]:
        """Return the state of model, optimizer, schedule and step, which torch.distributed.checkpoint can reshard."""
        is_new = not self.optimizer.state
        model, optimizer = self._state_of_new_optimizer() if is_new else get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": self.step}
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        if state["step"] == 0:  # the states in the dict are torch's zeros, not the optimizer's own
            self.optimizer.state.clear()
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]

    def _state_of_new_optimizer(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return torch's state dicts for an optimizer that has made no step.

        torch makes a step with zeros to create the states; this method undoes it. Gradients are set aside, since torch
        would create no states beside them.
        """
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        gradients = {parameter: parameter.grad for parameter in parameters}
        for parameter in parameters:
            parameter.grad = None
        model, optimizer = get_state_dict(self.model, self.optimizer)
        self.optimizer.state.clear()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for state in cast(dict[str, Any], optimizer.get("state", {})).values():
            if "step" in state:
                state["step"] = torch.zeros_like(torch.as_tensor(state["step"]))
        return cast(dict[str, Any], model), cast(dict[str, Any], optimizer)

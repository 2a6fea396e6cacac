"""The optimizer's step inside the last backward of an update, parameter by parameter.

Each gradient is freed as soon as its parameter is stepped. With one microbatch, few gradients exist at one time.
"""

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from megabatch.engine.call import CallAgreement
from megabatch.engine.optimizer_trial import LEAVE_OUT, check_optimizer, check_step_hooks, step_alone
from megabatch.errors import MegabatchError, PlanError, in_one_line
from megabatch.torch_private import is_dtensor
from megabatch.wrappers.base import Wrapper


class StepInBackward:
    """Steps an optimizer during the last backward of each update. The result has the same bits as a step afterwards.

    An update is one call, and its loss must count its weight (``weigh=``). You still call ``optimizer.step()`` and the
    scheduler after `finalize`. The optimizer finds no gradient then and does nothing.

    A step cannot be undone. If ``update.finite`` is false, or if the counted and the returned weights differ, you are
    told as usual, but the parameters and the optimizer's state have already moved: go back to a checkpoint. An update
    without weight, or one whose loss raises, moves nothing.

    Args:
        optimizer: An optimizer that reads one parameter at a time and keeps its state by parameter. A copy is tried.
        wrapper: The wrapper of a plain model on one rank, or of FSDP2, HSDP or the replicate built on FSDP2.

    Raises:
        PlanError: Another wrapper, an optimizer that reads several parameters at once or counts its own steps, or one
            with step hooks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, wrapper: Wrapper) -> None:
        _check_wrapper(wrapper)
        check_step_hooks(optimizer)
        check_optimizer(optimizer)
        self._optimizer = optimizer
        self._parameters = wrapper.parameters
        self._groups: dict[int, dict[str, Any]] = {}  # the optimizer's, by id of the parameter
        self._last = -1  # index of the update's last microbatch
        self._has_weight = False
        self._is_stepping = False
        self._received: set[int] | None = None  # ids of the parameters that have their gradient; None: no backward runs
        self._num_stepped = 0
        # FSDP2 fires this hook after its reduction, with the sharded gradient.
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._receive)

    def prepare_call(self, call: CallAgreement, number: int) -> None:
        """Prepare a call before its first forward. Raises `PlanError` on all ranks if it cannot be the whole update."""
        if number > 1:
            raise PlanError(
                "a second call in one update, but the optimizer has stepped in the last backward of the first; give "
                f"all samples to one forward_backward, {LEAVE_OUT}"
            )
        if not call.weights:
            raise PlanError(
                "the loss has no weigh, and an optimizer that steps in backward cannot wait for the weight; count it "
                f"with @megabatch.loss(weigh=...), {LEAVE_OUT}"
            )
        check_step_hooks(self._optimizer)
        # Without weight there is no gradient, and a step would still apply weight decay and momentum.
        self._last, self._has_weight = call.num_microbatches - 1, any(call.weights.values())
        self._groups = {id(each): group for group in self._optimizer.param_groups for each in group["params"]}

    @contextlib.contextmanager
    def backward(self, index: int) -> Generator[None]:
        """Surround the backward of microbatch ``index``."""
        self._received, self._num_stepped = set(), 0
        self._is_stepping = index == self._last and self._has_weight
        try:
            yield
            if self._is_stepping:
                self._step_the_rest()
        except Exception as error:
            raise self._failure(error) from error
        finally:
            self._received, self._is_stepping = None, False

    def check_finalize(self, max_norm: float | None, weight: float | None) -> None:
        """Raise `PlanError` for a setting of `finalize` that the step needed before."""
        for name, value in {"max_norm": max_norm, "weight": weight}.items():
            if value is not None:
                raise PlanError(
                    f"{name} is {value}, but the optimizer steps in backward, before finalize() can scale a gradient; "
                    f"leave {name} out, {LEAVE_OUT}"
                )

    def _receive(self, parameter: Tensor) -> None:
        """Note that a parameter's gradient is complete, and reduced if it is sharded. Step in the last backward."""
        if self._received is None:
            return
        if id(parameter) in self._received:
            raise PlanError(
                f"a parameter of shape {tuple(parameter.shape)} got its gradient in two parts of one backward "
                "(checkpointing with use_reentrant=True, or a module that FSDP2 wraps and the model calls twice), and "
                f"the optimizer would step with the first alone; change this, {LEAVE_OUT}"
            )
        self._received.add(id(parameter))
        if self._is_stepping:
            self._step(parameter)

    def _step_the_rest(self) -> None:
        """Step the parameters that earlier microbatches used and the last one did not."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._step(parameter)

    def _step(self, parameter: Tensor) -> None:
        group = self._groups.get(id(parameter))
        gradient = parameter.grad
        # The optimizer need not have every parameter of the model.
        if group is None or gradient is None:
            return
        parameter.grad = gradient.to(parameter.dtype)  # accumulate_dtype may be wider
        del gradient  # a second reference would keep its memory through the step
        self._num_stepped += 1
        step_alone(self._optimizer, group, parameter)

    def _failure(self, error: Exception) -> Exception:
        if not self._num_stepped:
            return error
        return MegabatchError(
            f"the last backward failed after the optimizer had stepped {self._num_stepped} of {len(self._parameters)} "
            f"parameters, so the model is between two updates; go back to a checkpoint ({in_one_line(error)})"
        )


def _check_wrapper(wrapper: Wrapper) -> None:
    name = wrapper.kind_name
    if len({parameter.device for parameter in wrapper.parameters}) > 1:
        name = "parameters on several devices"
    elif wrapper.hands_over_in_backward and wrapper.ranks.pipeline is None:
        return
    elif type(wrapper) is Wrapper:
        if wrapper.ranks.num_all == 1 and not any(is_dtensor(each.data) for each in wrapper.parameters):
            return
        name = "no wrapper and several ranks"
    raise PlanError(
        f"the model has {name}, whose whole gradient is there only after the backward; an optimizer can step in it "
        f"for a plain model on one rank and for FSDP2 without a pipeline; shard with fully_shard, {LEAVE_OUT}"
    )

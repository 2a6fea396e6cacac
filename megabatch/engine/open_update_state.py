"""The state of an open update between two calls, for checkpoints.

Each rank saves its own sums and its part of the gradient. The same number of ranks must restore the state, each its
own.
"""

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from megabatch.engine.update import OpenUpdate
from megabatch.errors import PlanError
from megabatch.torch_private import is_dtensor
from megabatch.wrappers.base import Wrapper, local
from megabatch.wrappers.gradients import WideGradients

State = Mapping[str, Any]
OWN = "as the parameter"


def save_open_update(opened: OpenUpdate | None, wrapper: Wrapper) -> dict[str, Any]:
    """Return the state of the update: numbers, strings, and copies of this rank's gradients. Wait for the device.

    Raises `PlanError` for a wrapper that keeps gradients outside of ``p.grad``.
    """
    if opened is None:
        return {}
    if not wrapper.may_pause:
        raise PlanError(
            f"the model has {wrapper.kind_name}, which has parts of an open update's gradient to itself, so that it "
            "cannot be saved; finalize() before"
        )
    having = {str(index): each for index, each in enumerate(wrapper.parameters) if each.grad is not None}
    return {
        "ranks": wrapper.ranks.num_all,
        "update": opened.state_dict(),
        "is_opened": opened.is_held,
        "is_held": wrapper.is_held,
        "reduces_at_end": wrapper.reduces_at_end,
        # Local tensors: a DTensor in a state would need its mesh to be read.
        "gradients": {index: local(cast(Tensor, each.grad)).detach().clone() for index, each in having.items()},
        "layouts": {index: [list(each.shape), _axes(each)] for index, each in having.items()},
    }


def restore_open_update(state: State, wrapper: Wrapper, wide: WideGradients, opened: OpenUpdate) -> OpenUpdate | None:
    """Restore the update of ``state`` in the new ``opened``, and every ``p.grad``. Return None if no update was open.

    Raises `PlanError` for a state of other ranks or parameters.
    """
    if not state:
        return None
    if "ranks" not in state or "shapes" in state:
        raise PlanError(
            f"the state has {', '.join(state)}, and not those of an open update alone; give the shapes= or same_bits= "
            "with which it was saved, or load it without their keys"
        )
    if state["ranks"] != wrapper.ranks.num_all:
        raise PlanError(
            f"the open update is of {state['ranks']} ranks and here are {wrapper.ranks.num_all}, whose parts of the "
            "gradient are others; begin the update again"
        )
    wrapper.check_unchanged()
    opened.load_state_dict(state["update"])
    # An opened update that has reduced its first calls goes on to reduce each call.
    opened.is_held = state.get("is_held", False) or (state.get("is_opened", False) and not opened.has_calls)
    if state.get("is_held", False):  # each rank has the gradient of its own samples
        wrapper.hold_reduction("last")
        if not wrapper.is_held:
            raise PlanError(
                f"the open update holds its reduction back, which the model with {wrapper.kind_name} cannot do; wrap "
                "it as it was, or begin the update again"
            )
    if opened.has_calls and wrapper.ranks.num_all > 1 and wrapper.reduces_at_end != state.get("reduces_at_end"):
        raise PlanError(
            "the open update was saved by another wrapper or policy, whose gradients are summed over ranks at another "
            "time; wrap the model as it was, or begin the update again"
        )
    wide.begin()  # first, since it lets p.grad have another dtype than the parameter
    for index, parameter in enumerate(wrapper.parameters):
        kept = state["gradients"].get(str(index))
        layout = state["layouts"].get(str(index))
        parameter.grad = None if layout is None else _gradient(parameter, kept, *layout)
    return opened


def _gradient(parameter: nn.Parameter, kept: Tensor, shape: list[int], axes: list[str]) -> Tensor:
    """Return a gradient from this rank's part of it, in its old layout."""
    if shape != list(parameter.shape):
        raise PlanError(
            f"the open update has a gradient of the shape {tuple(shape)} for a parameter of the shape "
            f"{tuple(parameter.shape)}; begin the update again"
        )
    own = parameter.data
    held = kept.to(own.device, copy=True)  # a copy, since later backwards add to it in place
    if not is_dtensor(own):
        return held
    from torch.distributed.tensor import DTensor, Partial, Replicate  # slow, and there by now

    others = {each.__name__: each for each in (Partial, Replicate)}  # ways in which a gradient may lie
    placements = [mine if axis == OWN else others[axis]() for mine, axis in zip(own.placements, axes, strict=True)]
    return DTensor.from_local(
        held,
        own.device_mesh,
        placements,
        run_check=False,
        shape=own.shape,
        stride=own.stride(),
    )


def _axes(parameter: nn.Parameter) -> list[str]:
    """Return the layout of a parameter's gradient on each axis of its mesh. Empty for a plain tensor."""
    own, gradient = parameter.data, parameter.grad
    if not is_dtensor(own) or not is_dtensor(gradient):
        return []
    pairs = zip(own.placements, gradient.placements, strict=True)
    return [OWN if mine == its else type(its).__name__ for mine, its in pairs]

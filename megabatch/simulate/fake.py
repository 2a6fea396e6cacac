"""Models with fake memory: what can be simulated, and what cannot."""

import contextlib
import gc
from collections.abc import Generator
from typing import Any, cast

from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from megabatch.errors import PlanError, in_one_line
from megabatch.pipeline.stages import Pipeline
from megabatch.simulate.replica import Replica
from megabatch.torch_private import param_groups

NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class Fake(FakeTensorMode):
    """torch's mode, without what keeps a compiler out of it at every operation: there is none."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, types, args, kwargs)


def check_model(model: Any) -> list[nn.Module]:
    """The models of one, or of a list. Raises `PlanError` for what cannot be simulated."""
    models = list(cast(list[Any], model)) if isinstance(model, list | tuple) else [model]
    for each in models:
        if isinstance(each, Pipeline):
            raise PlanError("a Pipeline sends activations that a simulated rank never gets; simulate each stage alone")
        if not isinstance(each, nn.Module):
            raise PlanError(
                f"make_model returned a {type(each).__name__}; expected a torch.nn.Module, or a list of them"
            )
        for module in each.modules():
            _check_module(module)
    return models


def _check_module(module: nn.Module) -> None:
    if isinstance(module, DistributedDataParallel) and not isinstance(module, Replica):
        raise PlanError(
            "DistributedDataParallel's reducer cannot run on fake tensors; wrap with megabatch.simulate.Replica, "
            "which takes its arguments"
        )
    if isinstance(module, FullyShardedDataParallel):
        raise PlanError("FSDP1 cannot be simulated; shard with FSDP2's fully_shard")
    if hasattr(module, "_orig_mod") or cast(Any, module)._compiled_call_impl is not None:
        raise PlanError("the model is compiled, and what a compiler fuses cannot be simulated; leave compile out")


def give_fake_memory(models: list[nn.Module]) -> None:
    """Replace what is on the meta device, or real, by fake memory of the CPU; inside of a FakeTensorMode.

    Parameters that several modules share stay shared. Memory that CPU offload pins is memory all the same.
    """
    for model in models:
        for group in groups_of(model):
            for parameter in group.fsdp_params:
                parameter.pin_memory = False
        shared = _places(model)
        model.to_empty(device="cpu")
        for first, *others in shared:
            for module, name in others:
                _own(module)[name] = _own(first[0])[first[1]]


def groups_of(model: nn.Module) -> list[Any]:
    """FSDP2's groups of parameters."""
    return param_groups([module for module in model.modules() if isinstance(module, FSDPModule)])


def _places(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Where each parameter stands that stands in several places."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in _own(module).items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [each for each in places.values() if len(each) > 1]


def _own(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters by name; shared ones appear in each."""
    return cast(Any, module)._parameters


@contextlib.contextmanager
def no_collector() -> Generator[None]:
    """While it is open, Python's collector of cycles rests: what is freed when is the same every time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def refusing_data() -> Generator[None]:
    """Raise `PlanError` in one line where code looks at numbers, which nobody knows here."""
    try:
        yield
    except NEEDS_DATA as error:
        raise PlanError(
            f"what is run looks at the contents of a tensor ({in_one_line(error)}), and a simulation has none; give "
            "code whose shapes follow from shapes (experts by grouped_mm, no .item(), no nonzero)"
        ) from None

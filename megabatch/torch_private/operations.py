"""Operations, and the modes that see them."""

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

pytree = _pytree  # nested containers of tensors
NEEDS_DATA = (  # what a fake tensor raises where its contents are read
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
WAIT = torch.ops._c10d_functional.wait_tensor.default  # returns its argument; on fake tensors, a tensor of its own
# Called for every operation.
packet_of: Callable[[Any], Any] = operator.attrgetter("_overloadpacket")  # an operation with all its overloads
name_of_operation: Callable[[Any], str] = operator.attrgetter("_opname")  # without its namespace
schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
address_of: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")  # of the storage in C++


class UncompiledMode:
    """A base of dispatch modes that no compiler meets: ``TorchDispatchMode._should_skip_dynamo``.

    Torch keeps a compiler out of each operation, which takes longer than the operation on fake tensors.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def has_function_mode() -> bool:
    """``torch._C._is_torch_function_mode_enabled``: whether a TorchFunctionMode is open."""
    return cast(Any, torch)._C._is_torch_function_mode_enabled()


def without_subclasses() -> AbstractContextManager[object]:
    """``torch._C.DisableTorchFunctionSubclass``: calls inside of ``__torch_function__`` are plain ones."""
    return cast(Any, torch)._C.DisableTorchFunctionSubclass()


def start_profiler() -> None:
    """``_enable_profiler_legacy``, with memory. Raises RuntimeError where another profiler runs."""
    profiler: Any = cast(Any, torch)._C._profiler
    experimental = profiler._ExperimentalConfig()
    config = profiler.ProfilerConfig(profiler.ProfilerState.CPU, False, True, False, False, False, experimental)
    cast(Any, torch)._C._autograd._enable_profiler_legacy(config)


def stop_profiler() -> list[list[Any]]:
    """``_disable_profiler_legacy``: the events of each thread."""
    return cast(Any, torch)._C._autograd._disable_profiler_legacy()

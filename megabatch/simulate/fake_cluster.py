"""Fake tensors and a fake process group: this process acts as one rank of many, without memory, weights or peers."""

import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from megabatch.core.mesh import DataRanks
from megabatch.errors import PlanError, in_one_line, require_count
from megabatch.inspection.mesh_axes import check_axes
from megabatch.optim import low_bits
from megabatch.pipeline.stages import Pipeline
from megabatch.simulate.devices import Device
from megabatch.simulate.ledger import replaced
from megabatch.simulate.replica import Replica
from megabatch.torch_private.dtensors import clear_mesh_caches
from megabatch.torch_private.fsdp2_groups import param_groups
from megabatch.torch_private.module_members import is_compiled, original_of, own_parameters
from megabatch.torch_private.operations import NEEDS_DATA, FakeTensorMode, UncompiledMode
from megabatch.torch_private.process_groups import make_fake_store

GROUPED_IN_BFLOAT16 = "Expected inputs of BF16 type"  # what torch's product in groups says of fake tensors


class FakeMode(UncompiledMode, FakeTensorMode):
    """torch's fake mode without its check for a compiler at every operation: there is none."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, types, args, kwargs)


def check_model(model: Any) -> list[nn.Module]:
    """Return the models of one model or a list. Raise `PlanError` for one that cannot be simulated."""
    models = list(cast(list[Any], model)) if isinstance(model, list | tuple) else [model]
    for listed in models:
        if isinstance(listed, Pipeline) and len(models) > 1:
            raise PlanError("a Pipeline cannot be one of several models; simulate it alone")
        if not isinstance(listed, nn.Module):
            raise PlanError(
                f"make_model returned a {type(listed).__name__}; expected a torch.nn.Module, or a list of them"
            )
        for module in listed.modules():
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
    if original_of(module) is not module or is_compiled(module):
        raise PlanError(
            "the model is compiled, which does not run on fake tensors; leave compile out: compiled layers keep less"
        )


def give_fake_memory(models: list[nn.Module]) -> None:
    """Replace meta or real tensors by fake ones of the CPU; call it inside of a FakeTensorMode.

    Parameters that several modules share stay shared. Pinned memory of CPU offload counts as ordinary memory.
    """
    for model in models:
        for group in fsdp_groups(model):
            for parameter in group.fsdp_params:
                parameter.pin_memory = False
        shared = _shared_places(model)
        model.to_empty(device="cpu")
        for first, *other_places in shared:
            for module, name in other_places:
                own_parameters(module)[name] = own_parameters(first[0])[first[1]]


def fsdp_groups(model: nn.Module) -> list[Any]:
    """Return FSDP2's groups of parameters."""
    return param_groups([module for module in model.modules() if isinstance(module, FSDPModule)])


def _shared_places(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of each parameter that several modules share."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in own_parameters(module).items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [shared_places for shared_places in places.values() if len(shared_places) > 1]


@contextlib.contextmanager
def disabled_gc() -> Generator[None]:
    """Disable Python's garbage collector, so that memory is freed at the same time in every run."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def uncut_steps(device: Device) -> Generator[None]:
    """Let `LowBits` step whole tensors, as it does on a GPU: on a CPU it cuts them into pieces for the cache."""
    piece = low_bits.PIECE
    low_bits.PIECE = piece if device.is_cpu else 2**62
    try:
        yield
    finally:
        low_bits.PIECE = piece


@contextlib.contextmanager
def refuse_data_access() -> Generator[None]:
    """Raise `PlanError` in one line for what fake tensors cannot do: give their contents, or multiply in groups.

    torch's shapes of a product in groups are those of bfloat16, although its kernels take float32 too.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # It logs a traceback of what it raises.
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    except NEEDS_DATA as error:
        raise PlanError(
            f"what is run looks at the contents of a tensor ({in_one_line(error)}), and a simulation has none; give "
            "code whose shapes follow from shapes (experts by grouped_mm, no .item(), no nonzero)"
        ) from None
    except RuntimeError as error:
        if GROUPED_IN_BFLOAT16 not in str(error):
            raise
        raise PlanError(
            "experts are multiplied in groups in another dtype than bfloat16, the one that torch simulates; plan in it "
            "(--model.dtype=bfloat16)"
        ) from None
    finally:
        logger.disabled = was_disabled


@contextlib.contextmanager
def one_text_per_row(make_batch: Callable[[], Any]) -> Generator[None]:
    """Let models of transformers see one text in each row, unless the microbatch has positions.

    They compare the positions of a row to know whether it holds several texts. Fake positions count as such, and each
    layer would keep a mask [B, 1, T, T], which a run does not make.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    batch = make_batch()
    has_positions = not isinstance(batch, Mapping) or "position_ids" in batch
    del batch  # which would count
    if masks is None or has_positions:
        yield
        return

    def find_none(_: Any) -> Callable[[Tensor], None]:
        return lambda position_ids: None

    with replaced(masks, "find_packed_sequence_indices", find_none):
        yield


class OnlyRank(DataRanks):
    """Ranks on which every other rank sends the same as this one."""

    @classmethod
    def like(cls, ranks: DataRanks) -> "OnlyRank":
        """Return ranks with the same groups."""
        return cls(ranks.data_groups, ranks.context_groups, ranks.tensor_groups, ranks.pipeline_groups)

    def exchange_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        return [list(numbers) for _ in range(self.num_all)]

    def exchange_objects(self, value: Any) -> list[Any]:
        return [value for _ in range(self.num_all)]

    def gather_report(self, numbers: Tensor) -> Tensor:
        return self.gather_on_device(numbers)


@contextlib.contextmanager
def fake_mesh(axes: Mapping[str, int], rank: int = 0) -> Generator[DeviceMesh | None]:
    """Make this process a rank of a mesh with these axes, over a fake process group; None without axes.

    Raises:
        PlanError: A process group exists already, an axis is unknown, or the mesh has no such rank.
    """
    for axis, size in axes.items():
        require_count(f"the size of mesh axis {axis!r}", size)
    num_ranks = prod(axes.values())
    if not 0 <= rank < num_ranks:
        raise PlanError(f"rank is {rank} and the mesh has {num_ranks} ranks; give one from 0 to {num_ranks - 1}")
    if dist.is_initialized():
        raise PlanError(
            "this process has a process group, and a simulated one would take its place; simulate in a process of its "
            "own, or call torch.distributed.destroy_process_group() before"
        )
    if not axes:
        yield None
        return
    dist.init_process_group("fake", store=make_fake_store(), rank=rank, world_size=num_ranks)
    try:
        clear_mesh_caches()
        with torch.device("cpu"):
            mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        check_axes(mesh)
        yield mesh
    finally:
        dist.destroy_process_group()
        clear_mesh_caches()

"""Which reducer a model needs, and which policy it follows.

"last"          reduce once per call, with the last microbatch
"every"         reduce with each microbatch
"replica_last"  HSDP: reduce-scatter with each microbatch, all-reduce once per call
"auto"          what suits the wrapper
"""

from collections.abc import Sequence
from math import prod
from typing import cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megabatch.errors import PlanError
from megabatch.pipeline.stages import Pipeline, PipelineWrapper
from megabatch.wrappers import fsdp1, fsdp2
from megabatch.wrappers.base import Choice, Wrapper, trainable
from megabatch.wrappers.checks import check_dtensors, check_tied, refuse_foreign, refuse_torchscript, refuse_unknown
from megabatch.wrappers.ddp import DDPWrapper
from megabatch.wrappers.fsdp1 import FSDP1Wrapper
from megabatch.wrappers.fsdp2 import FSDP2Wrapper
from megabatch.wrappers.mesh import AXES, CONTEXT_AXES, DATA_AXES, DataRanks, check_axes
from megabatch.wrappers.multi_model import MultiModelWrapper

POLICIES = ("auto", "last", "every", "replica_last")
Models = nn.Module | Sequence[nn.Module]


def choose_policy(wrapper: Wrapper, policy: str) -> Choice:
    """The policy that ``policy`` means for this wrapper, and why."""
    if policy not in POLICIES:
        raise PlanError(f"sync is {policy!r}; expected one of {', '.join(POLICIES)}")
    return wrapper.choose(policy)


def detect_wrapper(model: Models, mesh: DeviceMesh | None) -> Wrapper:
    """The reducer of the model's wrapper. Raises `PlanError` for a wrapper or mesh that it cannot be exact with."""
    if isinstance(model, Pipeline):
        return _pipeline_wrapper(model, mesh)
    models = [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, list | tuple) else []
    if not models or not all(isinstance(cast(object, each), nn.Module) for each in models):
        raise PlanError(f"model is a {type(model).__name__}; expected a torch.nn.Module, or a list of them")
    for each in models:
        refuse_torchscript(each)
    trained = [each for each in models if trainable(each)]
    if not trained:
        raise PlanError("no parameter of the model requires a gradient; unfreeze what is to be trained")
    if mesh is not None:
        check_axes(mesh)
    reducers = [_wrapper_of_one(each, mesh) for each in trained]
    frozen = [each for each in models if not trainable(each)]
    return MultiModelWrapper(reducers, frozen) if len(models) > 1 else reducers[0]


def _wrapper_of_one(model: nn.Module, mesh: DeviceMesh | None) -> Wrapper:
    refuse_foreign(model)
    check_tied(model)
    wrapper = getattr(model, "_orig_mod", model)  # torch.compile keeps what it compiled here
    modules = [module for module in wrapper.modules() if isinstance(module, FSDPModule)]
    if isinstance(wrapper, DistributedDataParallel):
        group = wrapper.process_group
        assert isinstance(group, dist.ProcessGroup)
        return DDPWrapper(model, wrapper, _ranks([group], mesh, None))
    if isinstance(wrapper, FullyShardedDataParallel):
        return FSDP1Wrapper(model, wrapper, _ranks(fsdp1.reducing_groups(model, wrapper), mesh, None))
    if modules:
        groups = fsdp2.reducing_groups(model, modules)
        own = fsdp2.param_groups(modules)[0].mesh_info.mesh
        return FSDP2Wrapper(model, modules, _ranks(groups, mesh, _root(own)))
    refuse_unknown(wrapper)
    check_dtensors(wrapper)
    return Wrapper(model, _plain_ranks(wrapper, mesh))


def _pipeline_wrapper(model: Pipeline, mesh: DeviceMesh | None) -> PipelineWrapper:
    """Reduces each stage by its own reducer, over the mesh without its axis "pp"."""
    if mesh is not None and mesh != model.mesh:
        raise PlanError("mesh= is another mesh than that of the Pipeline; leave mesh= out")
    rest = tuple(axis for axis in model.mesh.mesh_dim_names or () if axis != "pp")
    if rest:
        return PipelineWrapper(model, [_wrapper_of_one(stage, model.mesh[rest]) for stage in model.stages])
    for stage in model.stages:
        refuse_foreign(stage)
        refuse_unknown(stage)
        check_dtensors(stage)
    return PipelineWrapper(model, [Wrapper(stage, DataRanks()) for stage in model.stages])


def _plain_ranks(model: nn.Module, mesh: DeviceMesh | None) -> DataRanks:
    sharded = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if mesh is None and sharded:
        mesh = _root(sharded[0])
        if mesh is None or mesh.size() < dist.get_world_size():
            raise PlanError(
                f"the model is tensor parallel over {sharded[0].size()} of {dist.get_world_size()} processes, and what "
                f"the others do is not known; give mesh= with the axes of all, from {', '.join(AXES)}"
            )
    if mesh is not None:
        return DataRanks.of_mesh(mesh)
    if not (dist.is_available() and dist.is_initialized()):
        return DataRanks()
    world = dist.group.WORLD
    assert world is not None
    return DataRanks([world])


def _root(mesh: DeviceMesh) -> DeviceMesh | None:
    """The mesh that this one was taken from, where its axes say what they are."""
    root = mesh._get_root_mesh()  # pyright: ignore[reportPrivateUsage]
    return root if set(root.mesh_dim_names or (None,)) <= set(AXES) else None


def _ranks(groups: Sequence[dist.ProcessGroup], mesh: DeviceMesh | None, own: DeviceMesh | None) -> DataRanks:
    """The ranks of a wrapper that reduces over ``groups``: along the axes of a mesh, which must say the same."""
    if mesh is None and (own is None or not _agrees(groups, own)):
        return DataRanks(groups)
    mesh = mesh or own
    assert mesh is not None  # one of the two is there
    ranks = DataRanks.of_mesh(mesh)
    if not _agrees(groups, mesh):
        raise PlanError(
            f"the mesh has {ranks.num_weighing} data and context ranks but the wrapper reduces over "
            f"{prod(group.size() for group in groups)}, or over others; give both the same mesh"
        )
    return ranks


def _agrees(groups: Sequence[dist.ProcessGroup], mesh: DeviceMesh) -> bool:
    """Whether the groups are of the ranks along the mesh's data and context axes."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # only its ranks come here
    names = mesh.mesh_dim_names or ()
    summed = [name in DATA_AXES + CONTEXT_AXES for name in names]
    along = mesh.mesh[tuple(slice(None) if each else at for each, at in zip(summed, coordinate, strict=True))]
    there = {rank for group in groups for rank in dist.get_process_group_ranks(group)}
    return prod(group.size() for group in groups) == along.numel() and there <= set(along.flatten().tolist())

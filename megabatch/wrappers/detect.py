"""Choice of a model's wrapper and its sync policy.

"last"          reduce once per call, with the last microbatch
"every"         reduce with each microbatch
"every:K"       reduce with each K-th microbatch of a call, and with its last
"replica_last"  HSDP: reduce-scatter with each microbatch, all-reduce once per call
"gather_once"   FSDP2: gather parameters once per call, reduce-scatter with each microbatch; HSDP: all-reduce once
"auto"          the policy that suits the wrapper
"""

import re
from collections.abc import Sequence
from itertools import chain, filterfalse
from math import prod
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from megabatch.core.mesh import DataRanks
from megabatch.core.wrapper import Choice, SelfWrapped, Wrapper, trainable
from megabatch.errors import PlanError
from megabatch.inspection.mesh_axes import AXES, CONTEXT_AXES, DATA_AXES, is_expert
from megabatch.torch_private.classes import is_dtensor, is_fsdp1, is_fsdp2
from megabatch.torch_private.module_members import original_of
from megabatch.torch_private.process_groups import root_mesh
from megabatch.wrappers.checks import check_dtensors, check_tied, refuse_foreign, refuse_torchscript, refuse_unknown

POLICIES = ("auto", "last", "every", "gather_once", "replica_last")
Models = nn.Module | Sequence[nn.Module]


def choose_policy(wrapper: Wrapper, policy: str) -> Choice:
    """Return the policy that ``policy`` means for this wrapper, and the reason."""
    if str(policy).startswith("gather_once:"):
        raise PlanError(f"sync is {policy!r}, and parts of the parameters stay gathered no longer; give 'gather_once'")
    if policy in POLICIES:
        return wrapper.choose(policy)
    periodic = re.fullmatch("every:(0*[1-9][0-9]*)", str(policy))
    if periodic is None:
        raise PlanError(f"sync is {policy!r}; expected one of {', '.join(POLICIES)}, or 'every:4'")
    if wrapper.is_pipeline:
        return wrapper.choose(policy)
    choice, period = wrapper.choose("every"), periodic[1]
    if int(period) == 1 or choice[0] != "every":
        return choice
    return policy, f"as asked: {wrapper.kind_name} keeps the whole gradient, and reduces {period} microbatches at once"


def detect_wrapper(model: Models, mesh: DeviceMesh | None) -> Wrapper:
    """Return the model's wrapper. Raises `PlanError` for a wrapper or mesh that cannot be exact."""
    if not isinstance(cast(object, mesh), DeviceMesh | None):
        raise PlanError(
            f"mesh is a {type(mesh).__name__}; expected a DeviceMesh of torch, with axes from {', '.join(AXES)}, or "
            "None for a model that transformers has distributed"
        )
    if isinstance(model, SelfWrapped):
        return model.make_wrapper(mesh, wrap_stages)
    models = cast(list[nn.Module], list(model) if isinstance(model, list | tuple) else [model])
    if not models or not all(isinstance(cast(object, item), nn.Module) for item in models):
        raise PlanError(f"model is a {type(model).__name__}; expected a torch.nn.Module, or a list of them")
    for module in models:
        refuse_torchscript(module)
    wrappers = [wrapper_of_one(module, mesh) for module in filter(trainable, models)]
    if not wrappers:
        raise PlanError("no parameter of the model requires a gradient; unfreeze what is to be trained")
    if len(models) == 1:
        return wrappers[0]
    from megabatch.wrappers.multi_model import MultiModelWrapper

    # A frozen reward or reference model needs no wrapper.
    return MultiModelWrapper(wrappers, list(filterfalse(trainable, models)))


def wrapper_of_one(model: nn.Module, mesh: DeviceMesh | None) -> Wrapper:
    """Return the wrapper of one model with trainable parameters."""
    refuse_foreign(model)
    check_tied(model)
    # torch.compile hides the wrapper. The imports below are made late, since those of torch's FSDP are slow.
    wrapper = original_of(model)
    if any(map(is_expert, wrapper.parameters())):
        from megabatch.wrappers import expert_parallel

        return expert_parallel.wrapper_of_experts(model, wrapper, mesh)
    if isinstance(wrapper, DistributedDataParallel):
        from megabatch.wrappers.ddp import DDPWrapper

        group = wrapper.process_group
        assert isinstance(group, dist.ProcessGroup)
        return DDPWrapper(model, wrapper, _ranks([group], mesh, None))
    if is_fsdp1(wrapper):
        from megabatch.wrappers import fsdp1

        return fsdp1.FSDP1Wrapper(model, wrapper, _ranks(fsdp1.reducing_groups(model, wrapper), mesh, None))
    if modules := list(filter(is_fsdp2, wrapper.modules())):
        from megabatch.wrappers import fsdp2

        groups = fsdp2.reducing_groups(model, modules)
        wrapper_mesh = fsdp2.param_groups(modules)[0].mesh_info.mesh
        return fsdp2.FSDP2Wrapper(model, modules, _ranks(groups, mesh, _root(wrapper_mesh)))
    refuse_unknown(wrapper)
    check_dtensors(wrapper)
    ranks = _plain_ranks(wrapper, mesh)
    # Tensor parallelism leaves parts of sums in DTensors, on one data rank too.
    if ranks.is_alone and not any(map(is_dtensor, model.parameters())):
        return Wrapper(model, ranks)
    from megabatch.wrappers.rank_sums import SummedWrapper

    return SummedWrapper(model, ranks)


def wrap_stages(model: Any, mesh: DeviceMesh | None) -> Wrapper:
    """Return the wrapper of a `StagedModel`, whose stages are reduced over the mesh of the ranks that hold the same."""
    from megabatch.wrappers.pipeline_wrapper import PipelineWrapper
    from megabatch.wrappers.rank_sums import SummedWrapper

    if mesh is not None:
        return PipelineWrapper(model, [wrapper_of_one(stage, mesh) for stage in model.stages])
    for stage in model.stages:
        refuse_foreign(stage)
        refuse_unknown(stage)
        check_dtensors(stage)
    return PipelineWrapper(model, [SummedWrapper(stage, DataRanks()) for stage in model.stages])


def _plain_ranks(model: nn.Module, mesh: DeviceMesh | None) -> DataRanks:
    sharded = next(filter(is_dtensor, model.parameters()), None)
    if mesh is None and sharded is not None:
        mesh = _root(sharded.device_mesh)
        if mesh is None or mesh.size() < dist.get_world_size():
            raise PlanError(
                f"the model is tensor parallel over {sharded.device_mesh.size()} of {dist.get_world_size()} processes, "
                f"and what the others do is not known; give mesh= with the axes of all, from {', '.join(AXES)}"
            )
    if mesh is not None:
        return DataRanks.of_mesh(mesh)
    if not (dist.is_available() and dist.is_initialized()):
        return DataRanks()
    return DataRanks([cast(dist.ProcessGroup, dist.group.WORLD)])


def _root(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the mesh from which this one was sliced. None if it has axes without a known name."""
    root = root_mesh(mesh)
    return root if set(root.mesh_dim_names or (None,)) <= set(AXES) else None


def _ranks(groups: Sequence[dist.ProcessGroup], mesh: DeviceMesh | None, wrapper_mesh: DeviceMesh | None) -> DataRanks:
    """Return the ranks of a wrapper that reduces over ``groups``, which must match the axes of the mesh."""
    reduced_ranks = set(chain.from_iterable(map(dist.get_process_group_ranks, groups)))
    # Without known axis names, the ranks that the wrapper reduces over are all data ranks.
    if mesh is None:
        if wrapper_mesh is None or not reduced_ranks <= _summing_ranks(wrapper_mesh):
            return DataRanks(groups)
        mesh = wrapper_mesh
    ranks = DataRanks.of_mesh(mesh)
    summing_ranks, num_reduced = _summing_ranks(mesh), prod(group.size() for group in groups)
    if num_reduced != len(summing_ranks) or not reduced_ranks <= summing_ranks:
        raise PlanError(
            f"the mesh has {ranks.num_weighing} data and context ranks but the wrapper reduces over "
            f"{num_reduced}, or over others; give both the same mesh"
        )
    return ranks


def _summing_ranks(mesh: DeviceMesh) -> set[int]:
    """Return the ranks along the mesh's data and context axes: weights are summed over them, and so are gradients."""
    # Only ranks of the mesh come here, so that each has a coordinate in it.
    place: list[Any] = list(cast(Any, mesh.get_coordinate()))
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name in DATA_AXES + CONTEXT_AXES:
            place[axis] = slice(None)
    return set(mesh.mesh[tuple(place)].flatten().tolist())

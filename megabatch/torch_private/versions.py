"""Checks of the version of torch: `check_torch` at import, `check_feature` where a feature is used."""

import importlib
from functools import cache
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules import module as of_every_module
from torch.nn.parallel import DistributedDataParallel

from megabatch.errors import MegabatchError

NEEDED: tuple[tuple[object, str, str], ...] = (  # what has it, its name, and what is read there
    (Tensor, "_version", "writes to a gradient"),
    (Tensor, "_backward_hooks", "hooks on parameters"),
    (Tensor, "_post_accumulate_grad_hooks", "hooks on parameters"),
    (torch, "_foreach_mul_", "clipping"),
    (of_every_module, "_global_forward_hooks", "hooks on modules"),
    (nn.Module(), "_forward_hooks", "hooks on modules"),
    (nn.Module(), "_forward_pre_hooks", "hooks on modules"),
    (nn.Module(), "_compiled_call_impl", "compiled modules"),
    (nn.Module(), "_parameters", "the members of a module"),
    (nn.Module(), "_modules", "the members of a module"),
    (nn.Module(), "_non_persistent_buffers_set", "buffers"),
    (DistributedDataParallel, "_get_ddp_logging_data", "DDP"),
    (DistributedDataParallel, "_check_reducer_finalized", "DDP"),
    (DistributedDataParallel, "_sync_buffers", "DDP"),
    (cast(Any, dist).Reducer, "_set_forward_pass_work_handle", "DDP"),
    (DeviceMesh, "_get_root_mesh", "device meshes"),
    (dist.distributed_c10d, "_world", "process groups"),
    (dist.ProcessGroup, "_get_backend", "process groups"),
)
TESTED = "2.11 to 2.15"  # versions of torch, in docs/versions.md
NEEDED_BY: dict[str, dict[str, str]] = {  # of a feature: "module:class" → names, of which | divides alternatives
    "FSDP2": {
        "torch.distributed.fsdp:FSDPModule": "_get_fsdp_state set_gradient_divide_factor set_is_last_backward "
        "set_force_sum_reduction_for_comms set_requires_all_reduce set_requires_gradient_sync",
        "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": "_auto_reshard_after_forward _comm_ctx _is_root "
        "_fsdp_param_groups|_fsdp_param_group _lazy_init _modules _mp_policy _root_post_backward_final_callback "
        "_state_ctx _training_state",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup": "_all_gather_result _module_fqn "
        "_partial_reduce_output _reset_sharded_params _to_sharded _training_state _wait_for_post_backward fsdp_params "
        "is_sharded is_sharded_post_forward is_unsharded mesh_info post_backward post_forward_mesh_info reduce_grads "
        "reshard_after_backward unshard_in_backward",
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam": "_module_info _sharded_param_data "
        "_unsharded_param reduce_dtype reset_sharded_param sharded_param",
    },
    "pipelines": {
        "torch.distributed.pipelining.schedules:_PipelineSchedule": "_has_backward _step_microbatches",
    },
    "plan": {
        "torch.utils.flop_counter": "flop_registry sdpa_backward_flop_count sdpa_flop_count",
        "torch.distributed.tensor._sharding_prop:ShardingPropagator": "_propagate_tensor_meta_non_cached",
        "torch.distributed.tensor._redistribute": "_gen_transform_infos clear_redistribute_planner_cache",
        "torch.distributed.tensor.debug": "_clear_sharding_prop_cache",
        "torch.testing._internal.distributed.fake_pg": "FakeStore",
        "torch.distributed.pipelining.schedules": "_batch_p2p",
    },
}


def check_torch() -> None:
    """Raise `ImportError` where this version of torch lacks something that the library reads."""
    for owner, name, subject in NEEDED:
        if not hasattr(owner, name):
            raise ImportError(
                f"torch {torch.__version__} has no {name}, by which megabatch reads {subject}; install torch {TESTED}"
            )


@cache
def check_feature(feature: str) -> None:
    """Raise `MegabatchError` where this version of torch lacks something that a feature of `NEEDED_BY` reads."""
    for place, names in NEEDED_BY[feature].items():
        module, _, owner_name = place.partition(":")
        try:
            owner = importlib.import_module(module)
        except ImportError:
            raise lacking(feature, module) from None
        if owner_name:
            owner = getattr(owner, owner_name, None)
        for alternatives in names.split():
            if not any(_has_name(owner, name) for name in alternatives.split("|")):
                raise lacking(feature, f"{place.replace(':', '.')}.{alternatives}")


def _has_name(owner: Any, name: str) -> bool:
    """Return True for a member of a module or class, and for an attribute that a method of the class reads or sets."""
    if hasattr(owner, name) or name in getattr(owner, "__annotations__", ()):
        return True
    methods = [member for member in vars(owner).values() if isinstance(member, FunctionType)] if owner else []
    return any(name in method.__code__.co_names for method in methods)


def lacking(feature: str, name: str) -> MegabatchError:
    """Return the error of a feature that needs another version of torch."""
    return MegabatchError(
        f"{feature} does not work under torch {torch.__version__}, which has no {name}; install torch {TESTED}"
    )

"""A model over the data and context ranks: plain, DDP, FSDP2 or its replicate, and the dtypes that it computes in."""

import contextlib
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import AttentionInterface, PreTrainedModel

from megabatch.batching import context_parallel
from megabatch.errors import PlanError
from megabatch.train.config import ModelConfig, UpdateConfig
from megabatch.train.config.parallel_layout import ALONE, Layout, check_wrapper

if TYPE_CHECKING:
    from megabatch.pipeline import Pipeline

# A rule of thumb; parallel.wrapper overrules it.
SHARD_FROM_PARAMETERS = 1_000_000_000
# Tested against uncut runs.
CONTEXT_FAMILIES = ("gpt2", "gpt_neox", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3")
# Other types look at the longest position, which ranks do not share.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Keys of configs with the number of experts.
NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
# Entry of a plan for a module that sends tokens to its experts.
DISPATCHING = "ep_dispatch_experts"
# Keys that change attention beyond order and documents.
NOT_KNOWN = ("sliding_window", "softcap", "position_bias", "s_aux")


def is_pipeline(model: object) -> "TypeGuard[Pipeline]":
    """Return True for a model in stages, without an import of the pipelines, which take a second."""
    stages = sys.modules.get("megabatch.pipeline.stages")
    return stages is not None and isinstance(model, stages.Pipeline)


@dataclass(frozen=True)
class WrapperChoice:
    """The wrapper over the ranks that see different data, and the reason for it."""

    name: str  # "plain", "ddp", "fsdp2" or "replicate"
    reason: str

    @property
    def is_of_fsdp(self) -> bool:
        return self.name in ("fsdp2", "replicate")

    @property
    def casts_as(self) -> str:
        """The wrapper whose way to compute in another dtype it has."""
        return "fsdp2" if self.is_of_fsdp else self.name


def choose_wrapper(stated: str | None, num_ranks: int, model: nn.Module, layout: Layout = ALONE) -> WrapperChoice:
    """Return the stated wrapper, or the one that suits the degrees, the number of ranks and the parameters."""
    wrapper = WrapperChoice(stated, "asked for") if stated is not None else suited(num_ranks, model, layout)
    if wrapper.name != "plain":
        check_wrapper(wrapper.name, *layout.data_degrees(wrapper.name, num_ranks))
    return wrapper


def suited(num_ranks: int, model: nn.Module, layout: Layout) -> WrapperChoice:
    """Return the wrapper where the recipe names none."""
    if num_ranks == 1:
        return WrapperChoice("plain", "one process")
    if num_ranks == layout.tp * layout.pp:
        return WrapperChoice("plain", "one data rank")
    if layout.ep > 1:
        return WrapperChoice("fsdp2", f"parallel.ep is {layout.ep}")
    copies = "ddp" if layout.tp == layout.cp == layout.pp == 1 else "replicate"
    if layout.dp_shard is not None or layout.dp_replicate is not None:
        dp_replicate, dp_shard = layout.data_degrees(None, num_ranks)
        name = "fsdp2" if dp_shard > 1 else copies
        return WrapperChoice(name, f"parallel.dp_replicate is {dp_replicate} and parallel.dp_shard {dp_shard}")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    size = f"{num_parameters:,} parameters are"
    if num_parameters < SHARD_FROM_PARAMETERS:
        return WrapperChoice(copies, f"{size} below {SHARD_FROM_PARAMETERS:,}: replicas send least")
    return WrapperChoice("fsdp2", f"{size} {SHARD_FROM_PARAMETERS:,} or more: sharded they fit")


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that stay in one piece, by name, from the model's ``_no_split_modules``.

    Call it before FSDP2 gives them another class.
    """
    kinds: set[str] = set(getattr(model, "_no_split_modules", None) or ())
    return {name: module for name, module in model.named_modules() if name and type(module).__name__ in kinds}


def untested_kind(model: nn.Module, families: Collection[str]) -> str | None:
    """Return the kind of a model that is of none of these families of transformers, in words; None for one of them."""
    family = getattr(getattr(model, "config", None), "model_type", None)
    if isinstance(model, PreTrainedModel) and family in families:
        return None
    return type(model).__name__ if family is None else f"model of type {family}"


def plan_of_experts(model: nn.Module) -> dict[str, str]:
    """Return transformers' plan for the experts of a model, by names of modules; {} without one."""
    named: Any = model
    return named._expand_parallel_plan(named.ep_plan) if getattr(model, "ep_plan", None) else {}


def layers_of_experts(model: nn.Module, plan: Mapping[str, str]) -> list[nn.Module]:
    return [model.get_submodule(name) for name, entry in plan.items() if entry == DISPATCHING]


def distribute(
    model: nn.Module, blocks: Sequence[nn.Module], wrapper: WrapperChoice, policy: MixedPrecisionPolicy,
    mesh: DeviceMesh, *, reshards: bool, offloads: bool = False,
) -> None:  # fmt: skip
    """Give each block to FSDP2 or its replicate, then the rest of the model. Collective.

    A block of experts is sharded over the ranks that hold the same ones. With ``reshards``, FSDP2 drops the gathered
    weights of a block after its forward. With ``offloads``, its shards and their gradients are in host memory, pinned
    where a GPU copies them.
    """
    dense = reduced_mesh(mesh)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offloads else OffloadPolicy()
    for module in (*blocks, model):
        local_parameters = [part for part in module.parameters(recurse=False) if isinstance(part, DTensor)]
        has_experts = any("ep" in (part.device_mesh.mesh_dim_names or ()) for part in local_parameters)
        over = data_mesh(mesh) if has_experts else dense
        if wrapper.name == "fsdp2":
            # None: as torch does it, the root stays for its backward.
            after = None if reshards else False
            place = partial(place_experts, num_shards=over.shape[-1]) if has_experts else None
            fully_shard(
                module, mesh=over, mp_policy=policy, reshard_after_forward=after, offload_policy=offload,
                shard_placement_fn=place,
            )  # fmt: skip
        else:
            replicate_with_fsdp.replicate(module, mesh=over, mp_policy=policy)


def reduced_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of the mesh over which gradients are summed: the data axes, the last of them with cp or ep."""
    data = data_mesh(mesh)
    inner = next((axis for axis in ("cp", "ep") if axis in (mesh.mesh_dim_names or ())), None)
    if inner is None:
        return data
    *outer, last = cast(tuple[str, ...], data.mesh_dim_names)
    name = f"{last}_{inner}"
    joined = mesh[last, inner]._flatten(name)  # pyright: ignore[reportPrivateUsage]
    return mesh[outer[0], name] if outer else joined


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the data axes of the mesh, along which ranks hold the same experts."""
    axes = [axis for axis in ("dp_replicate", "dp_shard") if axis in (mesh.mesh_dim_names or ())]
    return mesh[tuple(axes)]


def place_experts(parameter: nn.Parameter, num_shards: int) -> Shard | None:
    """Return the dim in which a rank's experts are sharded: within each, where ranks cannot get as many of them."""
    num_experts = len(cast(DTensor, parameter).to_local())
    cuts_each = num_experts % num_shards > 0 and parameter.shape[1] % num_shards == 0
    return Shard(1) if cuts_each else None


def reshard(model: nn.Module) -> None:
    """Drop FSDP2's unsharded weights after forwards without a backward: the next update would not be seen in them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def dtype_of(config: ModelConfig) -> torch.dtype:
    return getattr(torch, config.dtype)


def computing_dtype(config: ModelConfig) -> torch.dtype:
    return getattr(torch, config.compute_dtype or config.dtype)


def is_mixed(config: ModelConfig) -> bool:
    """Return True if the model computes in another dtype than that of its parameters."""
    return config.compute_dtype is not None and config.compute_dtype != config.dtype


def accumulation_of(config: UpdateConfig) -> torch.dtype | None:
    """Return the dtype in which gradients are added, or None for the parameters' own."""
    if config.same_bits:
        return torch.float64
    return None if config.accumulate_dtype is None else getattr(torch, config.accumulate_dtype)


def policy_of(config: ModelConfig, accumulated: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return FSDP2's casts: weights to the dtype of computing, and gradients back before they are added.

    Without an output_dtype, since a layer's output of another dtype would not go into the next layer's norm.
    """
    if not is_mixed(config):
        return MixedPrecisionPolicy(reduce_dtype=accumulated)
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=accumulated or dtype_of(config))


def computing(config: ModelConfig, wrapper_name: str, device: torch.device) -> AbstractContextManager[object]:
    """Surround a forward by autocast, if the precision needs it. FSDP2 casts by its own policy."""
    if not is_mixed(config) or wrapper_name == "fsdp2":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def precision_text(config: ModelConfig, wrapper_name: str, accumulated: torch.dtype | None) -> str:
    is_wider = accumulated is not None and accumulated != dtype_of(config)
    added = f", gradients added in {accumulated}".replace("torch.", "") if is_wider else ""
    if not is_mixed(config):
        return f"precision: {config.dtype} throughout{added}"
    how = "FSDP2's policy" if wrapper_name == "fsdp2" else "autocast"
    return f"precision: parameters and gradients in {config.dtype}, computed in {config.compute_dtype} ({how}){added}"


def attend_over(model: PreTrainedModel, attention: context_parallel.GatheredAttention) -> None:
    """Make the layers of ``model`` attend over the ranks of ``attention``, so that it runs stretches of microbatches.

    Raises `PlanError` for a model in which positions see each other in another way than by full causal attention.
    """
    check_attention_is_causal(model)
    # A group has a name of its own, since models may have different groups.
    name = f"megabatch_context_{attention.group.group_name}"
    AttentionInterface.register(name, _implementation(attention))
    model.set_attn_implementation(name)


def check_attention_is_causal(model: PreTrainedModel) -> None:
    """Raise `PlanError` where gathered attention would not be what the model computes in one piece."""
    config = cast(Any, model.config)
    if config.model_type not in CONTEXT_FAMILIES:
        raise PlanError(
            f"context parallelism was asked for a model of type {config.model_type!r}, where it is not tested; "
            f"use one of {', '.join(CONTEXT_FAMILIES)}, or a mesh without cp"
        )
    kinds = sorted({*(getattr(config, "layer_types", None) or ())} - {"full_attention"})
    if window := getattr(config, "sliding_window", None):
        kinds = kinds or [f"a sliding window of {window} tokens"]
    if not getattr(config, "is_causal", True):
        kinds = kinds or ["attention that is not causal"]
    if kinds:
        raise PlanError(
            f"the model has {', '.join(kinds)}; context parallelism needs full causal attention in every layer"
        )
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type not in ROPE_TYPES:
            raise PlanError(
                f"the model's rotary positions are of type {rope_type!r}, which looks at the longest position that a "
                f"rank has; context parallelism needs one of {', '.join(ROPE_TYPES)}"
            )


def _rope_types(parameters: Any) -> list[str]:
    """Return the type of rotary positions, or one per kind of layer."""
    if not isinstance(parameters, dict):
        return []
    options = cast(dict[str, Any], parameters)
    nested = [rope_type for value in options.values() for rope_type in _rope_types(value)]
    return [str(options["rope_type"]), *nested] if "rope_type" in options else nested


def _implementation(attention: context_parallel.GatheredAttention) -> Any:
    def forward(
        module: nn.Module,
        query: Tensor,  # [B, H, L, D]
        key: Tensor,  # [B, K, L, D]
        value: Tensor,  # [B, K, L, D]
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        set_options = [name for name in NOT_KNOWN if options.get(name) is not None]
        if set_options or not causal:
            unsupported = ", ".join(set_options) or "attention that is not causal"
            raise PlanError(
                f"{type(module).__name__} asks for {unsupported}; context parallelism has full causal attention only"
            )
        output = attention(query, key, value, attention_mask, scale=scaling, dropout=dropout)
        return output.transpose(1, 2).contiguous(), None  # [B, L, H, D]

    return forward

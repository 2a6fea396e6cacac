"""Tensor: one model over several ranks, which cut its matrices among them (tensor parallelism, mesh axis "tp").

A matrix that widens is cut by its outputs and the one after it by its inputs, so that the two need one sum. What
transformers' plan of the model says becomes torch's DTensors, and so do norms and embeddings: every parameter is one,
so that gradients, FSDP2 and checkpoints need to know nothing else. Between the matrices goes the stream [B, T, E]:
whole on every rank, or with ``sequence_parallel`` a stretch of the sequence on each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from megabatch.errors import MegabatchError
from megabatch.losses import LossFunction
from megabatch.train.parallel.wrap import blocks_of, untested_kind
from megabatch.train.runtime.plugins import in_place_of

# Their gradients are compared with the plain model's.
FAMILIES = (
    *("arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4"),
    *("gpt2", "gpt_neox", "granite", "hyperclovax", "internlm3", "iquestcoder", "jais2", "llama", "ministral"),
    *("ministral3", "mistral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3"),
    *("seed_oss", "smollm3", "starcoder2"),
)
# transformers has no plan for GPT-2.
GPT2_PLAN = {
    "transformer.h.*.attn.c_attn": "fused_heads",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
# Entries of matrices that are cut by their outputs.
WIDENING = ("colwise", "colwise_gather_output", "fused_heads")
# Modules of the base model where the stream begins. A dropout after them is of the stream.
STARTS = ("drop", "layers.0")
WHOLE, ALONG_SEQUENCE, BY_HEAD, BY_FEATURE = Replicate(), Shard(1), Shard(2), Shard(-1)


@dataclass(frozen=True)
class Borders:
    """The layers at which stages of a pipeline begin and end, where the stream is a whole plain tensor."""

    starts: Sequence[str] = ()
    ends: Sequence[str] = ()


NO_BORDERS = Borders()


@dataclass
class Style(ParallelStyle):
    """Placement of a module: its parameters, its input and its output."""

    parameters: Mapping[str, Placement] = field(default_factory=dict[str, Placement])  # any other is whole on each rank
    entry: Placement = WHOLE  # what an input is that comes as a plain tensor
    taken: Placement = WHOLE  # what the module is to see of it
    handed: Placement | None = None  # what the next module gets; None: the output as it comes
    is_plain: bool = False  # whether it gets this rank's part as a plain tensor

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements = [self.parameters.get(name, WHOLE)]
            placed = distribute_tensor(parameter.data, device_mesh, placements, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
        self.surround(module, device_mesh)
        return module

    def surround(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Lay the first input and the output of every forward."""

        def before(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
            if inputs:
                return (self.take(inputs[0], mesh), *inputs[1:]), named
            first = next(iter(named))
            return inputs, {**named, first: self.take(named[first], mesh)}

        def after(_: nn.Module, inputs: object, output: Any) -> Any:
            return output if self.handed is None else self.hand(output, mesh)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    def take(self, value: Tensor, mesh: DeviceMesh) -> DTensor:
        """Return the input as the module is to see it."""
        placed = value if isinstance(value, DTensor) else DTensor.from_local(value, mesh, [self.entry], run_check=False)
        return placed.redistribute(placements=[self.taken])

    def hand(self, output: DTensor, mesh: DeviceMesh) -> Tensor:
        """Return the output as the next module is to get it."""
        placed = output.redistribute(placements=[cast(Placement, self.handed)])
        return placed.to_local() if self.is_plain else placed


class FusedHeads(Style):
    """GPT-2's one matrix for queries, keys and values, cut by its columns; a rank takes its heads of the output.

    A rank's columns are then not those of its heads, which costs an exchange of the output; but they are contiguous,
    which is all that FSDP2 and checkpoints can describe.
    """

    def hand(self, output: DTensor, mesh: DeviceMesh) -> Tensor:
        # Each rank has the gradient of its own heads and zeros elsewhere: parts of a sum.
        gathered = output.redistribute(placements=[WHOLE]).to_local(grad_placements=[Partial()])
        heads = gathered.unflatten(-1, (3, mesh.size(), -1))  # [B, T, 3, ranks, E / ranks]
        return heads[..., mesh.get_local_rank(), :].flatten(-2)  # [B, T, 3 E / ranks]


class Vocabulary(Style):
    """An embedding cut by its tokens: a rank looks up those that it has, and the sum over ranks has them all."""

    def surround(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Replace the lookup: torch's keeps the gradient of the whole vocabulary on each rank."""
        embedding = cast(nn.Embedding, module)
        padding_idx = embedding.padding_idx
        scale = cast(Tensor | None, getattr(embedding, "embed_scale", None))
        first = mesh.get_local_rank() * -(-embedding.num_embeddings // mesh.size())

        def look_up(tokens: Tensor) -> Tensor:  # [B, T] -> [B, T, E]
            weight = cast(DTensor, embedding.weight).to_local()  # [V / ranks, E]
            is_here = ((tokens >= first) & (tokens < first + len(weight)))[..., None]  # [B, T, 1]
            rows = F.embedding((tokens - first).where(is_here[..., 0], 0), weight)
            if padding_idx is not None:
                rows = rows.where((tokens != padding_idx)[..., None], rows.detach())
            part = DTensor.from_local(rows.where(is_here, 0.0), mesh, [Partial()], run_check=False)
            embeddings = part.redistribute(placements=[WHOLE]).to_local()
            return embeddings if scale is None else embeddings * scale.to(embeddings.dtype)

        cast(Any, embedding).forward = look_up


class Head(Style):
    """The matrix that makes logits, cut by its outputs: those stay cut for a loss over them, unless none is wanted."""

    def hand(self, output: DTensor, mesh: DeviceMesh) -> Tensor:
        # Where no gradient is wanted, in an evaluation say, any function may look at the logits.
        return output if torch.is_grad_enabled() else output.full_tensor()


def spread(
    model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool, loss_parallel: bool, borders: Borders = NO_BORDERS
) -> str:
    """Cut a model of transformers over the ranks of a mesh of one axis; what was done, in words.

    Its parameters may be on the meta device; they are the same on every rank. Raises `MegabatchError` for a model that
    cannot be cut, before anything is.
    """
    plan = plan_of(model)
    check_divisible(cast(PreTrainedModel, model), mesh.size())
    styles = styles_of(cast(PreTrainedModel, model), plan, sequence_parallel, loss_parallel, borders)
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    for name, style in styles.items():
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
        if isinstance(style, FusedHeads):
            cast(Any, model.get_submodule(parent_of(name))).split_size //= mesh.size()
    for first, *copies in places.values():
        for module, name in copies:
            setattr(module, name, getattr(*first))
    stream = "a stretch of the sequence on each" if sequence_parallel else "whole on each"
    logits = "cut by the vocabulary" if loss_parallel else "whole"
    return f"tensor parallel over {mesh.size()} ranks: matrices cut, activations between them {stream}, logits {logits}"


def plan_of(model: nn.Module) -> dict[str, str]:
    """Return the plan by patterns of module names. Raises `MegabatchError` for a model without one."""
    if kind := untested_kind(model, FAMILIES):
        raise MegabatchError(
            f"parallel.tp is above 1 and no plan for a {kind} is known to be exact; "
            f"leave parallel.tp out, or take one of {', '.join(FAMILIES)}"
        )
    config = cast(Any, model.config)
    if config.model_type == "gpt2":
        return GPT2_PLAN
    base: dict[str, str] = config.base_model_tp_plan
    head: dict[str, str] = cast(Any, type(model))._tp_plan
    return {f"{model.base_model_prefix}.{name}": entry for name, entry in base.items()} | head


def check_divisible(model: PreTrainedModel, num_ranks: int) -> None:
    """Raise where the ranks cannot get the same number of heads and hidden features."""
    config = model.config
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "n_inner"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value % num_ranks:
            name = config.attribute_map.get(key, key)
            raise MegabatchError(
                f"parallel.tp is {num_ranks}, which does not divide model.config.{name} = {value}; "
                "set parallel.tp to a number that does"
            )


def styles_of(
    model: PreTrainedModel, plan: Mapping[str, str], sequence_parallel: bool, loss_parallel: bool, borders: Borders
) -> dict[str, Style]:
    stream = ALONG_SEQUENCE if sequence_parallel else WHOLE
    styles: dict[str, Style] = {}
    for name, module in model.named_modules():
        entry = next((plan[pattern] for pattern in plan if fnmatchcase(name, pattern)), None)
        if entry == "embedding_rowwise" and module is model.get_input_embeddings():
            entry = None
        if entry is not None and not isinstance(module, nn.Identity):
            is_head = module is model.get_output_embeddings()
            styles[name] = style_of(entry, module, stream, loss_parallel and is_head)
            # The module around them calls several with the same input.
            if entry in WIDENING and not is_head:
                styles.setdefault(parent_of(name), Style(entry=stream, taken=WHOLE))
        elif list(module.named_parameters(recurse=False)):
            styles[name] = unplanned_style(name, module, model, plan, stream)
    here = {name for name, module in model.named_modules() if not isinstance(module, nn.Identity)}
    starts = [name for start in STARTS if (name := f"{model.base_model_prefix}.{start}") in here]
    for name in [*starts[:1], *borders.starts]:
        styles[name] = Style(entry=WHOLE, taken=stream)
    for name in borders.ends:
        styles[name] = replace(styles.get(name, Style(entry=stream, taken=stream)), handed=WHOLE, is_plain=True)
    return styles


def style_of(entry: str, module: nn.Module, stream: Placement, loss_parallel: bool) -> Style:
    """Return a plan's entry. Raises `MegabatchError` for one that is not known."""
    # Conv1D's weight is [in, out].
    outputs, inputs = (0, 1) if isinstance(module, nn.Linear) else (1, 0)
    by_outputs: dict[str, Placement] = {"weight": Shard(outputs), "bias": Shard(0)}
    match entry:
        case "colwise":
            return Style(by_outputs, handed=BY_FEATURE, is_plain=True)
        case "fused_heads":
            return FusedHeads(by_outputs, handed=BY_FEATURE)
        case "rowwise":
            return Style({"weight": Shard(inputs)}, entry=BY_FEATURE, taken=BY_FEATURE, handed=stream)
        case "rowwise_split_input":
            return Style({"weight": Shard(inputs)}, taken=BY_FEATURE, handed=stream)
        case "replicated_with_grad_allreduce":
            return Style(entry=BY_HEAD, taken=BY_HEAD, handed=BY_HEAD, is_plain=True)
        case "colwise_gather_output":
            if loss_parallel:
                return Head(by_outputs, handed=BY_FEATURE)
            return Style(by_outputs, handed=WHOLE, is_plain=True)
        case _:
            raise MegabatchError(
                f"the tensor-parallel plan of this version of transformers has the entry {entry!r}, which is not "
                "known; leave parallel.tp out, or install another version"
            )


def unplanned_style(
    name: str, module: nn.Module, model: PreTrainedModel, plan: Mapping[str, str], stream: Placement
) -> Style:
    """Return the style of a module that the plan does not name: an embedding, or a norm.

    Raises `MegabatchError` for one that sees a part of the features, whose gradient would be a part too.
    """
    if module is model.get_input_embeddings():
        return Vocabulary({"weight": Shard(0)})
    if isinstance(module, nn.Embedding):
        return Style(handed=WHOLE, is_plain=True)
    block = next((block for block in blocks_of(model) if name.startswith(f"{block}.")), None)
    if block is None or parent_of(name) == block:
        return Style(entry=stream, taken=stream, handed=WHOLE if block is None else None)
    siblings = [entry for pattern, entry in plan.items() if fnmatchcase(parent_of(name), parent_of(pattern))]
    if "colwise" in siblings or "fused_heads" in siblings or not siblings:
        raise MegabatchError(
            f"parallel.tp is above 1 and the plan of transformers does not say how {name} ({type(module).__name__}) "
            "is cut; leave parallel.tp out, or set the key of model.config that makes a model without it"
        )
    return Style(handed=WHOLE, is_plain=True)


def parent_of(name: str) -> str:
    return name.rpartition(".")[0]


def plain_terms(loss_fn: LossFunction) -> LossFunction:
    """Return the loss, computed from logits that are cut by the vocabulary; what it returns is plain again.

    Its backward too must be inside torch's ``loss_parallel()``.
    """

    def computed(model: Any, microbatch: Any) -> Any:
        return tree_map_only(DTensor, DTensor.full_tensor, loss_fn(model, microbatch))

    return in_place_of(loss_fn, computed)

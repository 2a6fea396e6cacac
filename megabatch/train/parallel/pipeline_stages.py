"""Stages: a model of transformers dealt out over the ranks of a pipeline, in layers that keep their own names.

A stage is a model of the same class with its own layers only: what it does not hold is an empty module. transformers'
own forward runs it, from tokens on the first stage and from what the stage before has sent on the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from megabatch.errors import MegabatchError
from megabatch.train.config import Config, ParallelConfig
from megabatch.train.parallel.tensor_parallel import Borders
from megabatch.train.parallel.wrap import WrapperChoice, computing_dtype, is_mixed, untested_kind
from megabatch.train.runtime.ranks import Ranks

if TYPE_CHECKING:
    from megabatch.pipeline import Pipeline

# Stages on a rank under schedules that take any number, where the recipe has none.
STAGES_PER_RANK = 2


@dataclass(frozen=True)
class Anatomy:
    """Names of the parts of a family in the base model."""

    layers: str
    first: tuple[str, ...]  # what comes before the layers, the embedding of tokens first
    last: str  # the norm after them


LLAMA = Anatomy("layers", ("embed_tokens",), "norm")
# Their runs are compared with those of the whole model.
ANATOMIES = {"gpt2": Anatomy("h", ("wte", "wpe", "drop"), "ln_f"), "llama": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA}


@dataclass(frozen=True)
class StageLayers:
    """Layers and ends of the model that a stage holds."""

    layers: tuple[int, ...]
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class Stages:
    """Stages of a rank: the model with what they hold under its own names, and each stage as it is called."""

    model: PreTrainedModel
    parts: list[StageLayers]
    modules: list[PreTrainedModel]

    @property
    def borders(self) -> Borders:
        """The layers at which the stages are cut off from others."""
        layers = f"{self.model.base_model_prefix}.{anatomy_of(self.model).layers}"
        starts = [f"{layers}.{part.layers[0]}" for part in self.parts if not part.is_first]
        return Borders(starts, [f"{layers}.{part.layers[-1]}" for part in self.parts if not part.is_last])


class NoPositions(nn.Module):
    """Adds nothing where the first stage has added the embedding of positions."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)


def stages_of(
    model: nn.Module, config: Config, wrapper: WrapperChoice, ranks: Ranks, shell: Callable[[], PreTrainedModel]
) -> Stages | None:
    """Return the stages of this rank, where the recipe has any; the model loses what they do not hold.

    ``shell`` makes another model of the same class, on the meta device.
    """
    if ranks.layout.pp == 1:
        return None
    if is_mixed(config.model) and not wrapper.is_of_fsdp:
        raise MegabatchError(
            f"model.compute_dtype is {config.model.compute_dtype!r} and parallel.pp is {ranks.layout.pp}, whose stages "
            'autocast does not reach; set parallel.wrapper to "fsdp2" or "replicate", or leave compute_dtype out'
        )
    return cut(cast(PreTrainedModel, model), parts_of(model, config), config, ranks.pp_rank, shell)


def deal_layers(num_layers: int, num_stages: int) -> list[StageLayers]:
    """Return the part of each stage. Numbers of layers differ by one at most; the first stages have more."""
    size, more = divmod(num_layers, num_stages)
    ends = [size * stage + min(stage, more) for stage in range(num_stages + 1)]
    return [
        StageLayers(tuple(range(ends[stage], ends[stage + 1])), stage == 0, stage == num_stages - 1)
        for stage in range(num_stages)
    ]


def parts_of(model: nn.Module, config: Config) -> list[StageLayers]:
    """Return the part of each stage. Raises `MegabatchError` for a model that cannot be cut into stages."""
    check_model(model, config.parallel)
    architecture, parallel = cast(PreTrainedModel, model).config, config.parallel
    num_layers, num_stages = architecture.num_hidden_layers, parallel.pp * per_rank(parallel)
    if num_layers < num_stages:
        key = architecture.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        fewer = ", or parallel.schedule to 1F1B" if per_rank(config.parallel) > 1 else ""
        raise MegabatchError(
            f"model.config.{key} is {num_layers} and {parallel.schedule} over {parallel.pp} ranks has {num_stages} "
            f"stages, each of one layer or more; set parallel.pp lower{fewer}"
        )
    parts = deal_layers(num_layers, num_stages)
    for stage, part in enumerate(parts):
        if not any(weight.requires_grad for module in held(model, part).values() for weight in module.parameters()):
            raise MegabatchError(
                f"model.freeze leaves nothing to train in stage {stage} of {num_stages}, which has the layers "
                f"{part.layers[0]} to {part.layers[-1]}; free a parameter there, or set parallel.pp lower"
            )
    return parts


def per_rank(parallel: ParallelConfig) -> int:
    from megabatch.pipeline import SCHEDULES

    return SCHEDULES[parallel.schedule].per_rank or parallel.stages_per_rank or STAGES_PER_RANK


def filled_up(parallel: ParallelConfig, num_microbatches: int) -> int:
    """Return the microbatches of a call that the recipe's schedule runs, dummy ones included."""
    from megabatch.pipeline import SCHEDULES

    return SCHEDULES[parallel.schedule].runnable(num_microbatches, parallel.pp, parallel.pp * per_rank(parallel))


def check_model(model: nn.Module, parallel: ParallelConfig) -> None:
    """Raise for a model whose stages would not compute together what it does."""
    if kind := untested_kind(model, ANATOMIES):
        raise MegabatchError(
            f"parallel.pp is {parallel.pp} and megabatch cannot cut a {kind} into stages; leave parallel.pp out, "
            f"or take one of {', '.join(ANATOMIES)}"
        )
    from megabatch.pipeline import SCHEDULES

    config = cast(Any, model.config)
    if config.tie_word_embeddings and SCHEDULES[parallel.schedule].goes_back:
        raise MegabatchError(
            f"the model's tie_word_embeddings is true and parallel.schedule is {parallel.schedule!r}, which has the "
            'first stage and the last on one rank; set parallel.schedule to "InterleavedZeroBubble", or '
            "model.config.tie_word_embeddings = false"
        )
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    if len(kinds) > 1 or getattr(config, "add_cross_attention", False):
        raise MegabatchError(
            f"parallel.pp is {parallel.pp} and the model has {' and '.join(kinds) or 'cross attention'} in its layers, "
            "which pipeline stages do not support; leave parallel.pp out"
        )


def cut(
    model: PreTrainedModel,
    parts: Sequence[StageLayers],
    config: Config,
    rank: int,
    shell: Callable[[], PreTrainedModel],
) -> Stages:
    """Return the stages of ``rank`` along pp; the model keeps what they hold and loses the rest.

    A ``shell`` is around each stage where there are several.
    """
    number = per_rank(config.parallel)
    from megabatch.pipeline import SCHEDULES

    stages = [parts[index] for index in SCHEDULES[config.parallel.schedule].indices(rank, config.parallel.pp, number)]
    shells = [model] if number == 1 else [shell() for _ in stages]
    holdings = [held(model, part) for part in stages]
    for module, part, holding in zip(shells, stages, holdings, strict=True):
        leave(module, holding)
        connect(module, part)
    leave(model, {name: module for holding in holdings for name, module in holding.items()})
    return Stages(model, stages, shells)


def held(model: nn.Module, part: StageLayers) -> dict[str, nn.Module]:
    """Return the modules of a part, by their names, and what every stage has.

    With tied embeddings the last stage also has the embedding, under whose name the shared matrix is made and saved.
    """
    anatomy, base = anatomy_of(model), cast(Any, model).base_model_prefix
    names = [f"{base}.{anatomy.layers}.{index}" for index in part.layers]
    names += [f"{base}.{name}" for name in anatomy.first if part.is_first]
    names += [f"{base}.{anatomy.last}", "lm_head"] if part.is_last else []
    names += [f"{base}.{anatomy.first[0]}"] if part.is_last and cast(Any, model).config.tie_word_embeddings else []
    names += [f"{base}.{name}" for name, _ in model.get_submodule(base).named_children() if name == "rotary_emb"]
    return {name: model.get_submodule(name) for name in names}


def leave(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Replace all modules of a model but these by empty ones."""
    anatomy, base = anatomy_of(model), cast(Any, model).base_model_prefix
    for name in (*(f"{base}.{name}" for name in (*anatomy.first, anatomy.last)), "lm_head"):
        model.set_submodule(name, NoPositions() if name.endswith(".wpe") else nn.Identity())
    layers = nn.ModuleList()
    model.set_submodule(f"{base}.{anatomy.layers}", layers)
    for name, module in modules.items():
        parent, _, own_name = name.rpartition(".")
        model.get_submodule(parent).register_module(own_name, module)


def connect(stage: nn.Module, part: StageLayers) -> None:
    """Connect a stage to the ones before and after it by hooks."""

    def take(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        (hidden,) = inputs  # [B, T, E]
        return (), {"inputs_embeds": hidden} | {name: value for name, value in named.items() if name != "input_ids"}

    def hand(_: nn.Module, inputs: object, output: Any) -> Tensor:
        hidden: Tensor = output.logits  # [B, T, E]: the head is empty
        # torch's schedules detach it in place at last.
        return hidden.clone() if hidden._is_view() else hidden

    if not part.is_first:
        stage.register_forward_pre_hook(take, with_kwargs=True)
    if not part.is_last:
        stage.register_forward_hook(hand)


def pipeline(
    stages: Stages, config: Config, wrapper: WrapperChoice, mesh: DeviceMesh,
    ddp: Callable[..., nn.Module] = DistributedDataParallel,
) -> "Pipeline":  # fmt: skip
    modules: list[nn.Module] = list(stages.modules)
    if wrapper.name == "ddp":
        group = mesh.get_group("dp_replicate")
        modules = [ddp(module, process_group=group) for module in modules]
    architecture, dtype = stages.model.config, computing_dtype(config.model)
    # The first stage has it, and the last one where its head is tied.
    embedding: nn.Parameter | None = getattr(stages.model.get_input_embeddings(), "weight", None)
    is_tied = architecture.tie_word_embeddings
    from megabatch.pipeline import Pipeline

    return Pipeline(
        modules,
        mesh,
        schedule=config.parallel.schedule,
        boundary=shape_of(architecture.hidden_size, dtype),
        output=shape_of(architecture.vocab_size, dtype),
        tied={"embedding": embedding} if is_tied and embedding is not None else None,
    )


def stages_text(parallel: ParallelConfig) -> str:
    """Return the pipeline in words."""
    number = per_rank(parallel)
    share = "one stage" if number == 1 else f"{number} stages"
    return f"pipeline over {parallel.pp} ranks, {share} of the layers on each, in the order of {parallel.schedule}"


def shape_of(width: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return a function that gives the shape [B, T, width] for tokens [B, T]."""

    def shape(input_ids: Tensor, *_: object, **__: object) -> Tensor:
        return torch.empty(*input_ids.shape, width, dtype=dtype, device="meta")

    return shape


def anatomy_of(model: nn.Module) -> Anatomy:
    return ANATOMIES[cast(Any, model).config.model_type]

"""A recipe's model: built, laid over the ranks and tried once."""

import contextlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts
from transformers import PreTrainedConfig, PreTrainedModel

from megabatch import JointLoss
from megabatch.batching import check_packing_isolation, context_parallel, equal_but_rounding
from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.config import Config, ModelConfig
from megabatch.train.config.contradictions import check_config, given
from megabatch.train.model.adapters import begun, choose_trained, left_out, num_parameters
from megabatch.train.model.architecture import (
    architecture_of,
    check_attention,
    check_fit,
    key_of,
    outline,
    refused,
    silence,
)
from megabatch.train.model.frozen import check_four_bits, check_same_bits, described, sealed
from megabatch.train.model.keyed_dropout import key_dropouts
from megabatch.train.model.weights import (
    ModelSource,
    fill,
    fresh_source,
    is_several,
    models_of,
    own_source,
    saved_source,
)
from megabatch.train.parallel.pipeline_stages import Stages, pipeline, stages_of, stages_text
from megabatch.train.parallel.tensor_parallel import NO_BORDERS, plain_terms, spread
from megabatch.train.parallel.utilization import UNKNOWN, Utilization, arithmetic_of, utilization_of
from megabatch.train.parallel.wrap import (
    WrapperChoice,
    accumulation_of,
    attend_over,
    blocks_of,
    check_attention_is_causal,
    choose_wrapper,
    computing,
    computing_dtype,
    distribute,
    is_pipeline,
    policy_of,
    precision_text,
    reshard,
)
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.plugins import in_place_of
from megabatch.train.runtime.ranks import Ranks

if TYPE_CHECKING:
    from megabatch.pipeline import Pipeline

# These keys say who wrote a config and not what it is.
VERSION_KEYS = ("transformers_version",)
MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
# By kernel of torch, the place of dropout_p.
ATTENTIONS = {
    torch.ops.aten._scaled_dot_product_flash_attention.default: 3,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: 5,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: 5,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default: 4,
}


@dataclass(frozen=True)
class ParallelModel:
    """A model as it lies over the ranks."""

    model: Any  # for the accumulator: a module, or a list of several
    base: nn.Module  # without the DDP wrapper, or what this rank holds of it; parameters and shards are the same
    wrapper: WrapperChoice
    words: list[str]  # what was made and how, a line each
    warnings: list[str]  # what nobody should overlook
    identity: dict[str, object]  # json: what makes it another model
    utilization: Utilization = UNKNOWN
    loss_parallel: bool = False  # whether the loss gets logits that are cut by the vocabulary
    left_out: Collection[str] = ()  # names of the parameters that checkpoints do not have
    container: nn.Module | None = None  # of several models, as the loss gets them: a ModuleList or a ModuleDict

    @property
    def run(self) -> nn.Module:
        """Return the module for forwards without a backward: the pipeline, or the model without its DDP wrapper."""
        return self.model if is_pipeline(self.model) else self.base

    def losses(self) -> AbstractContextManager[None]:
        """Surround forwards and backwards of the loss."""
        return loss_parallel() if self.loss_parallel else contextlib.nullcontext()


def build(config: Config, ranks: Ranks, console: Console, longest_tokens: int | None, tokenizer: Any) -> ParallelModel:
    """Return the recipe's model with its weights, the same for every wrapper and number of ranks. Collective.

    Raises `MegabatchError`, on every rank, where it cannot be made, or does not fit the tokenizer or the longest
    sample.
    """
    check_config(config)
    check_attention(config.model, ranks.device)
    source, wrapper = choose_source(config, ranks, longest_tokens, tokenizer)
    size = f"{num_parameters(source.model)[0]:,} parameters"
    base = source.model
    precision = precision_text(config.model, wrapper.casts_as, accumulation_of(config.update))
    words = [f"{size}: {source.text}", *prepare(base, config.model, config.update.shapes), precision]
    arithmetic = arithmetic_of(base) if config.model.quantize is None else "model.quantize is not counted"
    utilization = utilization_of(arithmetic, ranks.device, computing_dtype(config.model))
    words.append(utilization.words if utilization.peak is None else f"MFU: of {utilization.words}")
    if config.model.lora is not None:
        source = begun(source, config.model, config.run.seed)
    update, is_split = config.update, max(ranks.layout.tp, ranks.layout.cp, ranks.layout.pp) > 1
    shares_rows = any((is_split, config.model.compile, update.one_row, update.long_samples))
    if config.model.keyed_dropout and not shares_rows:
        key_dropouts(base)
    identity, unsaved = identity_of(base), left_out(base, config.model)
    stages = stages_of(base, config, wrapper, ranks, lambda: outline(config.model, cast(Any, base).config))
    laid_words, mesh = lay(source, config, wrapper, ranks, stages)
    words += laid_words
    identity = sealed(identity, base, unsaved, ranks)
    check_same_bits(base, ranks)
    warnings: list[str] = []
    run = trial = base
    if stages is not None and mesh is not None:
        run = trial = pipeline(stages, config, wrapper, mesh)
        if ranks.layout.cp > 1:
            trial = pipeline(stages, config, wrapper, mesh["pp"])
    if config.model.function is None:
        with computing(config.model, wrapper.casts_as, ranks.device):
            try_forward(trial, config.model, ranks.device)
            if config.data.pack_tokens is not None:
                isolated, text = check_documents(trial, ranks.device)
                (words if isolated else warnings).append(text)
    if mesh is not None and "cp" in (mesh.mesh_dim_names or ()):
        attention = context_parallel.GatheredAttention(mesh.get_group("cp"))
        for module in [cast(PreTrainedModel, base)] if stages is None else stages.modules:
            attend_over(module, attention)
    container = None
    if wrapper.name == "ddp" and stages is None:
        # Your own model may leave parameters out of a microbatch.
        unused = config.model.function is not None
        run = replicated(base) if is_several(base) else DistributedDataParallel(base, find_unused_parameters=unused)
    if is_several(run):
        container = run
    model = run if container is None else models_of(container)
    cuts_logits = config.parallel.loss_parallel
    return ParallelModel(model, base, wrapper, words, warnings, identity, utilization, cuts_logits, unsaved, container)


def replicated(several: nn.Module) -> nn.Module:
    """Return a container of the same kind with each model that is trained in DDP of its own. Collective."""
    wrapped = {
        name: DistributedDataParallel(module, find_unused_parameters=True) if is_trained else module
        for name, module in several.named_children()
        for is_trained in [any(part.requires_grad for part in module.parameters())]
    }
    return nn.ModuleDict(wrapped) if isinstance(several, nn.ModuleDict) else nn.ModuleList(wrapped.values())


def choose_source(
    config: Config, ranks: Ranks, longest_tokens: int | None, tokenizer: Any
) -> tuple[ModelSource, WrapperChoice]:
    """Return the model that the recipe names, and the wrapper that suits it."""
    seed, stated = config.run.seed, config.parallel.wrapper
    if config.model.function is not None:
        source = own_source(config.model, seed)
        if is_several(source.model) and config.model.lora is not None:
            raise MegabatchError("model.function returns several models and model.lora is set; leave one of them out")
        return source, choose_wrapper(stated, ranks.size, source.model, ranks.layout)
    architecture = architecture_of(config.model)
    architecture.use_cache = False
    check_fit(architecture, longest_tokens, tokenizer)
    model = outline(config.model, architecture)
    if ranks.layout.cp > 1:
        check_attention_is_causal(model)
    wrapper = choose_wrapper(stated, ranks.size, model, ranks.layout)
    check_four_bits(model, config.model, wrapper)
    if config.model.name is None:
        return fresh_source(model, config.model, architecture, seed), wrapper
    sharded = wrapper.name == "fsdp2" or max(ranks.layout.tp, ranks.layout.pp) > 1
    return saved_source(model, config.model, architecture, seed, sharded=sharded), wrapper


def lay(
    source: ModelSource, config: Config, wrapper: WrapperChoice, ranks: Ranks, stages: Stages | None
) -> tuple[list[str], DeviceMesh | None]:
    """Cut and shard the model as the recipe says, and bring its weights to the device.

    Returns descriptions, and the mesh of all ranks if the model lies on one.
    """
    model, words, mesh = source.model, list[str](), None
    if source.units is None and (ranks.layout.tp > 1 or not wrapper.is_of_fsdp):
        model.to(ranks.device)
    if max(ranks.layout.tp, ranks.layout.pp) > 1 or wrapper.is_of_fsdp:
        mesh = ranks.layout.mesh(wrapper.name, ranks.size, ranks.device.type)
        words += divide(model, config, wrapper, mesh, stages)
    if source.units is not None:
        here = set(model.modules())
        units = [unit for unit in source.units if unit.module in here]
        weights_on = torch.device("cpu") if config.parallel.cpu_offload else ranks.device
        fill(model, units, config.run.seed, ranks.device, source.saved, weights_on)
    return words, mesh


def divide(
    model: nn.Module, config: Config, wrapper: WrapperChoice, mesh: DeviceMesh, stages: Stages | None,
    exchange: str = "all_to_all",
) -> list[str]:  # fmt: skip
    """Cut the model along tp, then shard or copy it along the data axes. Return descriptions.

    ``exchange`` is the name of transformers' way to bring tokens to experts on other ranks.
    """
    modules: list[tuple[nn.Module, list[nn.Module]]] = [
        (module, list(blocks_of(module).values()))
        for module in (models_of(model) if stages is None else stages.modules)
    ]
    axes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
    words = [f"mesh: {' x '.join(f'{axis} {degree}' for axis, degree in axes if (axis, degree) != ('tp', 1))}"]
    if config.parallel.ep > 1:
        from megabatch.train.parallel.expert_ranks import deal_experts

        experts = deal_experts(model, mesh, exchange)
        modules = [(model, [*experts, *blocks]) for _, blocks in modules]
        words.append(f"experts of {len(experts)} layers are dealt out over {config.parallel.ep} ranks")
    if stages is not None:
        words.append(stages_text(config.parallel))
    if config.parallel.tp > 1:
        parallel, borders = config.parallel, NO_BORDERS if stages is None else stages.borders
        words.append(
            spread(
                model, mesh["tp"], sequence_parallel=parallel.sequence_parallel, loss_parallel=parallel.loss_parallel,
                borders=borders,
            )
        )  # fmt: skip
    if config.parallel.cpu_offload:
        words.append("parameters, gradients and optimizer states are in host memory, where the optimizer steps")
    for module, blocks in modules if wrapper.is_of_fsdp else []:
        policy = policy_of(config.model, accumulation_of(config.update))
        distribute(
            module, blocks, wrapper, policy, mesh, reshards=config.parallel.reshard_after_forward,
            offloads=config.parallel.cpu_offload,
        )  # fmt: skip
        if not blocks:
            words.append("sharded as one piece: name the classes of its layers in _no_split_modules to shard by layer")
    return words


def check_loss(loss_fn: object, config: Config, *, has_sets: bool) -> None:
    """Raise for a joint loss and what it cannot go with: whatever cuts samples or calls, which changes the loss."""
    if not isinstance(loss_fn, JointLoss):
        return
    keys = (
        "parallel.cp", "parallel.tp", "parallel.pp", "advice.every",
        "update.same_bits", "update.cost", "update.shapes",
    )  # fmt: skip
    for key in given(config, keys):
        raise MegabatchError(
            f"loss.function is a JointLoss, which needs all samples of an update at once, and {key}; leave one of "
            "them out"
        )
    if has_sets:
        raise MegabatchError(
            "loss.function is a JointLoss, which an evaluation cannot sum sample by sample; set eval.num_samples to "
            "0 and leave eval.sets out: eval.function can evaluate"
        )


def in_precision(loss_fn: Any, config: ModelConfig, parallel_model: ParallelModel, device: torch.device) -> Any:
    """Return the loss, or joint loss, computed in model.compute_dtype and with several models in their container."""
    if isinstance(loss_fn, JointLoss):
        return JointLoss(in_precision(loss_fn.encode, config, parallel_model, device), loss_fn.loss)
    if parallel_model.loss_parallel:
        loss_fn = plain_terms(loss_fn)
    container = parallel_model.container
    if config.compute_dtype is None and container is None:
        return loss_fn

    def computed(model: Any, microbatch: Any, **divisor: Any) -> Any:
        with computing(config, parallel_model.wrapper.casts_as, device):
            return loss_fn(container if isinstance(model, list) else model, microbatch, **divisor)

    return in_place_of(loss_fn, computed)


def prepare(model: nn.Module, config: ModelConfig, num_shapes: int | None = None) -> list[str]:
    """Adapt, freeze, recompute and compile as the recipe says, before the model is wrapped. Return descriptions.

    Layers share their graphs: one for each of ``num_shapes``, or for all sizes.
    """
    words = choose_trained(model, config)
    if config.activation_checkpointing:
        for part in models_of(model):
            checkpoint_activations(part, selective=config.activation_checkpointing == "selective")
        note = ", without attention and every second matrix product" * (config.activation_checkpointing == "selective")
        words.append(f"activations are recomputed in backward, layer by layer{note}")
    if config.compile:
        try:
            torch.compile(torch.neg)(torch.ones(2))
        except Exception as error:
            # Otherwise it shows in the first update.
            raise MegabatchError(
                f"model.compile is set and torch.compile does not work here ({in_one_line(error)}); "
                "install the compiler that it asks for, or leave compile out"
            ) from None
        layers = [layer for part in models_of(model) for layer in list(blocks_of(part).values()) or [part]]
        for layer in layers:
            layer.compile(dynamic=None if num_shapes is None else False)
        # torch runs further shapes without a graph; longer samples may add shapes.
        if num_shapes is not None:
            torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, 2 * num_shapes)
        words.append(f"compiled: {len(layers)} layers" if layers[0] is not model else "compiled as a whole")
    model.train()
    return words


def checkpoint_activations(model: nn.Module, *, selective: bool = False) -> None:
    """Switch on recomputing, under the name that this version of transformers has for it."""
    options = {"context_fn": selective_contexts} if selective else {}
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        enable = getattr(model, name, None)
        if enable is not None:
            enable({"use_reentrant": False, **options})
            return
    raise MegabatchError(
        f"model.activation_checkpointing is set and a {type(model).__name__} has no gradient_checkpointing_enable; "
        "give it that method, or leave activation_checkpointing out"
    )


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a layer's forward and recomputation, by torchtitan's policy of operators."""
    num_matmuls = Counter[bool]()

    def policy(context: SelectiveCheckpointContext, operation: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
        is_saved = is_deterministic_attention(operation, inputs, named)
        if operation in MATMULS:
            num_matmuls[context.is_recompute] += 1
            is_saved = num_matmuls[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def is_deterministic_attention(operation: Any, inputs: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return True for attention without dropout.

    An output that is kept draws no numbers in the recomputation, so later dropout would draw other ones than in the
    forward.
    """
    index = ATTENTIONS.get(operation)
    return index is not None and not (inputs[index] if index < len(inputs) else named.get("dropout_p", 0.0))


def identity_of(model: nn.Module) -> dict[str, object]:
    """Return what tells models apart, as json: config, and dtypes and shapes of the parameters."""
    parameters = described(model)
    if not isinstance(model, PreTrainedModel):
        return {"parameters": parameters}
    keys = {key: value for key, value in model.config.to_dict().items() if key not in VERSION_KEYS}
    return {"model_config": json.loads(json.dumps(keys, default=str)), "parameters": parameters}


def try_forward(model: nn.Module, config: ModelConfig, device: torch.device) -> None:
    """Raise `MegabatchError` if the model does not run, or a token sees the next one; on all ranks of the model."""
    vocab_size = vocab_size_of(model)
    try:
        first, second = (logits_of(model, torch.tensor([[0, last % vocab_size]], device=device)) for last in (0, 1))
    except Exception as error:
        raise refused(config, error) from None
    if not bool(torch.isfinite(first).all()):
        raise MegabatchError(
            f"the model of {key_of(config)} gives logits that are not finite; choose weights that are whole"
        )
    if not equal_but_rounding(first[:, 0], second[:, 0]):
        raise MegabatchError(
            f"the model of {key_of(config)} is not causal: a token's output changes with the token after it; "
            "choose a causal language model (for an encoder's family, set is_decoder = true)"
        )


def check_documents(model: nn.Module, device: torch.device) -> tuple[bool, str]:
    """Return true if packed documents do not see each other, and the finding in words; on all ranks of the model."""
    attention = getattr(config_of(model), "_attn_implementation", None)
    logits, vocab_size = partial(logits_of, model), vocab_size_of(model)
    crossing = [
        num_rows for num_rows in (1, 2) if not check_packing_isolation(logits, vocab_size, device, num_rows=num_rows)
    ]
    if not crossing:
        return True, f"documents are isolated by their position_ids ({attention})"
    rows = "" if 1 in crossing else " in a microbatch of several rows (update.micro_batch_size = 1 has one)"
    return False, (
        f"attention crosses documents: those of a packed row see each other{rows} ({attention}); "
        "set model.attention to another backend, or leave data.pack_tokens out"
    )


def vocab_size_of(model: nn.Module) -> int:
    return config_of(model).get_text_config().vocab_size


def config_of(model: nn.Module) -> PreTrainedConfig:
    """Return the config of a model, or of a pipeline's stages."""
    return next(module.config for module in model.modules() if isinstance(module, PreTrainedModel))


@torch.no_grad()
def logits_of(model: nn.Module, tokens: Tensor, **inputs: Tensor) -> Tensor:
    """Return logits [B, T, V] for tokens [B, T], without dropout and compiler; the model's mode stays."""
    was_training = model.training
    model.eval()
    try:
        with silence(), torch.compiler.set_stance("force_eager"):
            if is_pipeline(model):
                return logits_through(model, {"input_ids": tokens, **inputs})
            return cast(Any, model)(input_ids=tokens, **inputs).logits
    finally:
        model.train(was_training)
        reshard(model)


def logits_through(model: "Pipeline", inputs: dict[str, Tensor]) -> Tensor:
    from megabatch.pipeline import evaluate

    outputs: list[Tensor] = []

    def keep(last_stage: Any, microbatch: Any) -> tuple[Tensor, float]:
        outputs.append(last_stage(**microbatch).logits)
        return outputs[0].new_zeros(()), 0.0

    evaluate(model, [inputs], keep)
    expected = cast(Tensor, model.output(**inputs))
    logits = outputs[0].contiguous() if outputs else torch.empty_like(expected, device=inputs["input_ids"].device)
    dist.broadcast(logits, group=model.group, group_src=model.last_rank)
    return logits

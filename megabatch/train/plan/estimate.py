"""Estimate: memory, traffic and time of a choice in closed form, to skip simulations that cannot matter.

Memory is within 5 % of the simulation if activations are recomputed. Otherwise the estimate counts fewer activations
than any layer keeps, so that it never rejects a choice that fits. Traffic is exact for models that use every parameter
and train something in each layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from megabatch.optim import LowBits, split_parameters
from megabatch.pipeline import count_held, estimate_bubble
from megabatch.simulate import QUANTIZED_OPTIMIZERS, Device, FourBitLinear, QuantizedAdam, busy_seconds, message_seconds
from megabatch.train.config import Config, OptimConfig
from megabatch.train.config.parallel_layout import Layout
from megabatch.train.model.optimizer import build_optimizer, groups_of
from megabatch.train.parallel.wrap import (
    accumulation_of,
    blocks_of,
    dtype_of,
    is_mixed,
    layers_of_experts,
    plan_of_experts,
)
from megabatch.train.plan.grid import GATHER_ONCE, Choice

# Numbers per token and hidden feature that a layer keeps for the backward; measured layers keep 22.
MIN_KEPT = 12
# FLOP per token and parameter, with and without a second forward.
RECOMPUTE_FLOPS, PLAIN_FLOPS = 6, 4
# FLOPs per token and trained parameter.
GRADIENT_FLOPS = 2
# A layer under tp sends this many times the stream in rings, and in a second forward.
CUT_BYTES, RECOMPUTED_CUT_BYTES = 8, 3
# Collectives of a layer under tp, with the stream cut or whole.
CUT_CALLS, WHOLE_CALLS = 12, 4
# What FSDP2 gathers is read or written so many times: the buffer, and the weights out of it.
COPIES = 4
# Schedules of one stage on each rank.
GPIPE, ONE_EACH = "GPipe", "1F1B"
# Fewest logits that `losses.next_token` computes at once.
MIN_CHUNK = 2**22


@dataclass(frozen=True)
class PipelineShare:
    """The place of a rank in a pipeline."""

    schedule: str
    num_ranks: int
    rank: int
    per_rank: int  # stages
    num_embedded: int  # parameters of the embedding of tokens, which multiply nothing

    @property
    def num_telling(self) -> int | None:
        """Microbatches whose simulation tells of any more: the first, those in the middle, the last. None: none do."""
        if self.per_rank > 1 or self.schedule not in (GPIPE, ONE_EACH):
            return None
        num_early = 1 if self.schedule == GPIPE else self.num_ranks - self.rank
        return max(num_early + 3, self.num_ranks)

    def num_held(self, num_microbatches: int) -> float:
        """Return the most microbatches whose activations this rank holds for its layers, at least."""
        return count_held(self.schedule, self.num_ranks, self.per_rank, self.rank, num_microbatches)


@dataclass(frozen=True)
class ExpertSizes:
    """The experts of a model, of which each token goes to a few."""

    num_parameters: int
    num_unit: int  # of the largest layer
    num_layers: int  # with experts
    is_trained: bool
    num_chosen: int  # of a layer's experts, for each token
    num_experts: int  # of a layer
    num_ranks: int = 1  # that share the experts of a layer

    @property
    def num_idle(self) -> int:
        """Parameters that a token does not use."""
        return self.num_parameters - self.num_parameters * self.num_chosen // self.num_experts


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model on one rank: numbers of parameters, and bytes of one number of each kind."""

    num_parameters: int  # of this rank's part under tp
    num_unit: int  # of the largest layer
    num_root: int  # in no layer: embedding, head
    num_trained: int  # of the parameters, of the largest layer's and of those in no layer
    num_trained_unit: int
    num_trained_root: int
    wider_bytes: int  # that one of them has more than another parameter: adapters of bfloat16 are of float32
    num_layers: int
    num_kept: int  # layers that keep activations: from the first one with something to train
    num_hidden: int
    num_vocabulary: int
    parameter_bytes: float  # on average, as few as weights in four bits have
    compute_bytes: int
    reduce_bytes: int
    state_bytes: float  # of the optimizer, per parameter that is trained
    num_widened: int  # elements that it steps as float32 ones at a time
    dtype: torch.dtype  # that is computed in
    wrapped: str  # "plain", "ddp", "replicate", "fsdp2" or "hsdp"
    num_shards: int  # ranks that share one copy of the parameters
    num_copies: int
    num_cut: int = 1  # ranks that cut each matrix among them
    cuts_stream: bool = False  # over these ranks, between matrices
    cuts_logits: bool = False
    num_stretches: int = 1  # ranks that cut each sequence among them
    num_key_features: int = 0  # of the keys and values of a token
    offloads: bool = False  # parameters, gradients and states to the host
    pipeline: PipelineShare | None = None
    experts: ExpertSizes | None = None

    @property
    def parts(self) -> "list[ModelSizes]":
        """The sizes by the ranks that gather and reduce them: experts on ranks of their own come apart."""
        experts = self.experts
        if experts is None or experts.num_ranks == 1:
            return [self]
        num_trained, num_trained_unit = (
            number * experts.is_trained for number in (experts.num_parameters, experts.num_unit)
        )
        dense = replace(
            self, num_parameters=self.num_parameters - experts.num_parameters,
            num_unit=self.num_unit - experts.num_unit, num_trained=self.num_trained - num_trained,
            num_trained_unit=self.num_trained_unit - num_trained_unit, experts=None,
        )  # fmt: skip
        ranks = experts.num_ranks
        apart = replace(
            self, num_parameters=experts.num_parameters // ranks, num_unit=experts.num_unit // ranks, num_root=0,
            num_trained=num_trained // ranks, num_trained_unit=num_trained_unit // ranks, num_trained_root=0,
            num_layers=experts.num_layers, num_kept=min(self.num_kept, experts.num_layers),
            num_shards=self.num_shards // ranks, experts=None,
        )  # fmt: skip
        return [dense, apart]

    @property
    def gathered_parts(self) -> "list[ModelSizes]":
        """The parts that FSDP2 gathers from several ranks."""
        return [part for part in self.parts if part.num_shards > 1] if self.is_sharded else []

    @property
    def num_gathered(self) -> int:
        """Most layers gathered at once: three, or fewer if the lower ones have no backward."""
        return 3 if self.num_kept == self.num_layers else min(3, self.num_kept + 1)

    @property
    def num_logit_tokens(self) -> int:
        """Fewest tokens whose logits exist at once: `losses.next_token` sums them in chunks."""
        return max(self.num_hidden // 2, MIN_CHUNK // self.num_vocabulary) if self.num_vocabulary else 0

    @property
    def head_bytes(self) -> int:
        """Bytes of a chunk's logits and the head's gradient, independent of the microbatch."""
        return 4 * self.num_vocabulary * (2 * self.num_logit_tokens + self.num_hidden)

    @property
    def is_sharded(self) -> bool:
        """True if FSDP2 gathers parameters and scatters gradients."""
        return self.wrapped in ("fsdp2", "hsdp")


@dataclass(frozen=True)
class Estimate:
    """The cost of one choice on one rank."""

    peak_bytes: int
    sent_bytes: int
    compute_seconds: float
    traffic_seconds: float  # that overlaps with computation
    awaited_seconds: float = 0.0  # of collectives that a layer waits for
    bubble: float = 0.0  # time that a pipeline's rank waits for others, as a fraction of the time that it computes
    copy_seconds: float = 0.0  # of offloaded shards over PCIe, beside computing

    @property
    def seconds(self) -> float:
        return (1 + self.bubble) * max(self._busy_seconds, self.copy_seconds) + self.awaited_seconds

    @property
    def bound(self) -> str:
        traffic_seconds = self.traffic_seconds + self.awaited_seconds
        if self.copy_seconds > max(self._busy_seconds, traffic_seconds):
            return "PCIe"
        return "traffic" if traffic_seconds >= self._busy_seconds else "compute"

    @property
    def _busy_seconds(self) -> float:
        return busy_seconds(self.compute_seconds, 0.0, self.traffic_seconds)


def measure_sizes(model: nn.Module, config: Config, layout: Layout, wrapped: str, world: int) -> ModelSizes:
    layers = [_count_parameters(block) for block in blocks_of(model).values()]
    num_parameters, num_trained = _count_parameters(model)
    in_layers, trained_in_layers = (sum(layer[kind] for layer in layers) for kind in (0, 1))
    below = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else model
    trains_below = any(parameter.requires_grad for parameter in below.parameters())
    text = model.config.get_text_config() if isinstance(model, PreTrainedModel) else None
    num_hidden: int = getattr(text, "hidden_size", 0)
    dtype, tp = dtype_of(config.model), layout.tp
    trained_dtype = next((parameter.dtype for parameter in model.parameters() if parameter.requires_grad), dtype)
    computed = torch.bfloat16 if is_mixed(config.model) else dtype
    optimizer = _stepped_optimizer(config, trained_dtype)
    widened: list[int] = []
    if isinstance(optimizer, LowBits):
        widened = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    num_copies, num_shards = layout.data_degrees("fsdp2" if wrapped in ("fsdp2", "hsdp") else wrapped, world)
    # FSDP2 shards over cp too.
    if wrapped in ("fsdp2", "hsdp"):
        num_shards *= layout.cp
    else:
        num_copies *= layout.cp
    experts = measure_experts(model, layout.ep)
    num_key_heads: int = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", 0)
    num_heads: int = getattr(text, "num_attention_heads", 1)
    head_features: int = getattr(text, "head_dim", None) or num_hidden // max(1, num_heads)
    return ModelSizes(
        num_parameters=num_parameters // tp,
        num_unit=max((layer[0] for layer in layers), default=num_parameters) // tp,
        num_root=(num_parameters - in_layers) // tp,
        num_trained=num_trained // tp,
        num_trained_unit=max((layer[1] for layer in layers), default=num_trained) // tp,
        num_trained_root=(num_trained - trained_in_layers) // tp,
        wider_bytes=trained_dtype.itemsize - dtype.itemsize,
        num_layers=len(layers),
        num_kept=sum(trains_below or any(layer[1] for layer in layers[:end]) for end in range(1, len(layers) + 1)),
        num_hidden=num_hidden,
        num_vocabulary=getattr(text, "vocab_size", 0),
        parameter_bytes=_parameter_bytes(model, dtype, num_parameters),
        compute_bytes=computed.itemsize,
        reduce_bytes=(accumulation_of(config.update) or trained_dtype).itemsize,
        state_bytes=_state_bytes(config, optimizer, model),
        num_widened=max(widened, default=0) // tp // num_shards,
        dtype=computed,
        wrapped=wrapped,
        num_shards=num_shards,
        num_copies=num_copies,
        num_cut=tp,
        cuts_stream=config.parallel.sequence_parallel,
        cuts_logits=config.parallel.loss_parallel,
        num_stretches=layout.cp,
        num_key_features=2 * num_key_heads * head_features,
        offloads=config.parallel.cpu_offload,
        experts=experts,
    )


def measure_experts(model: nn.Module, num_ranks: int = 1) -> ExpertSizes | None:
    """Return the sizes of a model's experts, by transformers' plan for them; None without such a plan."""
    layers = layers_of_experts(model, plan_of_experts(model))
    text = cast(Any, model.config).get_text_config() if layers else None
    num_chosen: int = getattr(text, "num_experts_per_tok", 0)
    if not num_chosen:
        return None
    sizes = [_count_parameters(layer) for layer in layers]
    num_experts = len(next(layers[0].parameters()))
    return ExpertSizes(
        num_parameters=sum(num for num, _ in sizes),
        num_unit=max(num for num, _ in sizes),
        num_layers=len(layers),
        is_trained=any(num for _, num in sizes),
        num_chosen=num_chosen,
        num_experts=num_experts,
        num_ranks=num_ranks,
    )


def _count_parameters(module: nn.Module) -> tuple[int, int]:
    four_bits = [module for module in module.modules() if isinstance(module, FourBitLinear)]
    stored = {
        id(part) for module in four_bits for name, part in module.named_parameters(recurse=False) if name != "bias"
    }
    parameters = [parameter for parameter in module.parameters() if id(parameter) not in stored]
    num_trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    frozen = sum(four_bit.in_features * four_bit.out_features for four_bit in four_bits)
    return sum(parameter.numel() for parameter in parameters) + frozen, num_trained


def _parameter_bytes(model: nn.Module, dtype: torch.dtype, num_parameters: int) -> float:
    """Return the bytes of a parameter in the model's dtype, or on average where some have four bits."""
    if not any(isinstance(module, FourBitLinear) for module in model.modules()):
        return dtype.itemsize
    sizes = [parameter.numel() * min(parameter.itemsize, dtype.itemsize) for parameter in model.parameters()]
    return sum(sizes) / num_parameters


def _stepped_optimizer(config: Config, dtype: torch.dtype) -> Optimizer:
    """Return the recipe's optimizer over two small matrices, of a hidden layer and of the head, after a step."""
    like = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(2)))
    for parameter in like.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = planned_optimizer(like, config.optim)
    optimizer.step()
    return optimizer


def planned_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """Return the recipe's optimizer. A quantized Adam is simulated, so that its package may be missing."""
    if config.function not in QUANTIZED_OPTIMIZERS:
        return build_optimizer(model, config)
    options: dict[str, Any] = dict(config.options)
    return QuantizedAdam(groups_of(model.parameters(), config.weight_decay), config.function, config.lr, **options)


def _state_bytes(config: Config, optimizer: Optimizer, model: nn.Module) -> float:
    """Return the bytes of optimizer state and of EMA per trained parameter, measured by a step of small matrices."""
    hidden, *_, head = [weight for group in optimizer.param_groups for weight in group["params"]]
    matrices, num_others = (sum(weight.numel() for weight in part) for part in split_parameters(model))
    average = 0 if config.optim.ema_decay is None else max(head.dtype.itemsize, torch.float32.itemsize)
    state_bytes = matrices * _bytes_of(optimizer.state[hidden]) + num_others * _bytes_of(optimizer.state[head])
    return state_bytes / head.numel() / max(1, matrices + num_others) + average


def _bytes_of(state: Mapping[str, object]) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor) and value.ndim)


def estimate_cost(choice: Choice, sizes: ModelSizes, length_tokens: int, device: Device) -> Estimate:
    tokens = -(-choice.micro_batch_size * length_tokens // sizes.num_stretches)
    sent_bytes = sum(_sent_bytes(choice, part) for part in sizes.parts)
    num_embedded = sizes.pipeline.num_embedded if sizes.pipeline is not None else 0
    num_unused = num_embedded + (0 if sizes.experts is None else sizes.experts.num_idle)
    per_token = (RECOMPUTE_FLOPS if choice.recompute else PLAIN_FLOPS) * (sizes.num_parameters - num_unused)
    per_token += GRADIENT_FLOPS * max(0, sizes.num_trained - num_unused)
    flops = per_token * tokens * choice.num_microbatches * choice.fill
    ranks = list(range(0, sizes.num_shards * sizes.num_copies * sizes.num_cut, sizes.num_cut))
    traffic_seconds = sent_bytes / device.sending_bytes_per_second(ranks)
    for part in sizes.gathered_parts:
        traffic_seconds += _num_collectives(choice, part) * device.latency_seconds(ranks[: part.num_shards], 1)
    # Fewer bytes come back as gradients than shards go to the device.
    offloaded_bytes = _num_gathered(choice, sizes) * sizes.parameter_bytes / sizes.num_shards if sizes.offloads else 0
    num_gathered = sum(_num_gathered(choice, part) for part in sizes.gathered_parts)
    copied_bytes = COPIES * num_gathered * sizes.compute_bytes
    compute_seconds = flops / device.flops_per_second(sizes.dtype) + copied_bytes / device.memory_bytes_per_second
    of_layers = [traffic(choice, sizes, tokens, device) for traffic in (_layer_traffic, _key_traffic, _expert_traffic)]
    awaited_bytes, awaited_seconds = (sum(column) for column in zip(*of_layers, strict=True))
    return Estimate(
        int(_peak_bytes(choice, sizes, tokens)), int(sent_bytes + awaited_bytes), compute_seconds, traffic_seconds,
        awaited_seconds * choice.fill, copy_seconds=offloaded_bytes / device.pcie_bytes_per_second,
    )  # fmt: skip


def estimate_pipeline(choice: Choice, ends: Sequence[ModelSizes], length_tokens: int, device: Device) -> Estimate:
    """Return the cost of a choice on a pipeline's first rank or its last: the larger memory, the longer time."""
    step = choice.largest_step
    first, last = (estimate_cost(step, end, length_tokens, device) for end in ends)
    update = [estimate_cost(choice, end, length_tokens, device) for end in ends]
    sizes, share = ends[0], cast(PipelineShare, ends[0].pipeline)
    num, compute_seconds = step.num_microbatches, max(first.compute_seconds, last.compute_seconds)
    message_bytes = choice.micro_batch_size * length_tokens * sizes.num_hidden * sizes.compute_bytes
    next_rank = sizes.num_shards * sizes.num_copies * sizes.num_cut
    message = message_seconds(message_bytes, [0, next_rank], device) / compute_seconds * num
    order = share.schedule, share.num_ranks, share.per_rank, num
    alone, bubble = (
        estimate_bubble(*order, recomputes=bool(choice.recompute), message=seconds)
        for seconds in (0.0, round(message, 2))
    )
    worst = max(first, last, key=lambda end: end.peak_bytes)
    more = choice.num_steps
    return Estimate(
        worst.peak_bytes,
        max(end.sent_bytes for end in update) + choice.num_microbatches * message_bytes,
        more * compute_seconds,
        max(end.traffic_seconds for end in update),
        more * max(first.awaited_seconds, last.awaited_seconds) + choice.bubbles * (bubble - alone) * compute_seconds,
        alone * choice.bubbles / more,
    )


def _layer_traffic(choice: Choice, sizes: ModelSizes, tokens: int, device: Device) -> tuple[int, float]:
    """Return the bytes and seconds of the collectives of tensor parallelism in an update.

    A layer sums or gathers the stream [tokens, hidden] twice in each direction. Whole logits are gathered twice, and
    so is their gradient.
    """
    ranks = list(range(sizes.num_cut))
    stream_bytes = tokens * sizes.num_hidden * sizes.compute_bytes
    logit_bytes = 0 if sizes.cuts_logits else 4 * tokens * sizes.num_vocabulary * sizes.compute_bytes
    per_layer = CUT_BYTES + (RECOMPUTED_CUT_BYTES if choice.recompute else 0)
    part = (len(ranks) - 1) / len(ranks) * choice.num_microbatches
    sent_bytes = int(part * (sizes.num_layers * per_layer * stream_bytes + logit_bytes))
    calls = sizes.num_layers * (CUT_CALLS if sizes.cuts_stream else WHOLE_CALLS) * choice.num_microbatches
    return sent_bytes, sent_bytes / device.sending_bytes_per_second(ranks) + calls * device.latency_seconds(ranks, 1)


def _key_traffic(choice: Choice, sizes: ModelSizes, tokens: int, device: Device) -> tuple[int, float]:
    """Return the bytes and seconds of the collectives of context parallelism in an update.

    A layer gathers the keys and values of all stretches in each forward and sends their gradients in the backward.
    """
    num = sizes.num_stretches
    ranks = list(range(0, num * sizes.num_cut, sizes.num_cut))
    calls = sizes.num_layers * choice.num_microbatches * (3 if choice.recompute else 2)
    sent_bytes = calls * (num - 1) * tokens * sizes.num_key_features * sizes.compute_bytes // sizes.num_cut
    return sent_bytes, sent_bytes / device.sending_bytes_per_second(ranks) + calls * device.latency_seconds(ranks, 1)


def _expert_traffic(choice: Choice, sizes: ModelSizes, tokens: int, device: Device) -> tuple[int, float]:
    """Return the bytes and seconds of the all-to-alls of expert parallelism in an update, under an even load.

    A layer sends each token to its experts and back in a forward, and both gradients in the backward. A forward also
    sends how many tokens come.
    """
    experts = sizes.experts
    if experts is None:
        return 0, 0.0
    num, forwards = experts.num_ranks, 2 if choice.recompute else 1
    row_bytes = tokens * experts.num_chosen * sizes.num_hidden * sizes.compute_bytes
    layers = experts.num_layers * choice.num_microbatches
    sent_bytes = layers * 2 * (forwards + 1) * row_bytes * (num - 1) // num
    calls = layers * (3 * forwards + 2)
    ranks = list(range(num))
    return sent_bytes, sent_bytes / device.sending_bytes_per_second(ranks) + calls * device.latency_seconds(ranks, 1)


def _num_collectives(choice: Choice, sizes: ModelSizes) -> int:
    """Return the all-gathers and reduce-scatters of an update; the root is gathered once a microbatch."""
    num_roots = 1 if sizes.num_root else 0
    num_units = sizes.num_layers + num_roots
    gathers = _count_gathered(choice, sizes, num_units, num_roots)
    return gathers + num_units * (1 if choice.sync == "last" else choice.num_microbatches)


def _peak_bytes(choice: Choice, sizes: ModelSizes, tokens: int) -> float:
    """Return the most bytes alive in a forward, a backward or the optimizer's step."""
    P, T = sizes.num_parameters, sizes.num_trained
    b_c, b_r = sizes.compute_bytes, sizes.reduce_bytes
    accumulates = choice.num_microbatches > 1
    shard = T / sizes.num_shards * b_r
    base = (P * sizes.parameter_bytes + T * (sizes.wider_bytes + sizes.state_bytes)) / sizes.num_shards
    base += shard if sizes.wrapped == "ddp" else 0
    if sizes.offloads:
        base = shard = 0
    num_whole = sum(part.num_trained for part in sizes.parts)
    held = num_whole * b_r if sizes.is_sharded and choice.sync == "last" and accumulates else shard
    keeps_sums = choice.sync == "replica_last" or (choice.sync == GATHER_ONCE and sizes.num_copies > 1)
    held += shard if keeps_sums and accumulates else 0
    gathered = sum(_most_gathered(choice, part) for part in sizes.gathered_parts) * b_c
    reducing = sum(part.num_trained_root * b_c + part.num_trained_unit * b_r for part in sizes.gathered_parts)
    forward = base + (held if accumulates else 0) + gathered + _activation_bytes(choice, sizes, tokens)
    # A few parameters at a time: weights and gradients in float32, and foreach's temporaries.
    if sizes.num_widened:
        step = base + shard + sizes.num_widened * torch.float32.itemsize * (2 if choice.fused else 3)
    else:
        step = base + shard + (0 if choice.fused else shard)
    return max(forward, base + held + gathered + reducing, step)


def _most_gathered(choice: Choice, sizes: ModelSizes) -> float:
    in_layers = sizes.num_parameters - sizes.num_root
    if choice.reshard:
        return sizes.num_root + min(sizes.num_gathered * sizes.num_unit, in_layers)
    # FSDP2 may keep the layers with a backward gathered for it.
    return sizes.num_root + in_layers * sizes.num_kept / max(sizes.num_layers, 1)


def _activation_bytes(choice: Choice, sizes: ModelSizes, tokens: int) -> float:
    """Return the bytes that layers keep for the backward, and those of a chunk's logits and gradient in float32."""
    features = tokens * sizes.num_hidden * sizes.compute_bytes / (sizes.num_cut if sizes.cuts_stream else 1)
    # Frozen matrices keep nothing.
    share = MIN_KEPT if sizes.num_trained == sizes.num_parameters else MIN_KEPT // 2
    # What matrices keep is cut in any case.
    cut = 1 if sizes.cuts_stream else sizes.num_cut
    layer_bytes = features if choice.recompute else share / cut * features
    logits = 2 * 4 * min(tokens, sizes.num_logit_tokens) * sizes.num_vocabulary
    num_bytes = sizes.num_kept * layer_bytes + logits / (sizes.num_cut if sizes.cuts_logits else 1)
    if sizes.pipeline is None:
        return num_bytes
    received = choice.num_microbatches * tokens * sizes.num_hidden * sizes.compute_bytes
    return num_bytes + (sizes.pipeline.num_held(choice.num_microbatches) - 1) * sizes.num_kept * layer_bytes + received


def _num_gathered(choice: Choice, sizes: ModelSizes) -> int:
    """Return the parameters that FSDP2 gathers in an update."""
    return _count_gathered(choice, sizes, sizes.num_parameters, sizes.num_root)


def _count_gathered(choice: Choice, sizes: ModelSizes, num_all: int, num_root: int) -> int:
    """Return how many of all elements are gathered in an update; the root's at most once a microbatch.

    A pipeline keeps what a backward gathers until the next forward of the stage or, without reshard, until the update
    ends.
    """
    if sizes.pipeline is not None:
        return num_all + (choice.num_microbatches * (num_all - num_root) if choice.reshard else 0)
    times = choice.num_microbatches * (2 if choice.reshard else 1)
    if choice.sync == GATHER_ONCE:
        return num_all
    return times * (num_all - num_root) + choice.num_microbatches * num_root


def _sent_bytes(choice: Choice, sizes: ModelSizes) -> int:
    """Return the bytes that a rank sends in rings for parameters and gradients."""
    n, T = choice.num_microbatches, sizes.num_trained
    inside, across = ((ranks - 1) / ranks for ranks in (sizes.num_shards, sizes.num_copies))
    reductions = 1 if choice.sync == "last" else n
    if not sizes.is_sharded:
        return int(2 * across * T * sizes.reduce_bytes * reductions)
    gathers = _num_gathered(choice, sizes)
    wider = _count_gathered(choice, sizes, T, sizes.num_trained_root) * sizes.wider_bytes
    within = inside * (gathers * sizes.compute_bytes + wider + T * reductions * sizes.reduce_bytes)
    return int(within + 2 * across * T / sizes.num_shards * sizes.reduce_bytes * (n if choice.sync == "every" else 1))

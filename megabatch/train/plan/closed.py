"""Closed form: memory, traffic and time of a choice in a few sums, from the sizes of a model; for what no run is worth.

Within 5 % of simulated memory where activations are recomputed; elsewhere it counts fewer activations than any layer
keeps, so that nothing that fits is called too large. Traffic is exact for models that use every parameter.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megabatch.simulate import Device
from megabatch.train.config import Config
from megabatch.train.layout import Layout
from megabatch.train.model.precision import accumulation_of, dtype_of, is_mixed
from megabatch.train.model.wrap import blocks_of
from megabatch.train.optim import build_optimizer
from megabatch.train.plan.choices import Choice

LEAST_KEPT = 12  # numbers per token and hidden feature that a layer keeps for backward; those measured keep 22
RECOMPUTING, PLAIN = 8, 6  # flops per token and parameter, with and without a second forward


@dataclass(frozen=True)
class Sizes:
    """What the sums need of a model on one rank; numbers of parameters and bytes of one of each kind."""

    num_parameters: int  # of this rank's part under tp
    num_unit: int  # of the largest layer
    num_root: int  # in no layer: embedding, head
    num_layers: int
    num_hidden: int
    num_vocabulary: int
    parameter_bytes: int
    compute_bytes: int
    reduce_bytes: int
    state_bytes: float  # of the optimizer, per parameter
    dtype: torch.dtype  # that is computed in
    wrapped: str  # "plain", "ddp", "replicate", "fsdp2" or "hsdp"
    num_shards: int  # ranks that share one copy of the parameters
    num_copies: int

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 gathers and scatters."""
        return self.wrapped in ("fsdp2", "hsdp")


@dataclass(frozen=True)
class Estimate:
    """Of one choice, on one rank."""

    peak_bytes: int
    sent_bytes: int
    compute_seconds: float
    traffic_seconds: float

    @property
    def seconds(self) -> float:
        """Traffic hidden behind the computation as far as it goes."""
        return max(self.compute_seconds, self.traffic_seconds)

    @property
    def bound(self) -> str:
        """By what the seconds are."""
        return "traffic" if self.traffic_seconds > self.compute_seconds else "compute"


def sizes_of(model: nn.Module, config: Config, layout: Layout, wrapped: str, world: int) -> Sizes:
    """The sizes of a model, which needs no memory, on ``world`` ranks."""
    layers = [sum(each.numel() for each in block.parameters()) for block in blocks_of(model).values()]
    num_parameters = sum(each.numel() for each in model.parameters())
    text = model.config.get_text_config() if isinstance(model, PreTrainedModel) else None
    dtype, tp = dtype_of(config.model), layout.tp
    computed = torch.bfloat16 if is_mixed(config.model) else dtype
    num_copies, num_shards = layout.data_degrees("fsdp2" if wrapped in ("fsdp2", "hsdp") else wrapped, world)
    return Sizes(
        num_parameters=num_parameters // tp,
        num_unit=max(layers, default=num_parameters) // tp,
        num_root=(num_parameters - sum(layers)) // tp,
        num_layers=len(layers),
        num_hidden=getattr(text, "hidden_size", 0),
        num_vocabulary=getattr(text, "vocab_size", 0),
        parameter_bytes=dtype.itemsize,
        compute_bytes=computed.itemsize,
        reduce_bytes=(accumulation_of(config.update) or dtype).itemsize,
        state_bytes=state_bytes(config, dtype),
        dtype=computed,
        wrapped=wrapped,
        num_shards=num_shards,
        num_copies=num_copies,
    )


def state_bytes(config: Config, dtype: torch.dtype) -> float:
    """Bytes that the optimizer keeps per parameter, found by a step of a small matrix."""
    like = nn.Linear(64, 64, bias=False, dtype=dtype)
    like.weight.grad = torch.zeros_like(like.weight)
    optimizer = build_optimizer(like, config.optim)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(value.numel() * value.element_size() for value in kept if value.ndim) / like.weight.numel()


def estimate(choice: Choice, sizes: Sizes, length_tokens: int, device: Device) -> Estimate:
    """The sums, for samples of ``length_tokens``."""
    tokens = choice.micro_batch_size * length_tokens
    sent_bytes = sent(choice, sizes)
    flops = (RECOMPUTING if choice.recompute else PLAIN) * sizes.num_parameters * tokens * choice.num_microbatches
    rate = device.sending_bytes_per_second(list(range(sizes.num_shards * sizes.num_copies)))
    compute_seconds = flops / device.flops_per_second(sizes.dtype)
    return Estimate(int(peak(choice, sizes, tokens)), sent_bytes, compute_seconds, sent_bytes / rate)


def peak(choice: Choice, sizes: Sizes, tokens: int) -> float:
    """Most bytes alive: in a forward, in a backward, or in the step."""
    P, u, r = sizes.num_parameters, sizes.num_unit, sizes.num_root
    b_c, b_r = sizes.compute_bytes, sizes.reduce_bytes
    own, accumulates = P / sizes.num_shards, choice.num_microbatches > 1
    shard = own * b_r  # of the gradient
    base = own * (sizes.parameter_bytes + sizes.state_bytes) + (shard if sizes.wrapped == "ddp" else 0)  # and buckets
    held = P * b_r if sizes.is_sharded and choice.sync == "last" and accumulates else shard
    held += shard if choice.sync == "replica_last" and accumulates else 0
    gathered = r * b_c + (3 * u if choice.reshard else P - r) * b_c if sizes.is_sharded else 0
    reducing = r * b_c + u * b_r if sizes.is_sharded else 0
    forward = base + (held if accumulates else 0) + gathered + activations(choice, sizes, tokens)
    step = base + shard + (0 if choice.fused else shard)
    return max(forward, base + held + gathered + reducing, step)


def activations(choice: Choice, sizes: Sizes, tokens: int) -> float:
    """What layers keep for backward, and the logits with their gradient in float32."""
    features = tokens * sizes.num_hidden * sizes.compute_bytes
    each = features if choice.recompute else LEAST_KEPT * features
    return sizes.num_layers * each + 2 * 4 * tokens * sizes.num_vocabulary


def sent(choice: Choice, sizes: Sizes) -> int:
    """Bytes that a rank sends in rings; nothing of tensor parallelism."""
    n, P = choice.num_microbatches, sizes.num_parameters
    inside, across = ((ranks - 1) / ranks for ranks in (sizes.num_shards, sizes.num_copies))
    reductions = 1 if choice.sync == "last" else n
    if not sizes.is_sharded:
        return int(2 * across * P * sizes.reduce_bytes * reductions)
    gathers = n * (2 * P - sizes.num_root if choice.reshard else P)  # the root stays gathered until its backward
    within = inside * (gathers * sizes.compute_bytes + P * reductions * sizes.reduce_bytes)
    return int(within + 2 * across * P / sizes.num_shards * sizes.reduce_bytes * (n if choice.sync == "every" else 1))

"""InsideSamples: a sample that is longer than a microbatch runs in chunks, exactly.

A token of a causal decoder reads earlier tokens through their keys and values, and through nothing else. The chunks of
a sample therefore run forward without a graph first, which leaves the keys and values of all layers. Then each chunk
runs forward and backward, the last one first. Its backward adds the gradient of the keys and values that it has read
to that of the chunks before it, which include it in their own backward. Memory holds the keys and values of the whole
sample, their gradient, and the activations of one chunk. The cost is one more forward.
"""

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megabatch.batching.padding import MASK, POSITIONS, find_mixing_causes, is_causal, with_config
from megabatch.batching.samples import HALF_TYPES, IGNORED_LABEL
from megabatch.errors import LossContractError, MegabatchError, PlanError, in_one_line
from megabatch.torch_private import is_compiled, original_of

OVERLAP = 1  # a chunk ends with the token that its last position predicts, whose own loss the next chunk counts
TRIAL_TOKENS, TRIAL_CHUNK = 12, 5


class InsideSamples:
    """Cut samples that are longer than the limit: ``GradientAccumulator(model, collate=InsideSamples(), ...)``.

    Samples of at most ``max_microbatch_tokens`` are padded and grouped as without it. A longer sample runs as several
    microbatches, its chunks, each of at most so many tokens. Chunks overlap by one token, so a loss that predicts the
    next token counts each target once.

    The model is a causal model of transformers that keeps keys and values in a cache. A trial on a few tokens compares
    its logits and its gradient with those of the uncut sample when you make the accumulator.

    The loss must call the model once, be a sum over next-token targets, and say by ``weigh`` how its weight is
    counted. Every tensor of a long sample has its tokens in dim 0. Use a plain model or DistributedDataParallel.
    """


class Chunk(NamedTuple):
    """A stretch of a long sample."""

    sample: int  # in the batch
    number: int  # among the chunks of the sample
    start: int  # its first token
    stop: int  # the first token of the next chunk; the chunk itself also holds this token
    length: int  # tokens of the whole sample

    @property
    def is_last(self) -> bool:
        """True if no chunk follows."""
        return self.stop == self.length


def find_chunks(sample: int, length: int, max_tokens: int) -> list[Chunk]:
    """Return the chunks of a sample of ``length`` tokens, in order, each with at most ``max_tokens`` tokens."""
    stride = max_tokens - OVERLAP
    num_chunks = max(1, -(-(length - OVERLAP) // stride))
    stops = [stride * (index + 1) for index in range(num_chunks - 1)] + [length]
    starts = [0, *stops[:-1]]
    return [Chunk(sample, number, *ends, length) for number, ends in enumerate(zip(starts, stops, strict=True))]


def cut(sample: Mapping[str, Any], chunk: Chunk) -> dict[str, Tensor]:
    """Return the tensors of one chunk. Raises `PlanError` for a tensor without a dim of tokens, and for a mask."""
    pieces: dict[str, Tensor] = {}
    for name, value in sample.items():
        tensor = torch.as_tensor(value)
        if not tensor.ndim or len(tensor) != chunk.length:
            raise PlanError(
                f"sample {chunk.sample} has {chunk.length} tokens, more than max_microbatch_tokens, and {name!r} of "
                f"shape {tuple(tensor.shape)}, which cannot be cut along them; give every tensor of a long sample its "
                "tokens in dim 0, or raise the limit"
            )
        if name.endswith(MASK) and not bool(tensor.all()):
            raise PlanError(
                f"sample {chunk.sample} is cut into chunks and {name!r} hides some of its tokens; cut these tokens "
                "away, or raise max_microbatch_tokens"
            )
        if name.endswith(POSITIONS) and not bool((tensor.diff(dim=0) == 1).all()):
            raise PlanError(
                f"sample {chunk.sample} is cut into chunks and {name!r} does not count on by 1, as where documents are "
                "packed in one sample; give each document as a sample, or raise max_microbatch_tokens"
            )
        piece = tensor[chunk.start : chunk.stop + OVERLAP]
        if name == "shift_labels" and not chunk.is_last:
            # The target of the token that both chunks hold belongs to the next one.
            piece = torch.cat([piece[:-OVERLAP], torch.full_like(piece[-OVERLAP:], IGNORED_LABEL)])
        pieces[name] = piece
    return pieces


class KeptTensor:
    """The keys, or the values, of a whole sample in one layer, and the gradient that later chunks have left."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.values: Tensor | None = None  # [B, heads, T, D]
        self.gradient: Tensor | None = None  # [B, heads, T, D]

    def write(self, start: int, values: Tensor, *, is_again: bool) -> Tensor:
        """Keep the values of a chunk. Return those of all tokens up to its end, [B, heads, stop, D].

        Raises `LossContractError` if a second forward of the chunk, ``is_again``, has other values.
        """
        stop = start + values.shape[-2]
        if self.values is None:
            self.values = values.new_empty(*values.shape[:-2], self._length, values.shape[-1])
        if is_again and not torch.equal(self.values[..., start:stop, :], values):
            raise LossContractError(
                "a sample is cut into chunks and the loss calls the model twice with other keys and values, as where "
                "an adapter is disabled for a reference; let the loss call the model once"
            )
        self.values[..., start:stop, :] = values
        # No view: autograd would take the same numbers, written again by a second forward, for another value.
        shape, storage = (*values.shape[:-2], stop, values.shape[-1]), self.values.untyped_storage()
        return values.new_empty(0).set_(storage, self.values.storage_offset(), shape, self.values.stride())

    def add_gradient(self, gradient: Tensor, start: int, own_stop: int) -> Tensor:
        """Add the gradient [B, heads, stop, D] of what a chunk has read. Return that of the chunk's own values."""
        if self.gradient is None:
            # Many chunks add to it, and a sum in half precision would lose the small ones.
            dtype = torch.float32 if gradient.dtype in HALF_TYPES else gradient.dtype
            shape = *gradient.shape[:-2], self._length, gradient.shape[-1]
            self.gradient = gradient.new_zeros(shape, dtype=dtype)
        chunk_gradient = gradient[..., start:, :].to(self.gradient.dtype, copy=True)
        chunk_gradient[..., : own_stop - start, :] += self.gradient[..., start:own_stop, :]
        self.gradient[..., :start, :] += gradient[..., :start, :]
        return chunk_gradient.to(gradient.dtype)


class _Append(torch.autograd.Function):
    """Append the keys or values of a chunk to those of earlier chunks, and pass the gradient of the latter on."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, tensor: KeptTensor, running: "RunningChunk") -> Tensor:  # pyright: ignore
        ctx.tensor, ctx.running, ctx.chunk = tensor, running, running.chunk
        running.is_half |= values.dtype in HALF_TYPES
        return tensor.write(running.chunk.start, values, is_again=running.num_forwards > 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        ctx.running.note_backward(ctx.chunk, ctx.tensor)
        return ctx.tensor.add_gradient(gradient, ctx.chunk.start, ctx.chunk.stop), None, None


class RunningChunk:
    """The chunk that runs now, and what its sample has kept."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.num_forwards = 0
        self.is_half = False  # keys are of half precision, as under autocast
        self.has_graph = False  # keys or values carry a gradient
        self._first_position: int | None = None
        # By number of a chunk: ids of the kept tensors that its backward has reached.
        self._received: dict[int, set[int]] = {}

    def note_backward(self, chunk: Chunk, tensor: KeptTensor) -> None:
        """Note that the backward of a chunk has reached a kept tensor. Raises `LossContractError` for a second time."""
        received = self._received.setdefault(chunk.number, set())
        if id(tensor) in received:
            raise LossContractError(
                "a sample is cut into chunks and the backward of a chunk runs twice; let the loss call the model once"
            )
        received.add(id(tensor))

    def check_inputs(self, mask: Any, positions: Any) -> None:
        """Raise `LossContractError` for a mask that hides tokens, and for positions that begin anew."""
        where = f"sample {self.chunk.sample} is cut into chunks and the loss gives the model"
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all())):
            raise LossContractError(f"{where} an attention_mask that hides tokens; give none, or raise the limit")
        if positions is None:
            return
        first_position = int(positions.flatten()[0]) - self.chunk.start
        if self._first_position is None:
            self._first_position = first_position
        if first_position != self._first_position or not bool((positions.diff(dim=-1) == 1).all()):
            raise LossContractError(
                f"{where} position_ids that begin anew inside of the sample, as those that count the tokens of a "
                "microbatch; give none, or put position_ids into the samples"
            )

    def check_backward(self) -> None:
        """Raise `LossContractError` if the backward of this chunk has left out a layer that the last chunk reached."""
        if not self.has_graph:
            return
        last = max(self._received, default=self.chunk.number)
        if not self._received or self._received[last] != self._received.get(self.chunk.number):
            raise LossContractError(
                f"sample {self.chunk.sample} is cut into chunks and the total of chunk {self.chunk.number} does not "
                "depend on the model's output as that of the other chunks does, so that its gradient would be lost; "
                "return a total that depends on the logits where a chunk has no target too"
            )


class LongSample:
    """The keys and values of one sample in all layers, as a cache of transformers."""

    def __init__(self, chunk: Chunk) -> None:
        self.running = RunningChunk(chunk)
        self.cache: Any = _make_cache(self.running)

    @contextlib.contextmanager
    def watched(self, model: nn.Module) -> Generator[None]:
        """Give the model the cache whenever it is called. Raises `LossContractError` for a call that does not fit."""

        def extend(_: nn.Module, placed: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            self.running.num_forwards += 1
            self.running.check_inputs(named.get(MASK), named.get(POSITIONS))
            if len(placed) > 1 or named.get("past_key_values") is not None:
                raise LossContractError(
                    "a sample is cut into chunks and the loss gives the model past_key_values, or more than the tokens "
                    "by place; give the other inputs by name"
                )
            # A long sample hides no token, and a mask of the chunk alone would be too short for the earlier tokens.
            return placed, named | {MASK: None, "past_key_values": self.cache, "use_cache": True}

        hook = inner_decoder(model).register_forward_pre_hook(extend, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def enter(self, chunk: Chunk) -> None:
        """Let the next forward be that of ``chunk``."""
        self.running.chunk, self.running.num_forwards = chunk, 0

    def check_forward(self) -> None:
        """Raise `LossContractError` unless the loss has called the model."""
        if not self.running.num_forwards:
            raise LossContractError(
                "a sample is cut into chunks and the loss does not call the model that it is given; call it in the loss"
            )


def inner_decoder(model: nn.Module) -> nn.Module:
    """Return the module of a transformers model that makes and reads keys and values."""
    inner: Any = with_config(model)
    if hasattr(inner, "get_base_model"):  # of peft
        inner = inner.get_base_model()
    return cast(nn.Module, getattr(inner, "base_model", inner))


def _make_cache(running: RunningChunk) -> Any:
    """Return a cache of transformers that keeps keys and values for all tokens, and their gradient."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    class ChunkLayer(CacheLayerMixin):
        """Keys and values of one layer, in the order of the tokens."""

        is_sliding = False  # a window is hidden by the mask, which counts positions from the sample's first token
        is_compileable = False

        def __init__(self) -> None:
            super().__init__()
            self.is_initialized = True
            self._keys, self._values = KeptTensor(running.chunk.length), KeptTensor(running.chunk.length)

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            """Do nothing: memory is reserved with the first chunk."""

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            """Return the keys and values of all tokens up to the end of the chunk, [B, heads, stop, D]."""
            running.has_graph |= key_states.requires_grad or value_states.requires_grad
            keys: Any = _Append.apply(key_states, self._keys, running)
            values: Any = _Append.apply(value_states, self._values, running)
            return keys, values

        def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
            """Return the number of tokens up to the end of the chunk, and the first of them."""
            num_new = query_length if isinstance(query_length, int) else len(query_length)
            return running.chunk.start + num_new, 0

        def get_seq_length(self, *_: Any) -> int:
            """Return the number of tokens before the chunk."""
            return running.chunk.start

        def get_max_length(self) -> int:
            """Return -1: the cache has no limit."""
            return -1

        get_max_cache_shape = get_max_length

    return Cache(layer_class_to_replicate=ChunkLayer)


def check_chunks(models: Sequence[nn.Module], device: torch.device) -> None:
    """Raise `PlanError` where a model has other logits or another gradient for a sample in chunks than for all of it.

    The model runs on a few tokens, without dropout. No parameter and no ``p.grad`` is changed.
    """
    model = models[0]
    inner: Any = with_config(model)
    reason = None
    if len(models) > 1 or not hasattr(inner, "base_model"):
        reason = "the model is not one model of transformers, whose keys and values can be kept; give such a model"
    elif original_of(inner) is not inner or is_compiled(inner):
        reason = "the model is compiled, which a cache of its own is not tried with; give it uncompiled"
    elif any(getattr(module, "gradient_checkpointing", False) for module in inner.modules()):
        reason = (
            "the model recomputes activations (gradient_checkpointing_enable), with which transformers keeps no keys "
            "and values; turn it off, a chunk takes less memory than a whole sample"
        )
    elif (cause := next((cause for cause, _ in find_mixing_causes(inner)), None)) is not None:
        reason = f"{cause}, of which a chunk sees a part; give another model"
    elif not is_causal(inner, with_experts=True):
        reason = "the model is not known to be causal, and earlier tokens would read later ones; give a causal model"
    if reason is None:
        try:
            with torch.enable_grad(), torch.autocast(device.type, enabled=False):
                reason = _describe_difference(inner, device)
        except MegabatchError:
            raise
        except Exception as error:  # the model may raise anything
            reason = f"the model does not run in chunks ({in_one_line(error)}); give one that keeps keys and values"
    if reason is not None:
        raise PlanError(f"InsideSamples is given and {reason}, or leave InsideSamples out")


def _describe_difference(model: nn.Module, device: torch.device) -> str | None:
    """Return what differs between a sample in chunks and the whole sample, or None."""
    vocab_size = model.get_input_embeddings().num_embeddings  # pyright: ignore
    tokens = torch.arange(3, 3 + TRIAL_TOKENS, device=device)[None] % vocab_size  # [1, T]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        logits = model(input_ids=tokens, use_cache=False).logits  # [1, T, V]
        generator = torch.Generator().manual_seed(0)
        direction = torch.rand(logits.shape, generator=generator).to(logits)
        gradients = torch.autograd.grad((logits * direction).sum(), parameters, materialize_grads=True)
        chunk_logits, chunk_gradients = _run_in_chunks(model, tokens, direction, parameters)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not _are_close(logits.detach(), chunk_logits):
        return "the model has other logits for a sample in chunks than for all of it (a state, or a convolution)"
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    for gradient, chunk_gradient in zip(gradients, chunk_gradients, strict=True):
        if not _are_close(gradient, chunk_gradient, largest):
            return "the model has another gradient for a sample in chunks than for all of it"
    return None


def _run_in_chunks(
    model: nn.Module, tokens: Tensor, direction: Tensor, parameters: Sequence[nn.Parameter]
) -> tuple[Tensor, list[Tensor]]:
    """Return the logits [1, T, V] and the gradients of a sample that runs in chunks."""
    chunks = find_chunks(0, TRIAL_TOKENS, TRIAL_CHUNK)
    sample = LongSample(chunks[0])
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    outputs: list[Tensor] = []
    with sample.watched(model):
        with torch.no_grad():
            for chunk in chunks[:-1]:
                sample.enter(chunk)
                model(input_ids=tokens[:, chunk.start : chunk.stop + OVERLAP])
                sample.check_forward()
        for chunk in reversed(chunks):
            sample.enter(chunk)
            logits = model(input_ids=tokens[:, chunk.start : chunk.stop + OVERLAP]).logits
            own_logits = logits[:, : chunk.stop - chunk.start]
            total = (own_logits * direction[:, chunk.start : chunk.stop]).sum()
            gradients = torch.autograd.grad(total, parameters, materialize_grads=True)
            for total_gradient, gradient in zip(sums, gradients, strict=True):
                total_gradient += gradient
            outputs.append(own_logits.detach())
    return torch.cat(outputs[::-1], dim=1), sums


def _are_close(expected: Tensor, tensor: Tensor, largest: float = 0.0) -> bool:
    """Return True if two tensors differ by rounding only, far below the effect of a token.

    A gradient that is zero but for rounding, as of a router that chooses one expert, is measured by the ``largest``.
    """
    tolerance = max(torch.finfo(expected.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
    scale = max(float(expected.abs().max()), tolerance * largest)
    return float((expected - tensor).abs().max()) <= tolerance * scale

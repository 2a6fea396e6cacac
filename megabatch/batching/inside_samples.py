"""InsideSamples: a sample that is longer than a microbatch runs in chunks, exactly.

A token of a causal decoder reads earlier tokens through their keys and values, and through nothing else. The chunks of
a sample therefore run forward without a graph first, which leaves the keys and values of all layers. Then each chunk
runs forward and backward, the last one first. Its backward adds the gradient of the keys and values that it has read
to that of the chunks before it, which include it in their own backward. Memory holds the keys and values of the whole
sample, their gradient, and the activations of one chunk. The cost is one more forward.
"""

import contextlib
import inspect
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megabatch.batching.choice import choose_batching
from megabatch.core.right_padding import pad_right
from megabatch.core.samples import HALF_TYPES, Batching, Collate
from megabatch.errors import LossContractError, PlanError, in_one_line
from megabatch.inspection.mixing_causes import find_mixing_causes
from megabatch.inspection.model_facts import MASK, POSITIONS, with_config
from megabatch.torch_private.autograd import count_writes
from megabatch.torch_private.loss_nodes import IGNORED_LABEL
from megabatch.torch_private.module_members import is_compiled, original_of

OVERLAP = 1  # a chunk ends with the token that its last position predicts, whose own loss the next chunk counts
TRIAL_TOKENS, TRIAL_CHUNK = 12, 5
KEPT_LAYERS = (  # layers of a cache of transformers, by class, that chunks are known to run with
    "DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer", "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer",
)  # fmt: skip


class InsideSamples(Batching):
    """Cut samples that are longer than the limit: ``GradientAccumulator(model, batching=InsideSamples(), ...)``.

    Samples of at most ``max_microbatch_tokens`` are padded and grouped as without it. A longer sample runs as several
    microbatches, its chunks, each of at most so many tokens. Chunks overlap by one token, so a loss that predicts the
    next token counts each target once.

    The model is a causal model of transformers that keeps keys and values in a cache. A trial on a few tokens compares
    its logits and its gradient with those of the uncut sample when you make the accumulator.

    The loss must call the model once, be a sum over next-token targets, and say by ``weigh`` how its weight is
    counted. Every tensor of a long sample has its tokens in dim 0. Use a plain model, DistributedDataParallel or FSDP2.
    Under FSDP2 each chunk gathers parameters once more than a microbatch; ``sync="gather_once"`` gathers once per call.

    Args:
        collate: Makes a microbatch of a list of samples and chunks, which are mappings of tensors. None pads them.
    """

    def __init__(self, collate: Collate | None = None) -> None:
        self._inner = choose_batching(collate, None)
        super().__init__(pad_right if collate is None else collate)

    def for_microbatches(self) -> Batching:
        """Return the batching of samples and chunks."""
        return choose_batching(None, self._inner)

    def new_planner(self, usual: Any) -> Any:
        """Return the planner of chunks."""
        from megabatch.batching.chunk_planner import ChunkPlanner

        return ChunkPlanner

    def check_model(self, wrapper: Any, limits: tuple[int | None, int | None]) -> None:
        """Compare chunks of a few tokens with the uncut sample, on the model."""
        from megabatch.batching.chunk_planner import check_settings

        check_settings(wrapper, limits[1])


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
    num_chunks = 1 if length <= max_tokens else -(-(length - OVERLAP) // stride)
    stops = [stride * (index + 1) for index in range(num_chunks - 1)] + [length]
    starts = [0, *stops[:-1]]
    return [Chunk(sample, number, *ends, length) for number, ends in enumerate(zip(starts, stops, strict=True))]


def cut(sample: Mapping[str, Any], chunk: Chunk) -> dict[str, Tensor]:
    """Return the tensors of one chunk. Raises `PlanError` for a tensor without a dim of tokens, and for a mask."""
    pieces: dict[str, Tensor] = {}
    for name, value in sample.items():
        try:
            tensor = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise PlanError(
                f"sample {chunk.sample} is cut into chunks and {name!r} is a {type(value).__name__}, which has no "
                "tokens; leave it out of the sample"
            ) from None
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
        running.note_forward(tensor)
        running.is_half |= values.dtype in HALF_TYPES
        return tensor.write(running.chunk.start, values, is_again=running.num_forwards > 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        ctx.running.note_backward(ctx.chunk, ctx.tensor)
        # A loss may leave out the last token of the sample, which no token reads.
        stop = gradient.shape[-2] if ctx.chunk.is_last else ctx.chunk.stop
        return ctx.tensor.add_gradient(gradient, ctx.chunk.start, stop), None, None


class RunningChunk:
    """The chunk that runs now, and what its sample has kept."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.num_forwards = 0
        self.is_half = False  # keys are of half precision, as under autocast
        self.has_graph = False  # keys or values carry a gradient
        self.has_states = False  # states too are kept, and the output hands on their gradient
        self.source: int | None = None  # id of what the backward of this chunk must reach, if its output has a gradient
        self._written: set[int] = set()  # ids of the kept tensors that the forward of this chunk has written
        self._num_written = 0  # of them in the first chunk that ran
        self._checked: list[tuple[Tensor, int]] = []  # inputs that the host has checked, and their writes until then
        self._first_position: int | None = None
        # By number of a chunk: ids of the kept tensors that its backward has reached.
        self._received: dict[int, set[int]] = {}

    def enter(self, chunk: Chunk) -> None:
        """Let the next forward be that of ``chunk``."""
        self.chunk, self.num_forwards, self.source = chunk, 0, None
        self._written.clear()
        self._checked.clear()

    def note_forward(self, tensor: object) -> None:
        """Note that the forward of a chunk has written a kept tensor or state."""
        self._written.add(id(tensor))

    def note_backward(self, chunk: Chunk, tensor: object) -> None:
        """Note that the backward of a chunk has reached a kept tensor. Raises `LossContractError` for a second time."""
        received = self._received.setdefault(chunk.number, set())
        if id(tensor) in received:
            raise LossContractError(
                "a sample is cut into chunks and the backward of a chunk runs twice; let the loss call the model once"
            )
        received.add(id(tensor))

    def trust(self, on_host: Mapping[str, Any], moved: Mapping[str, Any]) -> None:
        """Check the mask and the positions of a microbatch on the host, so that none is read on a device."""
        self.check_inputs(on_host.get(MASK), on_host.get(POSITIONS))
        inputs = [value for name in (MASK, POSITIONS) if isinstance(value := moved.get(name), Tensor)]
        self._checked += [(value, count_writes(value)) for value in inputs]

    def check_tokens(self, num_tokens: int) -> None:
        """Raise `LossContractError` unless the model is given all tokens of a chunk, or all but the last."""
        num_all = min(self.chunk.stop + OVERLAP, self.chunk.length) - self.chunk.start
        if num_tokens != num_all and (self.has_states or num_tokens != num_all - OVERLAP):
            raise LossContractError(
                f"a sample is cut into chunks and the loss gives the model {num_tokens} tokens of a microbatch of "
                f"{num_all}; give it all of them, and leave out the last logits"
            )

    def check_inputs(self, mask: Any, positions: Any) -> None:
        """Raise `LossContractError` for a mask that hides tokens, and for positions that begin anew."""
        where = f"sample {self.chunk.sample} is cut into chunks and the loss gives the model"
        is_known = mask is None or self._is_checked(mask)
        if not is_known and not (isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all())):
            raise LossContractError(f"{where} an attention_mask that hides tokens; give none, or raise the limit")
        if positions is None or self._is_checked(positions):
            return
        first_position = int(positions.flatten()[0]) - self.chunk.start
        if self._first_position is None:
            self._first_position = first_position
        if first_position != self._first_position or not bool((positions.diff(dim=-1) == 1).all()):
            raise LossContractError(
                f"{where} position_ids that begin anew inside of the sample, as those that count the tokens of a "
                "microbatch; give none, or put position_ids into the samples"
            )

    def _is_checked(self, value: Any) -> bool:
        return any(value is tensor and count_writes(value) == writes for tensor, writes in self._checked)

    def check_forward(self) -> None:
        """Raise `LossContractError` unless the loss has called the model, and the model has kept its keys."""
        if not self.num_forwards:
            raise LossContractError(
                "a sample is cut into chunks and the loss does not call the model that it is given; call it in the loss"
            )
        self._num_written = self._num_written or len(self._written)
        if not self._written or len(self._written) != self._num_written:
            raise LossContractError(
                f"sample {self.chunk.sample} is cut into chunks and the model has left out keys and values that are "
                "kept for it, as where it recomputes activations (gradient_checkpointing_enable); turn that off"
            )

    def check_backward(self) -> None:
        """Raise `LossContractError` if the backward of this chunk has left out a layer that the last chunk reached."""
        received = self._received.get(self.chunk.number, set())
        is_left_out = self.source is not None and self.source not in received
        if self.has_graph and not self.has_states:
            is_left_out = not received or self._received[max(self._received)] != received
        if is_left_out:
            raise LossContractError(
                f"sample {self.chunk.sample} is cut into chunks and the total of chunk {self.chunk.number} does not "
                "depend on the model's output as that of the other chunks does, so that its gradient would be lost; "
                "return a total that depends on the logits where a chunk has no target too"
            )


class LongSample:
    """The keys, values and states of one sample in all layers, as a cache of transformers."""

    def __init__(self, chunk: Chunk, model: nn.Module) -> None:
        from megabatch.batching.chunk_states import ChunkStates  # which imports torch's compiler

        self.running = RunningChunk(chunk)
        self.states = ChunkStates(self.running)
        self._decoder = inner_decoder(model)
        # The classes of the cache are cycles, which hold what they refer to until Python collects garbage.
        self.cache: Any = _make_cache(self.running, weakref.proxy(self.states), with_config(model).config)
        self.running.has_states = bool(self.states.kept)
        takes = inspect.signature(self._decoder.forward).parameters
        self._name = "cache_params" if "cache_params" in takes else "past_key_values"  # of Mamba
        self._takes_positions = POSITIONS in takes

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """Give the model the cache whenever it is called. Raises `LossContractError` for a call that does not fit."""
        from megabatch.batching.chunk_attention import lean_attention  # which imports transformers

        def extend(_: nn.Module, placed: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            self.running.num_forwards += 1
            self.running.check_inputs(named.get(MASK), named.get(POSITIONS))
            if len(placed) > 1 or named.get(self._name) is not None:
                raise LossContractError(
                    "a sample is cut into chunks and the loss gives the model past_key_values, or more than the tokens "
                    "by place; give the other inputs by name"
                )
            tokens: Any = next(
                value
                for value in (*placed, named.get("input_ids"), named.get("inputs_embeds"))
                if isinstance(value, Tensor)
            )
            self.running.check_tokens(tokens.shape[1])
            # A long sample hides no token, and a mask of the chunk alone would be too short for the earlier tokens.
            named = named | {MASK: None, self._name: self.cache, "use_cache": True}
            if not self.states.kept:
                return placed, named
            if self._takes_positions and named.get(POSITIONS) is None:  # Bamba would count from 0 in each chunk
                positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
                named[POSITIONS] = positions + self.running.chunk.start
            return self.states.shorten(placed, named)

        hooks = [self._decoder.register_forward_pre_hook(extend, with_kwargs=True)]
        if self.states.kept:
            hooks.append(self._decoder.register_forward_hook(self.states.lengthen))
        try:
            with lean_attention():
                yield
        finally:
            for hook in hooks:
                hook.remove()


def inner_decoder(model: nn.Module) -> nn.Module:
    """Return the module of a transformers model that makes and reads keys and values."""
    inner: Any = with_config(model)
    if hasattr(inner, "get_base_model"):  # of peft
        inner = inner.get_base_model()
    base = getattr(inner, "base_model", inner)
    return cast(nn.Module, getattr(base, "decoder", base))  # which OPT calls without its base model


def list_layers(config: Any) -> list[Any]:
    """Return the layers of the cache that a model of transformers makes for itself."""
    from transformers.cache_utils import DynamicCache

    return DynamicCache(config=config).layers


def _make_cache(running: RunningChunk, states: Any, config: Any) -> Any:
    """Return a cache of transformers that keeps keys and values for all tokens, states, and their gradients."""
    from transformers import cache_utils
    from transformers.cache_utils import Cache, CacheLayerMixin

    from megabatch.batching.chunk_states import KeepsStates

    class ChunkLayer(CacheLayerMixin):
        """Keys and values of one layer, in the order of the tokens."""

        is_sliding = False  # a window is hidden by the mask, which counts positions from the sample's first token
        is_compileable = False

        def __init__(self) -> None:
            CacheLayerMixin.__init__(self)
            self.is_initialized = True
            self._keys, self._values, self._indices = (KeptTensor(running.chunk.length) for _ in range(3))

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            """Do nothing: memory is reserved with the first chunk."""

        @torch.compiler.disable  # a compiled layer would be compiled anew for each state of this cache
        def update(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's type
            self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
        ) -> tuple[Tensor, Tensor]:
            """Return the keys and values of all tokens up to the end of the chunk, [B, heads, stop, D]."""
            running.has_graph |= key_states.requires_grad or value_states.requires_grad
            keys: Any = _Append.apply(key_states, self._keys, running)
            values: Any = _Append.apply(value_states, self._values, running)
            return keys, values

        @torch.compiler.disable
        def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
            """Return the keys [B, stop, D] by which sparse attention chooses tokens."""
            keys: Any = _Append.apply(indexer_key_states[:, None], self._indices, running)
            return keys[:, 0]

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

    has_state = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())
    layers = list_layers(config)
    if not any(isinstance(layer, has_state) for layer in layers):
        return Cache(layer_class_to_replicate=ChunkLayer)

    class StateCache(Cache):
        """A cache some of whose layers count no tokens."""

        def get_seq_length(self, *_: Any, **__: Any) -> int:
            """Return the number of tokens before the chunk."""
            return running.chunk.start

        def get_mask_sizes(self, query_length: int, *_: Any, **__: Any) -> tuple[int, int]:
            """Return the number of tokens up to the end of the chunk, and the first of them."""
            return running.chunk.start + query_length, 0

    class StateLayer(KeepsStates, cache_utils.LinearAttentionLayer):  # pyright: ignore
        """States of one layer."""

        is_compileable = False

        def __init__(self, num_states: int) -> None:
            self.keep_states(states, num_states)

    class HybridLayer(KeepsStates, ChunkLayer, cache_utils.LinearAttentionAndFullAttentionLayer):  # pyright: ignore
        """States of one layer, and its keys and values."""

        def __init__(self, num_states: int) -> None:
            ChunkLayer.__init__(self)
            self.keep_states(states, num_states)

    made: list[Any] = []
    for layer in layers:
        if not isinstance(layer, has_state):
            made.append(ChunkLayer() if isinstance(layer, CacheLayerMixin) else layer)
        else:
            kind = HybridLayer if isinstance(layer, CacheLayerMixin) else StateLayer
            made.append(kind(cast(Any, layer).number_of_states))
    return StateCache(layers=made)


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
    elif inner.config.is_encoder_decoder or any(_reads_later_tokens(module) for module in inner.modules()):
        reason = (
            f"{inner.config.model_type} has an encoder or layers in which tokens read later ones; give a causal model"
        )
    elif unknown := sorted({type(layer).__name__ for layer in list_layers(inner.config)} - {*KEPT_LAYERS}):
        reason = (
            f"the cache of {inner.config.model_type} has layers of {unknown[0]}, which is not known; give another model"
        )
    if reason is None:
        try:
            with torch.enable_grad(), torch.autocast(device.type, enabled=False):
                reason = _describe_difference(inner, device)
        except LossContractError:
            reason = (
                f"{inner.config.model_type} does not keep all that tokens read of earlier ones in its cache, or does "
                "not go on from it; give another model"
            )
        except Exception as error:  # the model may raise anything
            reason = f"the model does not run in chunks ({in_one_line(error)}); give one that keeps keys and values"
    if reason is not None:
        raise PlanError(f"InsideSamples is given and {reason}, or leave InsideSamples out")


def _reads_later_tokens(module: nn.Module) -> bool:
    """Return True for a layer of attention that says so."""
    return vars(module).get("is_causal") is False


def _describe_difference(model: Any, device: torch.device) -> str | None:
    """Return what differs between a sample in chunks and the whole sample, or None."""
    vocab_size = model.get_input_embeddings().num_embeddings  # pyright: ignore
    tokens = torch.arange(3, 3 + TRIAL_TOKENS, device=device)[None] % vocab_size  # [1, T]
    direction = torch.rand(TRIAL_TOKENS, vocab_size, generator=torch.Generator().manual_seed(0))  # [T, V]
    # Tokens of the first half reach the total through their keys and values alone.
    direction[: TRIAL_TOKENS // 2] = 0

    def call(chunk: Chunk) -> tuple[Tensor, Tensor]:
        logits = model(input_ids=tokens[:, chunk.start : chunk.stop + OVERLAP], use_cache=False).logits[0]  # [T, V]
        logits = logits[: chunk.stop - chunk.start]
        weights = direction[chunk.start : chunk.stop, : logits.shape[1]].to(logits)
        return (logits * weights).sum(), logits.detach()

    trial = ChunkTrial(model)
    whole, chunks = trial.run(call, TRIAL_TOKENS, TRIAL_CHUNK)
    name = model.config.model_type
    if not are_close(whole.outputs[0], torch.cat(chunks.outputs)):
        kinds = sorted({type(layer).__name__ for layer in list_layers(model.config)})
        return f"the model has other logits for a sample in chunks than for all of it ({name}, {', '.join(kinds)})"
    if not bool(whole.gradient[: TRIAL_TOKENS // 2].any()):
        return "the output of the model does not depend on earlier tokens (a projection of zeros?), which says nothing"
    if not are_close(whole.gradient, chunks.gradient):
        return f"the model has another gradient for a sample in chunks than for all of it ({name})"
    return None


class TrialRun(NamedTuple):
    """A function on a few tokens, whole or in chunks."""

    outputs: list[Any]  # of each chunk
    gradient: Tensor  # of the noise, [T, D]


class ChunkTrial:
    """Runs a function on a few tokens, whole and in chunks, without dropout.

    Noise is added to the embeddings, and its gradient stands for that of the parameters: each token reaches the total
    through its own output and through the keys and values that later chunks read. The noise also makes a policy
    another one than the old, where a loss of both is no sum over tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._table: nn.Module = with_config(model).get_input_embeddings()
        self._noise: Tensor | None = None  # [T, D], drawn for the first output of the table
        self._start = 0  # token with which the forward begins
        self.is_half = any(parameter.dtype in HALF_TYPES for parameter in model.parameters())

    def run(
        self, function: Callable[[Chunk], tuple[Tensor | None, Any]], num_tokens: int, max_tokens: int
    ) -> tuple[TrialRun, TrialRun]:
        """Return the outputs and gradients of all tokens at once, and in chunks.

        Args:
            function: Calls the model for the tokens of a chunk. Returns a total, if there is one, and an output.
            num_tokens: Tokens of the sample.
            max_tokens: Tokens of a chunk.
        """
        chunks = find_chunks(0, num_tokens, max_tokens)
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        hook = self._table.register_forward_hook(self._add_noise)
        try:
            with torch.enable_grad():
                output, gradient = self._run_one(function, Chunk(0, 0, 0, num_tokens, num_tokens))
                whole = TrialRun([output], gradient)
                return whole, self._run_chunks(function, chunks, is_reached=bool(gradient.any()))
        finally:
            hook.remove()
            for module, mode in modes.items():
                module.training = mode

    def _run_chunks(
        self, function: Callable[[Chunk], tuple[Tensor | None, Any]], chunks: list[Chunk], *, is_reached: bool
    ) -> TrialRun:
        sample = LongSample(chunks[0], self._model)
        outputs: list[Any] = []
        sums = 0.0
        with sample.watched():
            for chunk in chunks[:-1]:
                self._start = chunk.start
                sample.running.enter(chunk)
                with torch.no_grad():
                    function(chunk)
                sample.running.check_forward()
            for chunk in reversed(chunks):
                sample.running.enter(chunk)
                output, gradient = self._run_one(function, chunk, sample.states)
                outputs.append(output)
                sums = gradient + sums
                if is_reached:
                    sample.running.check_backward()
        self.is_half |= sample.running.is_half
        return TrialRun(outputs[::-1], cast(Tensor, sums))

    def _run_one(
        self, function: Callable[[Chunk], tuple[Tensor | None, Any]], chunk: Chunk, states: Any = None
    ) -> tuple[Any, Tensor]:
        """Return the output of one chunk, and the gradient of the noise on all tokens, [T, D]."""
        self._start = chunk.start
        total, output = function(chunk)
        if self._noise is None:
            return output, torch.zeros(chunk.length, 1, device="cpu")
        if total is None or not total.requires_grad:
            return output, torch.zeros_like(self._noise)
        leaves = [] if states is None else states.leaves()
        # None for a leaf that nothing has read.
        gradients: Any = torch.autograd.grad(total, [self._noise, *leaves], allow_unused=True)
        gradient, *of_leaves = gradients
        for leaf, of_leaf in zip(leaves, of_leaves, strict=True):
            leaf.grad = of_leaf
        return output, torch.zeros_like(self._noise) if gradient is None else gradient

    def _add_noise(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        """Add the noise of the running chunk to the output [B, T, D] of the table."""
        if self._noise is None:
            drawn = torch.randn(output.shape[1:], generator=torch.Generator().manual_seed(0), device="cpu")
            self._noise = (drawn.to(output) * output.detach().std()).requires_grad_()
        return output + self._noise[self._start : self._start + output.shape[1]]


def are_close(expected: Tensor, tensor: Tensor, largest: float = 0.0) -> bool:
    """Return True if two tensors differ by rounding only, far below the effect of a token.

    A gradient that is zero but for rounding, as of a router that chooses one expert, is measured by the ``largest``.
    """
    tolerance = max(torch.finfo(expected.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
    scale = max(float(expected.abs().max()), tolerance * largest)
    return float((expected - tensor).abs().max()) <= tolerance * scale

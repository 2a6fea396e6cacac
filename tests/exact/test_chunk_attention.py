"""Results of a chunk's attention and its memory for the backward, on models whose heads share keys."""

import contextlib
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megabatch import GradientAccumulator, losses
from megabatch.batching import InsideSamples, chunk_attention
from megabatch.batching.inside_samples import LongSample, find_chunks
from megabatch.verification.float64_copy import Float64WithoutDropout
from tests.exact.test_inside_samples import BOUND, error, gradients, run, texts, uncut

LIMIT, WINDOW = 17, 12
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": WINDOW}, "gemma3_text": {"sliding_window": WINDOW},
    "llama4_text": {
        "attention_chunk_size": WINDOW, "intermediate_size_mlp": 24, "floor_scale": WINDOW, "num_local_experts": 2,
        "num_experts_per_tok": 1, "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    },
}  # fmt: skip


def make(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | KINDS[kind] | more)
    return AutoModelForCausalLM.from_config(config).double().train()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_share_keys_are_exact(kind: str, attention: str) -> None:
    with Float64WithoutDropout():
        model = make(kind, attn_implementation=attention)
        samples = texts((41, 9))
        expected = uncut(model, samples)
        for limit in (2, LIMIT, 40):  # one token a chunk, and windows longer and shorter than a chunk
            model.zero_grad()
            assert error(run(model, samples, limit=limit), expected) < BOUND, limit


@contextlib.contextmanager
def noting(saved: dict[int, tuple[int, Tensor]]) -> Generator[None]:
    """Note the memory behind all tensors that a forward keeps, once each."""

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def bytes_of_last_chunk(model: Any, length: int) -> int:
    """Return the bytes that the last chunk keeps, of which the keys and values of the sample are a part."""
    ids = torch.randint(1, 60, (1, length))
    chunks = find_chunks(0, length, LIMIT)
    sample, saved = LongSample(chunks[-1], model), dict[int, tuple[int, Tensor]]()
    with sample.watched():
        for chunk in chunks:
            sample.running.enter(chunk)
            with torch.set_grad_enabled(chunk.is_last), noting(saved) if chunk.is_last else contextlib.nullcontext():
                model(ids[:, chunk.start : chunk.stop + 1].clone())
    return sum(num_bytes for num_bytes, _ in saved.values())


def test_each_earlier_token_costs_its_keys_its_values_and_a_column_of_one_mask() -> None:
    model = make("llama")
    short, long = (bytes_of_last_chunk(model, 16 * num_chunks + 1) for num_chunks in (4, 12))
    keys_and_values = SIZES["num_hidden_layers"] * 2 * SIZES["num_key_value_heads"] * SIZES["head_dim"]
    assert long - short == 16 * 8 * 8 * (keys_and_values + LIMIT)  # float64


class Attention(TorchFunctionMode):
    """Notes the shapes of keys that torch's attention is given."""

    def __init__(self) -> None:
        super().__init__()
        self.key_shapes: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            self.key_shapes.append(tuple(args[1].shape))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kind", ["mistral", "llama4_text"])
def test_a_window_reads_no_token_before_it(kind: str) -> None:
    model = make(kind)
    gradient = GradientAccumulator(model, max_microbatch_tokens=LIMIT, batching=InsideSamples())
    gradient.forward_backward(texts((40,)), losses.next_token)  # which tries the loss
    with Attention() as attention:
        gradient.forward_backward(texts((200,)), losses.next_token)
    most = max(shape[2] for shape in attention.key_shapes[:: 1 if kind == "mistral" else 3])
    assert most == WINDOW - 1 + LIMIT
    assert max(shape[2] for shape in attention.key_shapes) == (most if kind == "mistral" else 200)
    assert {shape[1] for shape in attention.key_shapes if shape[2] > LIMIT} == {SIZES["num_key_value_heads"]}


# Masks, one by one.


def sinks(_: Any, __: Any, query: Any, key: Any) -> Any:
    """Show the first token beside a window."""
    return (key == 0) & (query >= key)


def odd(_: Any, __: Any, query: Any, key: Any) -> Any:
    return (key % 2 == 1) | (query == key)


MASKS: dict[str, tuple[Any, dict[str, Any], tuple[int, bool] | None]] = {  # and the pattern that is noted
    "causal": (create_causal_mask, {}, (0, True)),
    "a window": (create_sliding_window_causal_mask, {}, (32 - WINDOW + 1, False)),
    "a window and a first token": (create_sliding_window_causal_mask, {"or_mask_function": sinks}, None),
    "every other token": (create_causal_mask, {"and_mask_function": odd}, None),
    "a window of a mask with holes": (create_sliding_window_causal_mask, {"attention_mask": "holes"}, None),
    "a mask with holes": (create_causal_mask, {"attention_mask": "holes"}, None),
}


def test_a_mask_that_a_model_has_written_to_is_read() -> None:
    model = make("mistral")
    module, (query, key) = model.model.layers[0].self_attn, (torch.randn(1, n, 20, 8).double() for n in (8, 2))
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril_()
    chunk_attention._patterns[mask] = chunk_attention.Pattern(0, True, chunk_attention.count_writes(mask))
    before, _ = chunk_attention.attend(module, query, key, key, mask)
    mask[..., 3] = False
    mask[..., 3, 3] = True
    after, _ = chunk_attention.attend(module, query, key, key, mask)
    assert not torch.allclose(before, after)
    assert torch.equal(after, sdpa_attention_forward(module, query, key, key, mask)[0])


@pytest.mark.parametrize("name", MASKS)
def test_attention_is_that_of_transformers(name: str) -> None:
    make_mask, options, pattern = MASKS[name]
    model = make("mistral")
    chunks = find_chunks(0, 60, LIMIT)[:3]
    sample = LongSample(chunks[0], model)
    if "attention_mask" in options:
        options = {"attention_mask": (torch.arange(49)[None] % 5 != 3).long()}
    query, key, value = (torch.randn(1, heads, num, 8).double() for heads, num in ((8, 17), (2, 49), (2, 49)))
    with sample.watched(), torch.no_grad():
        for chunk in chunks:
            sample.running.enter(chunk)
            model(torch.ones(1, LIMIT, dtype=torch.long))
        inputs = {"inputs_embeds": torch.zeros(1, 17, 64).double(), "past_key_values": sample.cache}
        mask = make_mask(config=model.config, **{"attention_mask": None, **inputs, **options})
        attention, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](model.model.layers[0].self_attn, query, key, value, mask)
        assert mask is not None
        noted = chunk_attention._pattern_of(mask)
        assert (noted and noted[:2]) == pattern
    expected, _ = sdpa_attention_forward(model.model.layers[0].self_attn, query, key, value, mask)
    assert expected.shape == attention.shape
    assert torch.allclose(attention, expected, rtol=0, atol=1e-14)


def test_a_device_with_kernels_for_causal_order_is_given_no_mask() -> None:
    """A device without contents stands for one that is not the CPU."""
    with torch.device("meta"):
        query, key = torch.randn(1, 8, LIMIT, 8), torch.randn(1, 2, 40, 8)
        mask = torch.ones(1, 1, LIMIT, 40, dtype=torch.bool)
    module = make("llama").model.layers[0].self_attn
    orders: list[str] = []

    class Orders(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is nn.functional.scaled_dot_product_attention:
                orders.append(type((kwargs or {})["attn_mask"]).__name__)
            return func(*args, **kwargs or {})

    for pattern in (chunk_attention.Pattern(0, True), chunk_attention.Pattern(8, False)):
        chunk_attention._patterns[mask] = pattern
        with Orders():
            output, _ = chunk_attention.attend(module, query, key, key, mask)
        assert output.shape == (1, LIMIT, 8, 8)
    assert orders[0] == "CausalBias"
    assert orders[-1] == "Tensor"


def test_attention_that_a_program_has_registered_is_left_alone() -> None:
    calls: list[int] = []

    def counted(*inputs: Any, **named: Any) -> Any:
        calls.append(1)
        return sdpa_attention_forward(*inputs, **named)

    model = make("llama")
    gradient = GradientAccumulator(model, max_microbatch_tokens=LIMIT, batching=InsideSamples())
    expected = uncut(model, texts((40,)))
    AttentionInterface.register("sdpa", counted)
    try:
        gradient.forward_backward(texts((40,)), losses.next_token)
        assert calls
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
    gradient.finalize()
    assert error(gradients(model), expected) < 1e-6  # Llama's norms are in float32
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward

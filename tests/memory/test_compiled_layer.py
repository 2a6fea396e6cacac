"""The memory that a plan does not take off for torch.compile, as docs/planning.md has it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

EIGHTH_OF_13B = {"hidden_size": 640, "intermediate_size": 1728, "num_attention_heads": 5, "num_key_value_heads": 5}


def kept_numbers(layer: Callable[..., Any], hidden: Tensor, embeddings: tuple[Tensor, ...], weights: set[int]) -> float:
    """Return the bfloat16 numbers that the layer keeps for its backward, for each number of its input [B, T, E]."""
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(hidden, position_embeddings=embeddings)
    num_bytes = sum(each.untyped_storage().nbytes() for address, each in kept.items() if address not in weights)
    return num_bytes / hidden.nbytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler, about torch's own code
def test_a_compiled_layer_keeps_less() -> None:
    """The partitioner is that of torch.compile on a GPU; the kernels are not, and decide nothing here."""
    torch.manual_seed(0)
    config = LlamaConfig(**EIGHTH_OF_13B, num_hidden_layers=1, attn_implementation="sdpa")
    layer = LlamaDecoderLayer(config, 0).bfloat16()
    hidden = torch.randn(2, 512, 640, dtype=torch.bfloat16, requires_grad=True)
    embeddings = LlamaRotaryEmbedding(config)(hidden, torch.arange(512)[None])
    weights = {each.untyped_storage().data_ptr() for each in (*layer.parameters(), *embeddings)}
    compiled = torch.compile(layer, backend="aot_eager_decomp_partition")
    compiled(hidden, position_embeddings=embeddings)  # compiles, without the hooks
    eager, partitioned = (kept_numbers(each, hidden, embeddings, weights) for each in (layer, compiled))
    assert eager == pytest.approx(22.8, abs=0.1)
    assert partitioned == pytest.approx(16.1, abs=0.1)

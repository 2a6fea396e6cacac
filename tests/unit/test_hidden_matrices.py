"""`split_parameters` finds the matrices of hidden layers."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel, LlamaConfig

from megabatch.optim import split_parameters

WIDTHS = (11, 7, 16, 5, 9, 11)  # of layers


class Deep(nn.Module):
    """Logits of the next of 13 tokens, through five uneven matrices."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.table, self.norm = nn.Embedding(13, WIDTHS[0]), nn.LayerNorm(WIDTHS[0])
            self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(WIDTHS))
            self.head = nn.Linear(WIDTHS[-1], 13)

    def forward(self, tokens: Tensor) -> Tensor:  # [B, T] -> [B, T, 13]
        hidden = self.norm(self.table(tokens))
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


def names_of(model: nn.Module) -> list[str]:
    """Names of the matrices for Muon; the others are the rest."""
    matrices, others = split_parameters(model)
    names = {id(each): name for name, each in model.named_parameters()}
    trained = [id(each) for each in model.parameters() if each.requires_grad]
    assert sorted(map(id, [*matrices, *others])) == sorted(trained)
    return [names[id(each)] for each in matrices]


def test_hidden_matrices_are_found() -> None:
    assert names_of(Deep()) == [f"layers.{index}.weight" for index in range(5)]
    sizes: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 13, "n_positions": 8}
    gpt2 = GPT2LMHeadModel(GPT2Config(**sizes))
    inner = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert names_of(gpt2) == [f"transformer.h.0.{each}.weight" for each in inner]
    assert names_of(gpt2.transformer) == [f"h.0.{each}.weight" for each in inner]
    config = LlamaConfig(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, vocab_size=13)
    classifier = AutoModelForSequenceClassification.from_config(config)
    classifier.model.layers[0].mlp.requires_grad_(False)
    assert names_of(classifier) == [f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkvo"]

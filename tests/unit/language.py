"""Language models and images for verify: tiny, from a config, as users have them (float32, dropout on)."""

import torch
from torch import Tensor, nn

VOCABULARY = 40
TARGETS = [(7, 7), (4, 2), (9, 5), (3, 3)]  # tokens, and how many of the last of them have a label


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, **TOKENS))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, attention_dropout=0.1, **sizes, **TOKENS))


TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def text() -> list[dict[str, Tensor]]:
    """Samples of unequal lengths, all with a label at position 0 but the second and third."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for length, num_targets in TARGETS:
        tokens = torch.randint(VOCABULARY, (length,), generator=generator)
        labels = torch.where(torch.arange(length) < length - num_targets, -100, tokens)
        made.append({"input_ids": tokens, "labels": labels})
    return made


class CNN(nn.Module):
    """Two convolutions, a norm between them, and one output per class."""

    def __init__(self, norm: nn.Module) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(1, 4, 3), norm, nn.Conv2d(4, 4, 3)
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, image: Tensor) -> Tensor:
        features = self.second(torch.relu(self.norm(self.first(image))))  # [B, 4, 4, 4]
        return self.head(self.dropout(features.mean((2, 3))))


def images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {"image": torch.randn(5, 1, 8, 8, generator=generator), "labels": torch.tensor([0, 1, 2, 0, 1])}

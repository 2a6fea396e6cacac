"""The models that the tables train: two whose arithmetic is exact, and a small GPT-2. Plain torch."""

import torch
from torch import Tensor, nn

VOCABULARY = 96


class IntegerLM(nn.Module):
    """One number per token, from integer weights: sums of integers are exact in float64 in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3, bias=False)])
        self.head = nn.Linear(3, 1)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)  # [B, T, 4]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).squeeze(-1)  # [B, T]


class RoutedLM(IntegerLM):
    """An expert that only samples with an odd first token use; a batch without such samples does not run it."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(4, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        routed = input_ids[:, :1] % 2 == 1  # [B, 1]
        outputs = self.head(self.blocks[1](self.blocks[0](hidden))).squeeze(-1)
        if routed.any():
            outputs = outputs + routed * self.expert(hidden).sum(-1)
        return outputs


class IntegerCNN(nn.Module):
    """One number per image, from integer weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv2d(1, 2, 3), nn.Linear(8, 3)])
        self.head = nn.Linear(3, 1)

    def forward(self, image: Tensor) -> Tensor:
        features = self.blocks[0](image).flatten(1)  # [B, 8]
        return self.head(self.blocks[1](features)).squeeze(-1)  # [B]


def integer_model(kind: str) -> nn.Module:
    """The exact model for a kind of batch, "tokens", "routed" or "image": integer weights in float64."""
    model = {"tokens": IntegerLM, "routed": RoutedLM, "image": IntegerCNN}[kind]().double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))
    return model


def gpt2(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A GPT-2 of two blocks without dropout, the same weights at every call."""
    from transformers import GPT2Config, GPT2LMHeadModel  # slow to import, and only some ranks need it

    torch.manual_seed(11)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=96, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double().to(dtype)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that FSDP2 shards one by one."""
    return list(model.transformer.h if hasattr(model, "transformer") else model.blocks)


class SignSGD(torch.optim.Optimizer):
    """Moves every weight by one: integer weights stay integers."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign())

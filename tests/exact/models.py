"""The models that the tables train: some whose arithmetic is exact, and small language models. Plain torch."""

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

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

    def encode(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)  # [B, T, 4]
        for block in self.blocks:
            hidden = block(hidden)
        return hidden  # [B, T, 3]

    def decode(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).squeeze(-1)  # [B, T]

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.decode(self.encode(input_ids))


class Scale(nn.Module):
    """A norm as sequence parallelism sees it, in exact arithmetic: a weight for every feature."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight


class ScaledLM(IntegerLM):
    """An `IntegerLM` with a scale before its blocks and one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_in, self.norm_out = Scale(4), Scale(3)

    def encode(self, input_ids: Tensor) -> Tensor:
        hidden = self.norm_in(self.embedding(input_ids))
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm_out(hidden)


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
    """The exact model "tokens", "scaled", "routed" or "image": integer weights in float64."""
    made = {"tokens": IntegerLM, "scaled": ScaledLM, "routed": RoutedLM, "image": IntegerCNN}
    model = made[kind]().double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))
    return model


def gpt2(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A GPT-2 of two blocks without dropout, the same weights at every call."""
    return copy.deepcopy(_gpt2()).to(dtype)


@cache
def _gpt2() -> nn.Module:
    """In float64; made once, since that takes longer than to train it."""
    from transformers import GPT2Config, GPT2LMHeadModel  # slow to import, and only some ranks need it

    torch.manual_seed(11)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=96, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


class Logits(NamedTuple):
    logits: Tensor  # [B, T, V]


class Block(nn.Module):
    """Attention and a feed-forward layer, written so that linear layers can be split over ranks."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.norm_attention, self.norm_up = nn.LayerNorm(width), nn.LayerNorm(width)
        # A bias of the key has no gradient: it moves all scores of a query alike.
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm_attention(hidden)
        heads = [self._heads(each(normed)) for each in (self.query, self.key, self.value)]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)  # [B, H, T, C]
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.norm_up(hidden))))

    def _heads(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # [B, H, T, C]; H of this rank


class SmallLM(nn.Module):
    """A language model of two blocks whose embedding and head are apart."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width, width // 2) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def encode(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def decode(self, hidden: Tensor) -> Logits:
        return Logits(self.head(self.norm(hidden)))

    def forward(self, input_ids: Tensor) -> Logits:
        return self.decode(self.encode(input_ids))


def small_lm(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A `SmallLM`, the same weights at every call."""
    torch.manual_seed(11)
    return SmallLM().double().to(dtype)


class Half(nn.Module):
    """Some children of a model, under their names, and one of the model's methods."""

    def __init__(self, model: nn.Module, children: Sequence[str], run: Callable[..., Any]) -> None:
        super().__init__()
        for name in children:
            self.add_module(name, getattr(model, name))
        self._run = run

    def forward(self, inputs: Tensor) -> Any:
        return self._run(self, inputs)


def halves(model: nn.Module) -> list[nn.Module]:
    """Two models that are the whole one after the other; no parameter is in both."""
    second = [name for name, _ in model.named_children() if name not in ("embedding", "blocks")]
    return [Half(model, ["embedding", "blocks"], type(model).encode), Half(model, second, type(model).decode)]


def called(model: nn.Module | list[nn.Module]) -> Callable[[Tensor], Any]:
    """A model, or several one after the other."""
    if not isinstance(model, list):
        return model
    first, second = model
    return lambda inputs: second(first(inputs))


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that are sharded one by one."""
    return list(model.transformer.h if hasattr(model, "transformer") else getattr(model, "blocks", ()))


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

"""A small language model with experts, in plain torch: its routers choose by score and bias."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, EXPERTS, TOP_K = 32, 8, 4, 2
BIAS = "e_score_correction_bias"


class Router(nn.Module):
    """Chooses experts by score and bias, and weighs them by score alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH).normal_())
        self.register_buffer(BIAS, torch.zeros(EXPERTS))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, WIDTH) @ self.weight.T  # [B * T, E]
        scores = logits.sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(TOP_K).indices  # [B * T, K]
        return logits, scores.gather(1, chosen), chosen


class Block(nn.Module):
    """Looks at the mean of what came before, then gives each token to some experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH).normal_())

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        length = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype)
        hidden = hidden + hidden.cumsum(1) / length[:, None]  # [B, T, D]
        logits, weights, chosen = self.router(hidden)
        outputs = torch.einsum("btd,edf->btef", hidden, self.experts).tanh().flatten(0, 1)  # [B * T, E, D]
        kept = torch.zeros_like(logits).scatter(1, chosen, weights)  # [B * T, E]
        return hidden + (kept[:, :, None] * outputs).sum(1).view_as(hidden), logits


class SparseLM(nn.Module):
    """A language model of two such blocks."""

    def __init__(self, repeat: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.repeat = repeat  # the forward in the backward: None not at all, else use_reentrant

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """[B, T] -> logits [B, T, V], and of the routers [B * T, E] each."""
        hidden, routers = self.embedding(input_ids), []
        for block in self.blocks:
            again = self.repeat is not None and torch.is_grad_enabled()
            hidden, logits = checkpoint(block, hidden, use_reentrant=self.repeat) if again else block(hidden)
            routers.append(logits)
        return self.head(hidden), routers


def sparse_lm(repeat: bool | None = None, dtype: torch.dtype = torch.float64) -> SparseLM:
    """The same weights at every call."""
    torch.manual_seed(3)
    return SparseLM(repeat).double().to(dtype)

"""Context parallelism: ranks along mesh axis ``cp`` get the same samples, and each runs its own stretch of them.

Each layer gathers the keys and values of the whole sequence and attends with its own queries, which works on every
device and in every dtype. Ring attention, which never holds the whole sequence's keys, is not used: torch's own runs on
CUDA alone, and merges pieces in float32.

Your own loss needs one change. A position's target may lie on another rank, so a stretch has ``shift_labels`` in place
of ``labels``: entry t is the target of position t. Totals and weights must be sums over positions.
"""

import math
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megabatch.errors import PlanError
from megabatch.planning.stretches import Stretch, stretch

__all__ = ["GatheredAttention", "Stretch", "stretch"]


class GatheredAttention:
    """Causal attention of this rank's queries to the keys and values of all ranks of a context group.

    Masks are made once per microbatch: they are kept for as long as its ``documents`` live.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._masks = WeakTensorKeyDictionary()  # documents -> {(piece, dtype): mask}

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, *,
        scale: float | None = None, dropout: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """Return the attention of this rank's queries to the keys of all ranks: [B, H, L, E].

        ``query`` is [B, H, L, D], ``key`` [B, K, L, D] and ``value`` [B, K, L, E], where K divides H. L are this rank's
        positions, as `stretch` cuts them, and ``documents`` its ``attention_mask``. Collective.
        """
        documents = self._checked(query, documents)
        both = _gather(torch.cat([key, value], dim=-1), self.group)  # [B, K, T, D + E]
        key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        piece_tokens = query.shape[2] // 2
        first, degree = self.group.rank(), self.group.size()
        outputs = [
            self._attend(part, key, value, documents, piece, scale, dropout)
            for part, piece in zip(query.split(piece_tokens, dim=2), (first, 2 * degree - 1 - first), strict=True)
        ]
        return torch.cat(outputs, dim=2)

    def _checked(self, query: Tensor, documents: Tensor | None) -> Tensor:
        shape = None if documents is None else tuple(documents.shape)
        if shape != (query.shape[0], 1, 1, query.shape[2] * self.group.size()) or query.shape[2] % 2:
            raise PlanError(
                f"attention over {self.group.size()} context ranks was given {query.shape[2]} positions and a mask of "
                f"shape {shape}; call the model with what a stretch of a microbatch holds, its attention_mask included"
            )
        return cast(Tensor, documents)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor, piece: int,
        scale: float | None, dropout: float,
    ) -> Tensor:  # fmt: skip
        """Compute the attention of one piece to itself and all before it."""
        start, end = piece * query.shape[2], (piece + 1) * query.shape[2]
        key, value = key[:, :, :end], value[:, :, :end]
        if documents.dtype == torch.bool:
            from torch.nn.attention.bias import causal_lower_right  # imports the compiler, which is slow

            order = causal_lower_right(end - start, end)
            return F.scaled_dot_product_attention(
                query, key, value, order, dropout, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
            )
        heads_per_key = query.shape[1] // key.shape[1]  # repeated, since fast kernels with a mask want one key each
        key, value = (each.repeat_interleave(heads_per_key, dim=1) for each in (key, value))
        mask = self._mask(documents, start, end, query.dtype)
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale)

    def _mask(self, documents: Tensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
        kept = cast(dict[Any, Tensor], self._masks.setdefault(documents, {}))
        if (start, dtype) not in kept:
            kept[start, dtype] = piece_mask(documents[:, 0, 0], start, end, dtype)
        return kept[start, dtype]


def piece_mask(documents: Tensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return the mask to add to the scores of queries ``start`` to ``end``: 0 where they attend, else -inf.

    ``documents`` [B, T]: the document number of each position, negative where nothing may attend to it.
    Returns [B, 1, end - start, end].
    """
    positions = torch.arange(end, device=documents.device)
    earlier = positions <= positions[start:, None]  # [end - start, end]
    same = documents[:, start:end, None].abs() == documents[:, None, :end]  # [B, end - start, end]
    seen = (earlier & same)[:, None]
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)


class _Gather(torch.autograd.Function):
    """The pieces of all ranks in the order of the sequence; in backward every rank gets the sum of its own."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = local.new_empty((group.size(), *local.shape))  # [ranks, B, K, L, D]
        dist.all_gather(list(gathered), local.contiguous(), group=group)
        firsts, seconds = gathered.chunk(2, dim=3)
        return torch.cat([*firsts, *seconds.flip(0)], dim=2)  # [B, K, T, D]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        num_ranks = ctx.group.size()
        pieces = gradients[0].chunk(2 * num_ranks, dim=2)
        sent = torch.stack([torch.cat([pieces[r], pieces[-1 - r]], dim=2) for r in range(num_ranks)])
        received = torch.empty_like(sent)  # [ranks, B, K, L, D]
        dist.all_to_all_single(received, sent, group=ctx.group)
        return received.sum(0), None  # torch sums half types in float32


def _gather(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _Gather.apply(local, group))

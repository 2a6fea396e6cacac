"""NEFTune's noise (arXiv 2310.05914), scaled by the length of each sample and not by that of the microbatch."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from megabatch.core.samples import Microbatch
from megabatch.errors import LossContractError, PlanError

LENGTHS = "megabatch: lengths for neftune_noise_alpha"  # a key of a microbatch: [B, 1] or [B, T]
LEAVE = "leave neftune_noise_alpha out"


class EmbeddingNoise:
    """A forward hook that adds noise up to ``alpha / sqrt(length * dim)`` to the embeddings of each sample.

    transformers' own hook takes the padded length of the microbatch, which depends on the split.

    Args:
        embeddings: The module of the input embeddings, in training.
    """

    def __init__(self, embeddings: nn.Module) -> None:
        self._alpha = float(cast(Any, embeddings).neftune_noise_alpha)
        self._lengths: Tensor | None = None
        self.handle = embeddings.register_forward_hook(self._add)

    def take_lengths(self, microbatch: Microbatch) -> Microbatch:
        """Return the microbatch without the lengths that `with_lengths` added, which the next forwards use."""
        named = dict(cast(Mapping[str, Any], microbatch))
        if LENGTHS not in named:
            raise LossContractError(
                f"_prepare_inputs() returns a microbatch without all keys that it was given; keep them, or {LEAVE}"
            )
        self._lengths = named.pop(LENGTHS)
        return named

    def _add(self, module: nn.Module, _: Any, output: Tensor) -> Tensor:
        if not module.training:
            return output
        lengths = self._lengths
        if lengths is None or len(lengths) != len(output) or lengths.shape[1] not in (1, output.shape[1]):
            raise LossContractError(
                f"the loss embeds tokens of shape {tuple(output.shape[:2])}, which are not the microbatch's input_ids, "
                f"so that their samples' lengths are not known; {LEAVE}"
            )
        scale = self._alpha / (lengths.to(output.device) * output.shape[2]).sqrt()  # [B, 1] or [B, T]
        return output + torch.empty_like(output).uniform_(-1, 1) * scale[..., None].to(output.dtype)


def with_lengths(microbatch: Microbatch, samples: Sequence[Any] = (), *, is_packed: bool = False) -> Microbatch:
    """Return a microbatch with the length of the sample that each token belongs to.

    Args:
        microbatch: A collated microbatch.
        samples: The samples before they were collated, where they are known.
        is_packed: A row may hold several samples.
    """
    named: Mapping[str, Any] = cast(Any, microbatch) if isinstance(microbatch, Mapping) else {}
    tokens = named.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        raise PlanError(f"neftune_noise_alpha needs microbatches with input_ids [B, T] to count by; {LEAVE}")
    mask, positions = named.get("attention_mask"), named.get("position_ids")
    if is_packed:
        if not isinstance(positions, Tensor) or positions.shape != tokens.shape:
            raise PlanError(
                "neftune_noise_alpha goes by the length of a sample, and the data collator puts several in a row "
                f"without position_ids, which tell where they end; {LEAVE}"
            )
        lengths = _count_by_positions(positions)
    elif isinstance(mask, Tensor) and mask.shape == tokens.shape:
        lengths = (mask != 0).sum(1, keepdim=True)
    elif len(samples) == len(tokens) and all(_num_tokens(sample) for sample in samples):
        lengths = torch.tensor([[min(_num_tokens(sample), tokens.shape[1])] for sample in samples])
    elif not samples:
        lengths = torch.full((len(tokens), 1), tokens.shape[1])  # rows of a loader, which no split pads again
    else:
        raise PlanError(
            "neftune_noise_alpha goes by the length of a sample, and the data collator gives no attention_mask [B, T] "
            f"to count by; give one, or {LEAVE}"
        )
    return {**named, LENGTHS: lengths.clamp(min=1)}


def _num_tokens(sample: Any) -> int:
    return len(sample["input_ids"]) if isinstance(sample, Mapping) and "input_ids" in sample else 0


def _count_by_positions(positions: Tensor) -> Tensor:
    """Return how many tokens have positions that go on from each other: [B, T] -> [B, T]."""
    goes_on = positions[:, 1:] == positions[:, :-1] + 1
    segments = nn.functional.pad((~goes_on).cumsum(1), (1, 0))  # [B, T]
    counts = torch.zeros_like(segments).scatter_add(1, segments, torch.ones_like(segments))
    return counts.gather(1, segments)

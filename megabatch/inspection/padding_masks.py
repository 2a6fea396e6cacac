"""Attention masks that a model does not need: those that only leave out padding on the right.

A causal model needs no mask for padding on the right: no token sees it. Without a mask torch takes its fast attention
kernels, and nothing waits for a device to look at the mask. The results at masked positions do change, so no target may
lie there.
"""

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from megabatch.errors import LossContractError
from megabatch.inspection.model_facts import MASK, POSITIONS, is_causal
from megabatch.torch_private.loss_nodes import IGNORED_LABEL
from megabatch.torch_private.operations import is_fake

# Key of a microbatch, beside its mask.
RIGHT_PADDED = "megabatch: padded on the right"


def next_targets(microbatch: Mapping[str, Any]) -> Tensor:
    """Return each position's target: ``shift_labels`` [B, T], or ``labels`` but the first of each row [B, T - 1].

    Raises `LossContractError` where the microbatch has neither.
    """
    shifted: Any = microbatch.get("shift_labels")
    targets: Any = microbatch.get("labels") if shifted is None else shifted
    if not isinstance(targets, Tensor) or targets.ndim != 2 or targets.is_floating_point():
        labels_given = "no labels" if targets is None else f"labels that are {_kind(targets)}"
        raise LossContractError(
            f"the samples have {labels_given} (their keys: {', '.join(map(str, microbatch))}); next_token wants labels "
            "[B, T] of whole numbers, or shift_labels"
        )
    return targets[:, 1:] if shifted is None else targets


def _kind(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def note_padding(microbatch: Any) -> Any:
    """Mark a microbatch on the CPU whose mask does no more than leave out padding on the right."""
    if isinstance(microbatch, Mapping) and MASK in microbatch and _only_pads(cast(Mapping[str, Any], microbatch)):
        return {**microbatch, RIGHT_PADDED: True}
    return microbatch


def without_needless(model: Any, microbatch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the microbatch without the mark, and without a mask that the model does not need."""
    is_noted = microbatch.get(RIGHT_PADDED) or _only_pads(microbatch)
    needless = (RIGHT_PADDED, MASK) if is_noted and is_causal(model) else (RIGHT_PADDED,)
    return {name: value for name, value in microbatch.items() if name not in needless}


def _only_pads(microbatch: Mapping[str, Any]) -> bool:
    """Return True if the mask does no more than leave out padding on the right.

    Beside positions it does more: without a mask transformers keeps documents apart where positions begin anew, and
    with one it does not look.
    """
    mask = microbatch.get(MASK)
    return POSITIONS not in microbatch and _is_right_padded(mask) and not _hides_targets(cast(Tensor, mask), microbatch)


def _hides_targets(mask: Tensor, microbatch: Mapping[str, Any]) -> bool:
    """Return True if a masked position has a target, as where labels are copied from padded input_ids, or may have."""
    targets = next_targets(microbatch)
    if targets.device != mask.device or len(targets) != len(mask) or targets.shape[1] > mask.shape[1]:
        return True
    return bool((targets[mask[:, : targets.shape[1]] == 0] != IGNORED_LABEL).any())


def _is_right_padded(mask: Any) -> bool:
    """Return True if ones precede zeros in each row of a mask [B, T] on the CPU; reading a device would wait."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.device.type != "cpu":
        return False
    # A fake tensor has no numbers.
    if mask.is_floating_point() or is_fake(mask):
        return False
    is_real = mask != 0
    return not bool((is_real[:, 1:] & ~is_real[:, :-1]).any())

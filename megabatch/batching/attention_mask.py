"""Attention masks that change nothing: in a causal model no token sees the padding on its right.

Without one torch takes its fast ways through attention, and nothing waits for a device to look at it. What is computed
at a masked position does change, so no target may lie there.
"""

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from megabatch.batching.samples import IGNORED_LABEL, Microbatch
from megabatch.errors import LossContractError
from megabatch.torch_private import is_fake, original_of

MASK, POSITIONS = "attention_mask", "position_ids"
RIGHT_PADDED = "megabatch: padded on the right"  # in a microbatch, beside its mask
# What transformers' configs say of a model whose tokens are sent to experts, which may count them by the mask.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def next_targets(microbatch: Mapping[str, Any]) -> Tensor:
    """What each position predicts: ``shift_labels`` [B, T], or ``labels`` but the first of each row [B, T - 1].

    Raises `LossContractError` where the microbatch has neither.
    """
    shifted: Any = microbatch.get("shift_labels")
    found: Any = microbatch.get("labels") if shifted is None else shifted
    if not isinstance(found, Tensor) or found.ndim != 2 or found.is_floating_point():
        seen = "no labels" if found is None else f"labels that are {_kind(found)}"
        raise LossContractError(
            f"the samples have {seen} (their keys: {', '.join(map(str, microbatch))}); next_token wants labels [B, T] "
            "of whole numbers, or shift_labels"
        )
    return found[:, 1:] if shifted is None else found


def _kind(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def note_padding(microbatch: Microbatch) -> Microbatch:
    """The microbatch, with a note where its mask does no more than leave out padding on the right; on the CPU."""
    if not isinstance(microbatch, Mapping) or not _only_pads(cast(Mapping[str, Any], microbatch)):
        return microbatch
    return {**microbatch, RIGHT_PADDED: True}


def without_needless(model: Any, microbatch: Mapping[str, Any]) -> dict[str, Any]:
    """The microbatch without the note, and without a mask that the model can do without."""
    is_noted = microbatch.get(RIGHT_PADDED) or _only_pads(microbatch)
    needless = (RIGHT_PADDED, MASK) if is_noted and is_causal(model) else (RIGHT_PADDED,)
    return {name: value for name, value in microbatch.items() if name not in needless}


def is_causal(model: Any, *, with_experts: bool = False) -> bool:
    """Whether no token of a model of transformers sees a later one, nor a mask does more than hide some.

    So say its config and every layer with attention. Of other models nothing is known. ``with_experts``: also of a
    model that sends tokens to experts, which may count them by the mask.
    """
    model = with_config(model)
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None or getattr(config, "is_encoder_decoder", True):
        return False
    if getattr(config, "use_bidirectional_attention", None):
        return False
    if not with_experts and any(getattr(config, each, None) for each in EXPERTS):
        return False
    said = [each for module in model.modules() if (each := vars(module).get("is_causal")) is not None]
    return bool(said) and all(each is True for each in said)


def with_config(model: Any) -> Any:
    """The model of transformers that DDP, FSDP1 or torch.compile have wrapped; the innermost, where there is none."""
    while not hasattr(model, "config"):
        inner = model.module if hasattr(model, "module") else original_of(model)
        if inner is model or not isinstance(inner, nn.Module):
            break
        model = inner
    return model


def _only_pads(microbatch: Mapping[str, Any]) -> bool:
    """Whether the mask does no more than leave out padding on the right. Beside positions it does: without a mask
    transformers keeps documents apart where they begin anew, and with one it does not look."""
    mask = microbatch.get(MASK)
    return POSITIONS not in microbatch and _is_right_padded(mask) and not _hides_targets(cast(Tensor, mask), microbatch)


def _hides_targets(mask: Tensor, microbatch: Mapping[str, Any]) -> bool:
    """Whether a masked position predicts something, as where labels are copied from padded input_ids."""
    targets = next_targets(microbatch)
    if targets.device != mask.device or len(targets) != len(mask) or targets.shape[1] > mask.shape[1]:
        return True  # it is not known
    return bool((targets[mask[:, : targets.shape[1]] == 0] != IGNORED_LABEL).any())


def _is_right_padded(mask: Any) -> bool:
    """Whether ones come before zeros in each row of a mask [B, T]; not asked of a device, which would wait."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.device.type != "cpu" or mask.is_floating_point():
        return False
    if is_fake(mask):  # it has no numbers
        return False
    is_real = mask != 0
    return not bool((is_real[:, 1:] & ~is_real[:, :-1]).any())

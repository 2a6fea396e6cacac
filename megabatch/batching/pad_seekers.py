"""Padding that a model or a loss misreads: models that find the end of a sample by their pad token, and classes."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megabatch.errors import LossContractError, PlanError
from megabatch.torch_private.loss_nodes import IGNORED_LABEL


def check_fill(model_name: str, pad_token: int | None, name: str, fill: float | None) -> None:
    """Raise `PlanError` where a model that looks for its pad token would get another."""
    if pad_token is None:
        raise PlanError(
            f"samples have {name} of unequal lengths and {model_name} finds the end of a sample by its pad token, "
            "which its config does not name; set model.config.pad_token_id"
        )
    if fill not in (None, pad_token):
        raise PlanError(
            f"Padded says {fill} for {name!r} and {model_name} finds the end of a sample by its pad token, "
            f"config.pad_token_id={pad_token}; leave it out of Padded"
        )


def check_pads(model_name: str, pad_token: int | None, ids: Tensor, mask: Any) -> None:
    """Raise where a model that looks for its pad token would not find the padding."""
    if not isinstance(mask, Tensor) or mask.shape != ids.shape or mask.device != ids.device:
        return
    hidden = ids[(mask != 0).flip(1).cumsum(1).flip(1) == 0]  # behind the last token
    if len(hidden) and (pad_token is None or bool((hidden != pad_token).any())):
        raise PlanError(
            f"{model_name} finds the end of a sample by its pad token, config.pad_token_id={pad_token}, and "
            f"input_ids are padded with {int(hidden[0])}; pad with the token that the config names"
        )


def check_classes(error: IndexError, labels: Sequence[str]) -> None:
    """Raise `LossContractError` if the error of a loss says that it takes the padding of labels for a class."""
    if not labels or str(error) != f"Target {IGNORED_LABEL} is out of bounds.":
        return
    raise LossContractError(
        f"{' and '.join(map(repr, labels))} of samples are padded with {IGNORED_LABEL}, which the loss takes for a "
        f"class; give it ignore_index={IGNORED_LABEL}, or the GradientAccumulator "
        f"batching=Padded({{{labels[0]!r}: what the loss leaves out}})"
    ) from error

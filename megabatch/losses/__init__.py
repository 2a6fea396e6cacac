"""Losses that keep the contract: each sums, counts and never divides."""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.core.contract import LossFunction as LossFunction
    from megabatch.core.contract import loss_hooks as loss_hooks
    from megabatch.core.contract import terms_of as terms_of
    from megabatch.losses.label_losses import classification as classification
    from megabatch.losses.label_losses import count_labels as count_labels
    from megabatch.losses.label_losses import count_values as count_values
    from megabatch.losses.label_losses import mse as mse
    from megabatch.losses.token_loss import count_targets as count_targets
    from megabatch.losses.token_loss import next_targets as next_targets
    from megabatch.losses.token_loss import next_token as next_token
else:
    _HOME = {  # public name → its module
        "LossFunction": "megabatch.core.contract",
        "classification": "label_losses",
        "count_labels": "label_losses",
        "count_targets": "token_loss",
        "count_values": "label_losses",
        "loss_hooks": "megabatch.core.contract",
        "mse": "label_losses",
        "next_targets": "token_loss",
        "next_token": "token_loss",
        "terms_of": "megabatch.core.contract",
    }
    __all__ = list(_HOME)
    __getattr__, __dir__ = export_lazily(__name__, _HOME)

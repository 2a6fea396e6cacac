"""Losses that keep the contract: each sums, counts and never divides."""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.losses.contract import LossFunction as LossFunction
    from megabatch.losses.contract import loss_hooks as loss_hooks
    from megabatch.losses.contract import terms_of as terms_of
    from megabatch.losses.ready_made import classification as classification
    from megabatch.losses.ready_made import count_labels as count_labels
    from megabatch.losses.ready_made import count_targets as count_targets
    from megabatch.losses.ready_made import count_values as count_values
    from megabatch.losses.ready_made import mse as mse
    from megabatch.losses.ready_made import next_targets as next_targets
    from megabatch.losses.ready_made import next_token as next_token
else:
    _HOME = {  # public name → its module
        "LossFunction": "contract",
        "loss_hooks": "contract",
        "terms_of": "contract",
        "classification": "ready_made",
        "count_labels": "ready_made",
        "count_targets": "ready_made",
        "count_values": "ready_made",
        "mse": "ready_made",
        "next_token": "ready_made",
        "next_targets": "ready_made",
    }
    __all__ = list(_HOME)
    __getattr__, __dir__ = export_lazily(__name__, _HOME)

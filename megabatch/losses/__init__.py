"""Losses that keep the contract: each sums, counts and never divides."""

from megabatch.losses.contract import LossFunction, loss_hooks, terms_of
from megabatch.losses.ready_made import (
    classification,
    count_labels,
    count_targets,
    count_values,
    mse,
    next_targets,
    next_token,
)

__all__ = [
    "LossFunction",
    "classification",
    "count_labels",
    "count_targets",
    "count_values",
    "loss_hooks",
    "mse",
    "next_targets",
    "next_token",
    "terms_of",
]

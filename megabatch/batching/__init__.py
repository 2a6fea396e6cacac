"""Batches as samples, and samples as microbatches: padding, masks, rows, shared prefixes, context parallelism."""

from megabatch.batching import context_parallel
from megabatch.batching.inside_samples import InsideSamples
from megabatch.batching.packed_row import OneRow
from megabatch.batching.padding import Padding
from megabatch.batching.samples import IGNORED_LABEL, Deferred, pad_right, sample_length
from megabatch.batching.shared_prefix import SharedPrefix
from megabatch.batching.tree import to_device

__all__ = [
    "IGNORED_LABEL",
    "Deferred",
    "InsideSamples",
    "OneRow",
    "Padding",
    "SharedPrefix",
    "context_parallel",
    "pad_right",
    "sample_length",
    "to_device",
]

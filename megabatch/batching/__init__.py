"""Batches as samples, and samples as microbatches: padding, masks, packed rows, context parallelism."""

from megabatch.batching.packed_row import OneRow as OneRow
from megabatch.batching.samples import Deferred as Deferred
from megabatch.batching.samples import pad_right as pad_right

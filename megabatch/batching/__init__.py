"""Batches as samples, and samples as microbatches: padding, masks, rows, shared prefixes, context parallelism."""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.batching import context_parallel as context_parallel
    from megabatch.batching.deferred import Deferred as Deferred
    from megabatch.batching.inside_samples import InsideSamples as InsideSamples
    from megabatch.batching.inside_samples import find_chunks as find_chunks
    from megabatch.batching.packed_row import OneRow as OneRow
    from megabatch.batching.padding import Padding as Padding
    from megabatch.batching.samples import IGNORED_LABEL as IGNORED_LABEL
    from megabatch.batching.samples import Padded as Padded
    from megabatch.batching.samples import pad_right as pad_right
    from megabatch.batching.samples import sample_length as sample_length
    from megabatch.batching.shared_prefix import SharedPrefix as SharedPrefix
    from megabatch.batching.tree import to_device as to_device
else:
    _HOME = {  # public name → its module
        "IGNORED_LABEL": "samples",
        "Deferred": "deferred",
        "InsideSamples": "inside_samples",
        "OneRow": "packed_row",
        "Padded": "samples",
        "Padding": "padding",
        "SharedPrefix": "shared_prefix",
        "find_chunks": "inside_samples",
        "pad_right": "samples",
        "sample_length": "samples",
        "to_device": "tree",
    }
    __all__ = [*_HOME, "context_parallel"]
    __getattr__, __dir__ = export_lazily(__name__, _HOME)

"""Batches as samples, and samples as microbatches: padding, masks, packed rows, context parallelism."""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.batching import context_parallel as context_parallel
    from megabatch.batching.packed_row import OneRow as OneRow
    from megabatch.batching.padding import Padding as Padding
    from megabatch.batching.samples import IGNORED_LABEL as IGNORED_LABEL
    from megabatch.batching.samples import Deferred as Deferred
    from megabatch.batching.samples import pad_right as pad_right
    from megabatch.batching.samples import sample_length as sample_length
    from megabatch.batching.tree import to_device as to_device
else:
    _HOME = {  # public name → its module
        "IGNORED_LABEL": "samples",
        "Deferred": "samples",
        "OneRow": "packed_row",
        "Padding": "padding",
        "pad_right": "samples",
        "sample_length": "samples",
        "to_device": "tree",
    }
    __all__ = ["context_parallel", *_HOME]
    __getattr__, __dir__ = export_lazily(__name__, _HOME)

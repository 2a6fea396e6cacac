"""Batches as samples, and samples as microbatches: padding, masks, rows, shared prefixes, context parallelism."""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.batching import context_parallel as context_parallel
    from megabatch.batching.deferred import Deferred as Deferred
    from megabatch.batching.inside_samples import InsideSamples as InsideSamples
    from megabatch.batching.inside_samples import find_chunks as find_chunks
    from megabatch.batching.packed_row import OneRow as OneRow
    from megabatch.batching.packing_check import check_packing_isolation as check_packing_isolation
    from megabatch.batching.packing_check import equal_but_rounding as equal_but_rounding
    from megabatch.batching.padding import Padding as Padding
    from megabatch.batching.shared_prefix import SharedPrefix as SharedPrefix
    from megabatch.core.right_padding import Padded as Padded
    from megabatch.core.right_padding import pad_right as pad_right
    from megabatch.core.samples import Batching as Batching
    from megabatch.core.samples import sample_length as sample_length
    from megabatch.inspection.tree import to_device as to_device
    from megabatch.torch_private.loss_nodes import IGNORED_LABEL as IGNORED_LABEL
else:
    _HOME = {  # public name → its module
        "IGNORED_LABEL": "megabatch.torch_private.loss_nodes",
        "Batching": "megabatch.core.samples",
        "Deferred": "deferred",
        "InsideSamples": "inside_samples",
        "OneRow": "packed_row",
        "Padded": "megabatch.core.right_padding",
        "Padding": "padding",
        "SharedPrefix": "shared_prefix",
        "check_packing_isolation": "packing_check",
        "equal_but_rounding": "packing_check",
        "find_chunks": "inside_samples",
        "pad_right": "megabatch.core.right_padding",
        "sample_length": "megabatch.core.samples",
        "to_device": "megabatch.inspection.tree",
    }
    __all__ = [*_HOME, "context_parallel"]
    __getattr__, __dir__ = export_lazily(__name__, _HOME)

"""One call, step by step: prepare it, run its microbatches, add up the update."""

from megabatch.engine.packing_check import check_packing_isolation, equal_but_rounding

__all__ = [
    "check_packing_isolation",
    "equal_but_rounding",
]

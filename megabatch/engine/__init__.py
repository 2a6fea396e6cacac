"""One call, step by step: prepare it, run its microbatches, add up the update."""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.engine.guards.packing_check import check_packing_isolation as check_packing_isolation
    from megabatch.engine.guards.packing_check import equal_but_rounding as equal_but_rounding
    from megabatch.engine.user_loop import LoopMicrobatch as LoopMicrobatch
else:
    _HOME = {  # public name → its module
        "LoopMicrobatch": "user_loop",
        "check_packing_isolation": "guards.packing_check",
        "equal_but_rounding": "guards.packing_check",
    }
    __all__ = list(_HOME)
    __getattr__, __dir__ = export_lazily(__name__, _HOME)

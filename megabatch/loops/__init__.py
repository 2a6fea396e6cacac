"""Microbatches outside `forward_backward`: loops of your own, forwards and evaluation."""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.loops.user_loop import LoopMicrobatch as LoopMicrobatch
else:
    _HOME = {"LoopMicrobatch": "user_loop"}  # public name → its module
    __all__ = list(_HOME)
    __getattr__, __dir__ = export_lazily(__name__, _HOME)

"""The trainer: `megabatch train recipes/stdlib.toml`. It imports the library; the library never imports it.

A part of your own imports these names from here: `Event` for functions of a recipe, `Callback` and `RunContext` for
``run.callbacks``.
"""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.train.context import Callback, RunContext
    from megabatch.train.runtime.plugins import Event

__all__ = ["Callback", "Event", "RunContext"]

_HOME = {"Callback": "context", "Event": "runtime.plugins", "RunContext": "context"}
__getattr__, __dir__ = export_lazily(__name__, _HOME)

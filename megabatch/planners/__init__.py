"""Splits of an update's samples into microbatches: planners to choose from, and those that calls run by."""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.planners.beyond_limits import Auto as Auto
    from megabatch.planners.beyond_limits import SameBits as SameBits
    from megabatch.planners.beyond_limits import Shapes as Shapes
    from megabatch.planners.built_in import Rows as Rows
    from megabatch.planners.built_in import Tokens as Tokens
else:
    _HOME = {  # public name → its module
        "Auto": "beyond_limits",
        "Rows": "built_in",
        "SameBits": "beyond_limits",
        "Shapes": "beyond_limits",
        "Tokens": "built_in",
    }
    __all__ = list(_HOME)
    __getattr__, __dir__ = export_lazily(__name__, _HOME)

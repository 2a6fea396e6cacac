"""Optimizers: steps as exact as the gradient."""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.optim.low_bits import LowBits as LowBits
    from megabatch.optim.low_bits import keep_state_dtypes as keep_state_dtypes
    from megabatch.optim.low_bits import refusal as refusal
else:
    _HOME = {  # public name → its module
        "LowBits": "low_bits",
        "keep_state_dtypes": "low_bits",
        "refusal": "low_bits",
    }
    __all__ = list(_HOME)
    __getattr__, __dir__ = export_lazily(__name__, _HOME)

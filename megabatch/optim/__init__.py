"""Optimizers: steps as exact as the gradient."""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.optim.low_bits import LowBits as LowBits
    from megabatch.optim.low_bits import keep_state_dtypes as keep_state_dtypes
    from megabatch.optim.muon import Muon as Muon
    from megabatch.optim.muon import split_parameters as split_parameters
else:
    _HOME = {  # public name → its module
        "LowBits": "low_bits",
        "Muon": "muon",
        "keep_state_dtypes": "low_bits",
        "split_parameters": "muon",
    }
    _REMOVED = {  # public name of the last version → what to use instead
        "StepVerification": "compare steps in your own test",
        "verify_step": "compare a step on shards with one on whole parameters in your own test",
    }
    __all__ = list(_HOME)
    __getattr__, __dir__ = export_lazily(__name__, _HOME, _REMOVED)

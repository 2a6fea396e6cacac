"""Optimizers: steps as exact as the gradient."""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.optim.low_bits import LowBits as LowBits
    from megabatch.optim.low_bits import keep_state_dtypes as keep_state_dtypes
    from megabatch.optim.muon import Muon as Muon
    from megabatch.optim.muon import split_parameters as split_parameters
    from megabatch.optim.step_check import StepVerification as StepVerification
    from megabatch.optim.step_check import verify_step as verify_step
else:
    _HOME = {  # public name → its module
        "LowBits": "low_bits",
        "Muon": "muon",
        "StepVerification": "step_check",
        "keep_state_dtypes": "low_bits",
        "split_parameters": "muon",
        "verify_step": "step_check",
    }
    __all__ = list(_HOME)
    __getattr__, __dir__ = export_lazily(__name__, _HOME)

"""Optimizers: steps as exact as the gradient."""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.optim.hidden_matrices import split_parameters as split_parameters
    from megabatch.optim.low_bits import LowBits as LowBits
    from megabatch.optim.low_bits import keep_state_dtypes as keep_state_dtypes
else:
    _HOME = {
        "LowBits": "low_bits",
        "keep_state_dtypes": "low_bits",
        "split_parameters": "hidden_matrices",
    }
    # Public names of the last version, and what to use instead.
    _REMOVED = {
        "Muon": "use torch.optim.Muon for the matrices of split_parameters, and AdamW for the others",
        "StepVerification": "compare steps in your own test",
        "verify_step": "compare a step on shards with one on whole parameters in your own test",
    }
    __all__ = list(_HOME)
    __getattr__, __dir__ = export_lazily(__name__, _HOME, _REMOVED)

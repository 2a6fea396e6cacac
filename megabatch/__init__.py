"""State the batch you want; megabatch computes its exact gradient on the hardware you have.

Each name below is imported when it is first asked for: torch takes seconds, and `megabatch --help` needs none of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megabatch import losses as losses
    from megabatch.accumulator import GradientAccumulator as GradientAccumulator
    from megabatch.contract import JointLoss as JointLoss
    from megabatch.contract import Term as Term
    from megabatch.contract import loss as loss
    from megabatch.cost import CostModel as CostModel
    from megabatch.cut import Plan as Plan
    from megabatch.cut import plan as plan
    from megabatch.errors import LossContractError as LossContractError
    from megabatch.errors import MegabatchError as MegabatchError
    from megabatch.errors import PlanError as PlanError
    from megabatch.learner import Learner as Learner
    from megabatch.proof import Verification as Verification
    from megabatch.proof import verify as verify
    from megabatch.sampler import UpdateSampler as UpdateSampler
    from megabatch.update import Update as Update
else:
    _HOME = {  # public name → its module
        "GradientAccumulator": "accumulator",
        "JointLoss": "contract",
        "Term": "contract",
        "loss": "contract",
        "CostModel": "cost",
        "Plan": "cut",
        "plan": "cut",
        "LossContractError": "errors",
        "MegabatchError": "errors",
        "PlanError": "errors",
        "Learner": "learner",
        "Verification": "proof",
        "verify": "proof",
        "UpdateSampler": "sampler",
        "Update": "update",
    }
    __all__ = ["losses", *_HOME]

    def __getattr__(name: str) -> object:
        """A public name, or a module of the library; a name that is neither is an `AttributeError`."""
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = f"{__name__}.{_HOME.get(name, name)}"
        try:
            found = import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        globals()[name] = getattr(found, name) if name in _HOME else found
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


__version__ = "0.1.0"

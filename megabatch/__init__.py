"""State the batch you want; megabatch computes its exact gradient on the hardware you have.

Each name below is imported when it is first asked for: torch takes seconds, and `megabatch --help` needs none of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megabatch import losses as losses
    from megabatch.accumulator import GradientAccumulator as GradientAccumulator
    from megabatch.engine.update import Update as Update
    from megabatch.errors import LossContractError as LossContractError
    from megabatch.errors import MegabatchError as MegabatchError
    from megabatch.errors import PlanError as PlanError
    from megabatch.learner import Learner as Learner
    from megabatch.losses.contract import JointLoss as JointLoss
    from megabatch.losses.contract import Term as Term
    from megabatch.losses.contract import loss as loss
    from megabatch.planning.plan import CostModel as CostModel
    from megabatch.planning.plan import Plan as Plan
    from megabatch.planning.plan import plan as plan
    from megabatch.planning.sampler import UpdateSampler as UpdateSampler
    from megabatch.verification.proof import Verification as Verification
    from megabatch.verification.proof import verify as verify
else:
    _HOME = {  # public name → its module
        "GradientAccumulator": "accumulator",
        "JointLoss": "losses.contract",
        "Term": "losses.contract",
        "loss": "losses.contract",
        "CostModel": "planning.plan",
        "Plan": "planning.plan",
        "plan": "planning.plan",
        "LossContractError": "errors",
        "MegabatchError": "errors",
        "PlanError": "errors",
        "Learner": "learner",
        "Verification": "verification.proof",
        "verify": "verification.proof",
        "UpdateSampler": "planning.sampler",
        "Update": "engine.update",
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

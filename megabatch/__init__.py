"""State the batch you want; megabatch computes its exact gradient on the hardware you have.

Each name below is imported when it is first asked for: torch takes seconds, and `megabatch --help` needs none of it.
"""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch import losses as losses
    from megabatch.core.contract import Term as Term
    from megabatch.core.contract import loss as loss
    from megabatch.core.extension import Extension as Extension
    from megabatch.core.update import Update as Update
    from megabatch.errors import LossContractError as LossContractError
    from megabatch.errors import MegabatchError as MegabatchError
    from megabatch.errors import PlanError as PlanError
    from megabatch.gradient_accumulator import GradientAccumulator as GradientAccumulator
    from megabatch.learner import Learner as Learner
    from megabatch.losses.coupled_loss import JointLoss as JointLoss
    from megabatch.losses.mean import mean as mean
    from megabatch.planning.dealing import plan as plan
    from megabatch.planning.plan import CostModel as CostModel
    from megabatch.planning.plan import Plan as Plan
    from megabatch.planning.planner import Planner as Planner
    from megabatch.planning.sampler import UpdateSampler as UpdateSampler
    from megabatch.verification.audit import audit as audit
    from megabatch.verification.audit_report import Audit as Audit
    from megabatch.verification.proof import Verification as Verification
    from megabatch.verification.proof import verify as verify
else:
    _HOME = {  # public name → its module
        "GradientAccumulator": "gradient_accumulator",
        "JointLoss": "losses.coupled_loss",
        "Term": "core.contract",
        "loss": "core.contract",
        "mean": "losses.mean",
        "CostModel": "planning.plan",
        "Plan": "planning.plan",
        "Planner": "planning.planner",
        "plan": "planning.dealing",
        "LossContractError": "errors",
        "MegabatchError": "errors",
        "PlanError": "errors",
        "Learner": "learner",
        "Audit": "verification.audit_report",
        "audit": "verification.audit",
        "Verification": "verification.proof",
        "verify": "verification.proof",
        "UpdateSampler": "planning.sampler",
        "Update": "core.update",
        "Extension": "core.extension",
    }
    __all__ = ["losses", *_HOME]

    __getattr__, __dir__ = export_lazily(__name__, _HOME)


__version__ = "0.1.0"

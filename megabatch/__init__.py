"""State the batch you want; megabatch computes its exact gradient on the hardware you have."""

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

__version__ = "0.1.0"

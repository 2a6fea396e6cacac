"""Plan and run a call whose sequences are cut over the mesh axis "cp", in stretches."""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from megabatch.core.call import MicrobatchPlanner
from megabatch.core.contract import WEIGHT_TOLERANCE, LossHooks, Prepare, Weigh, counted_weights
from megabatch.core.samples import Batch, Microbatch, Samples
from megabatch.errors import LossContractError, PlanError
from megabatch.inspection.padding_masks import note_padding
from megabatch.planning.plan import Plan
from megabatch.planning.stretches import stretch


@dataclass(frozen=True)
class StretchPlanner(MicrobatchPlanner):
    """Gives the loss this rank's stretch of each microbatch. All ranks of a context group have the same samples."""

    adds_up: ClassVar[bool] = False  # a stretch may hold padding alone

    @property
    def has_rows(self) -> bool:
        """False: a rank has no whole sample."""
        return False

    def samples(self, batch: Batch, prepare: Prepare | None = None) -> Samples:
        """Return the batch as samples, of which `Samples.take` returns stretches."""
        cut = partial(stretch, index=self.ranks.context_rank, degree=self.ranks.context_degree)
        return super().samples(batch, cut)

    def check(self, samples: Samples, plan: Plan, hooks: LossHooks) -> None:
        """Raise for a loss that needs whole samples, and for weights that do not add up over stretches."""
        if hooks.prepare not in (None, note_padding):
            raise PlanError(
                "the loss has prepare=, which is given whole samples, and a cp axis gives the loss stretches of them; "
                "prepare them in the collate function, or leave the cp axis out"
            )
        if hooks.weigh is None:
            samples.part = _refuse_uncounted  # when the call runs: a JointLoss has a refusal of its own
            return
        if not plan.microbatches:
            return
        first = plan.microbatches[0]
        if samples.given_weight(first) is not None:
            raise PlanError(
                "weights of Deferred are of whole samples, and sequences are cut over the mesh axis 'cp'; leave "
                "weights out"
            )
        check_weights_of_stretches(samples.take_whole(first), hooks.weigh, self.ranks.context_degree)


def _refuse_uncounted(_: Microbatch) -> Microbatch:
    raise LossContractError(
        "sequences are cut over the mesh axis 'cp' and the loss does not say how its weight is counted, so a "
        "weight that counts samples would not be seen; give weigh=, see megabatch.loss"
    )


def check_weights_of_stretches(microbatch: Microbatch, weigh: Weigh, degree: int) -> None:
    """Raise `LossContractError` if the weights of the stretches do not add up to the weight of the whole microbatch."""
    whole = counted_weights(weigh(stretch(microbatch, 0, 1)))
    parts = [counted_weights(weigh(stretch(microbatch, index, degree))) for index in range(degree)]
    for name, weight in whole.items():
        added = sum(part.get(name, 0.0) for part in parts)
        if not math.isclose(added, weight, rel_tol=WEIGHT_TOLERANCE):
            raise LossContractError(
                f"weigh counts {weight:g} in whole sequences and {added:g} in their {degree} stretches; under cp count "
                "positions (of shift_labels, say), not samples, which every rank sees"
            )

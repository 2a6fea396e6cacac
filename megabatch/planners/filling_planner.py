"""The planner of calls where nothing asks for another one."""

from dataclasses import dataclass

from megabatch.core.call import CallAgreement, MicrobatchPlanner, PreparedBatch
from megabatch.core.contract import LossHooks
from megabatch.core.wrapper import Wrapper


@dataclass(frozen=True)
class FillingPlanner(MicrobatchPlanner):
    """Cuts microbatches smaller where other ranks have more of them, which costs less than dummy microbatches."""

    def complete(
        self, prepared: PreparedBatch, agreement: CallAgreement, hooks: LossHooks, wrapper: Wrapper
    ) -> tuple[PreparedBatch, CallAgreement]:
        """Return the call as it runs. Dummies stand in for samples that a rank lacks."""
        planned = prepared.plan.microbatches
        if not planned or len(planned) >= agreement.num_microbatches:
            return prepared, agreement
        from megabatch.planners.fill_up import fill_up

        return fill_up(self, prepared, agreement, hooks, wrapper)

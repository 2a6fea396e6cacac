"""Planners of calls whose sequences are cut over the mesh axis "cp"."""

from dataclasses import dataclass

from megabatch.batching.stretch_planner import StretchPlanner
from megabatch.core.contract import Prepare, Weigh
from megabatch.core.samples import Batch, Samples
from megabatch.pipeline.schedule_steps import SchedulePlanner
from megabatch.planners.filling_planner import FillingPlanner
from megabatch.planning.stretches import stretch


@dataclass(frozen=True)
class FillingStretchPlanner(StretchPlanner, FillingPlanner):
    """Gives the loss stretches of microbatches, which are cut smaller where other ranks have more of them."""


@dataclass(frozen=True)
class StretchSchedulePlanner(StretchPlanner, SchedulePlanner):
    """Splits samples into schedule steps, of which `run_schedule` cuts all microbatches to one length over "cp"."""

    def samples(self, batch: Batch, prepare: Prepare | None = None) -> Samples:
        """Return the batch as whole samples."""
        return self.batching.samples(batch, self.length)

    def weigh_own(self, weigh: Weigh | None) -> Weigh | None:
        """Return the function that counts what this rank weighs of a whole microbatch."""
        rank, degree = self.ranks.context_rank, self.ranks.context_degree
        return weigh and (lambda microbatch: weigh(stretch(microbatch, rank, degree)))

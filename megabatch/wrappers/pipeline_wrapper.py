"""The wrapper of a model in stages, which run together with the stages of other ranks."""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, Protocol

from megabatch.core.gradients import Gradients
from megabatch.core.mesh import DataRanks
from megabatch.core.wrapper import Choice, Wrapper
from megabatch.errors import PlanError
from megabatch.wrappers.multi_model import MultiModelWrapper


class StagedModel(Protocol):
    """A model in stages, such as a `Pipeline`."""

    stages: Any  # the modules of this rank
    ranks_meet: bool  # those that hold the same stage wait for each other in its forward or backward
    tied: Any  # this rank's copies of parameters that stages of several ranks share, or None
    new_planner: Any  # makes the planner of calls

    @property
    def ranks(self) -> DataRanks:
        """All ranks that work on an update."""
        ...

    @property
    def stage_ranks(self) -> DataRanks:
        """Ranks that hold the stages of this rank's pipeline."""
        ...

    def agree_on_tied(self) -> None:
        """Set ``tied``. Collective, the first time."""
        ...

    def run_call(self, call: Any, reducing: contextlib.AbstractContextManager[None]) -> Any:
        """Run the microbatches of a call. Return the sums, the same on every stage."""
        ...

    def forget(self) -> None:
        """Drop what a call that failed half-way leaves."""
        ...


class PipelineWrapper(MultiModelWrapper):
    """Reduces every stage of this rank by its own wrapper, once per call, in its last schedule step."""

    is_pipeline = True
    kind_name = "a pipeline"

    def __init__(self, pipeline: StagedModel, wrappers: Sequence[Wrapper]) -> None:
        super().__init__(wrappers, frozen=())
        self.ranks = pipeline.ranks
        self.stage_ranks = pipeline.stage_ranks
        # No DTensor describes the parameters of other stages.
        self.norm_groups = list(self.stage_ranks.pipeline_groups)
        self.pipeline = pipeline
        self.new_planner = pipeline.new_planner
        meet = self.forwards_meet or self._ddp_wrappers or self.ranks.context_groups
        pipeline.ranks_meet = bool(meet) and self.ranks.num_all > self.stage_ranks.num_all
        pipeline.agree_on_tied()
        if pipeline.tied is not None:
            self.uncounted = pipeline.tied.uncounted

    def run_call(self, call: Any) -> Any:
        """Run the microbatches of a call through the schedule. Return the sums, the same on every stage."""
        return self.pipeline.run_call(call, self.reducing())

    def accumulate_in(self, wide: Gradients) -> None:
        if wide.widens:
            raise PlanError(
                f"accumulate_dtype is {wide.dtype}, but a pipeline adds gradients in the parameters' dtype; "
                "leave accumulate_dtype out"
            )

    def choose(self, policy: str) -> Choice:
        if policy not in ("auto", "last"):
            raise PlanError(
                f"sync is {policy!r}, but a pipeline reduces once per call, after its last microbatch; leave sync out"
            )
        return "last", "the schedule of a pipeline runs the microbatches together, and reduces once after the last"

    def hold_reduction(self, policy: str) -> None:
        """Do nothing: the schedule of each call reduces at its end."""

    @contextlib.contextmanager
    def microbatch(self, policy: str, *, last: bool) -> Generator[None]:
        """Do nothing: a microbatch does not run by itself, see `reducing`."""
        yield

    def finish_update(self) -> None:
        super().finish_update()
        if self.pipeline.tied is not None:
            self.pipeline.tied.sum_gradients()

    @contextlib.contextmanager
    def reducing(self) -> Generator[None]:
        """Surround the schedule steps that run the microbatches of a call."""
        with super().microbatch("last", last=True):
            yield

    def discard(self) -> None:
        self.pipeline.forget()
        super().discard()

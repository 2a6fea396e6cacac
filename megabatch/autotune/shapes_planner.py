"""Plans of microbatches of few shapes: the samples of each shape, and what fills it up."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from megabatch.batching.packed_row import OneRow
from megabatch.batching.samples import Batch, Samples
from megabatch.engine.call import MicrobatchPlanner, PreparedBatch, collate_planned
from megabatch.errors import PlanError
from megabatch.losses.contract import LossHooks
from megabatch.planning.plan import Plan, check_lengths, priced
from megabatch.planning.shapes import Shape, plan_in_shapes, shapes_within


@dataclass(frozen=True)
class ShapesPlanner(MicrobatchPlanner):
    """Splits samples into microbatches of ``shapes``: rows and tokens, the longest first."""

    shapes: tuple[Shape, ...] = ()
    fills_up: ClassVar[bool] = False

    @classmethod
    def of(cls, planner: MicrobatchPlanner, shapes: Sequence[Shape]) -> "ShapesPlanner":
        """Return a planner with the same settings and these shapes."""
        settings = {each.name: getattr(planner, each.name) for each in fields(MicrobatchPlanner)}
        return cls(**settings, shapes=tuple(shapes))

    @property
    def free(self) -> MicrobatchPlanner:
        """The same settings without shapes."""
        return MicrobatchPlanner(**{each.name: getattr(self, each.name) for each in fields(MicrobatchPlanner)})

    @property
    def is_packed(self) -> bool:
        """True if the samples of a microbatch lie in one row."""
        return isinstance(self.collate, OneRow)

    def plan(self, samples: Samples) -> Plan:
        """Return the plan by which samples are split into microbatches."""
        rows, tokens = self.limits
        check_lengths(samples.lengths, None if self.learned is not None else tokens)
        cost, (sync, reason) = self.known_cost, self.choice
        plan = plan_in_shapes(
            samples.lengths, self.shapes, rows, tokens, cost, packed=self.is_packed, num_positions=self._num_positions
        )
        plan = replace(plan, sync=sync, reason=reason)
        return plan if cost is None else priced(plan, cost)

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """Samples and tokens of a microbatch, one of them None."""
        rows, tokens = self.micro_batch_size, self.max_microbatch_tokens
        if self.fit is not None:
            rows, tokens = None, self.fit.max_microbatch_tokens
        if self.learned is not None:
            rows = None if rows is None else min(rows, self.learned.samples)
            tokens = None if tokens is None else max(1, min(tokens, self.learned.tokens))
        return rows, tokens

    @property
    def _num_positions(self) -> int | None:
        return None if self.padding is None else self.padding.most_positions

    def fitted(self, plan: Plan, samples: Samples) -> Plan:
        """Return a plan that was made before. Raises `PlanError` if it is of other samples or shapes."""
        made = super().fitted(plan, samples)
        longest = max(samples.lengths, default=0)
        known = shapes_within(self.shapes, longest, *self.limits, self._num_positions)
        for rows in made.microbatches:
            shape = plan.shapes.get(rows)
            if shape not in known or not _holds(shape, made.lengths_of(rows), is_packed=self.is_packed):
                raise PlanError("plan is of other shapes than those of this accumulator; make another")
        return made

    def prepare(self, batch: Batch, hooks: LossHooks, given: Plan | None = None) -> PreparedBatch:
        """Split, collate and weigh this rank's samples. Raises `PlanError` or `LossContractError`."""
        samples = self.samples(batch, hooks.prepare)
        plan = self.plan(samples) if given is None else self.fitted(given, samples)
        if plan.microbatches:
            samples.shapes = {**self._of_dummy(samples), **plan.shapes}
        return collate_planned(samples, plan, hooks.weigh)

    def dummy(self, samples: Samples) -> Any:
        """Return the last sample of an earlier call as a microbatch, in the cheapest shape that is long enough."""
        samples.shapes = self._of_dummy(samples)
        return samples.dummy()

    def _of_dummy(self, samples: Samples) -> dict[tuple[int, ...], Shape]:
        last = len(samples) - 1
        rows, tokens = self.limits
        alone = plan_in_shapes(
            samples.lengths[-1:], self.shapes, rows, tokens, self.known_cost, packed=self.is_packed,
            num_positions=self._num_positions,
        )  # fmt: skip
        return {(last,): alone.shapes[0,]}


def _holds(shape: Shape, lengths: Sequence[int], *, is_packed: bool) -> bool:
    if is_packed:
        return sum(max(1, length) for length in lengths) <= shape[1]
    return len(lengths) <= shape[0] and max(lengths) <= shape[1]

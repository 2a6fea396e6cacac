"""Plans of microbatches of few shapes: the samples of each shape, and what fills it up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, cast

from megabatch.core.call import MicrobatchPlanner, PreparedBatch, collate_planned
from megabatch.core.contract import LossHooks, is_own
from megabatch.core.right_padding import pad_right
from megabatch.core.samples import Batch, Batching, Microbatch, Samples
from megabatch.errors import PlanError
from megabatch.planning.plan import Plan, check_lengths, priced
from megabatch.planning.shapes import Shape, plan_in_shapes, shapes_within


class InShapes(Batching):
    """Fills each microbatch of one plan up to its shape.

    Args:
        origin: A `Padded` or a `OneRow`.
        shapes: Rows and tokens, by the samples of a microbatch.
    """

    def __init__(self, origin: Batching, shapes: Mapping[tuple[int, ...], Shape]) -> None:
        super().__init__(pad_right, origin.pad)
        self._origin, self._shapes = origin, shapes
        self.is_collated_by_user = origin.is_collated_by_user

    @property
    def origin(self) -> Batching:
        """The batching of all calls."""
        return self._origin

    def collate(self, samples: list[Any], rows: Sequence[int]) -> Microbatch:
        """Return samples as one microbatch of their shape."""
        return cast(Any, self._origin).collate(samples, rows, self._shapes[tuple(rows)])

    def owned(self, microbatch: Microbatch, moved: Microbatch) -> Microbatch:
        """Return ``moved`` on memory of its own."""
        return self._origin.owned(microbatch, moved)


@dataclass(frozen=True)
class ShapesPlanner(MicrobatchPlanner):
    """Splits samples into microbatches of ``shapes``: rows and tokens, the longest first. Empty before the choice."""

    shapes: tuple[Shape, ...] = ()
    adds_up: ClassVar[bool] = False  # a weight may count the rows that fill a shape

    @classmethod
    def of(cls, planner: MicrobatchPlanner, shapes: Sequence[Shape]) -> "ShapesPlanner":
        """Return a planner with the same settings and these shapes."""
        settings = {setting.name: getattr(planner, setting.name) for setting in fields(MicrobatchPlanner)}
        return cls(**settings, shapes=tuple(shapes))

    @property
    def free(self) -> MicrobatchPlanner:
        """The same settings without shapes."""
        return MicrobatchPlanner(**{setting.name: getattr(self, setting.name) for setting in fields(MicrobatchPlanner)})

    def plan(self, samples: Samples) -> Plan:
        """Return the plan by which samples are split into microbatches."""
        if not self.shapes:
            if len(samples):
                raise PlanError(
                    "Shapes and the first forward_backward() chooses the shapes, from the lengths of all ranks; call "
                    "it before plan(), or leave Shapes out"
                )
            return super().plan(samples)
        rows, tokens = self.limits
        check_lengths(samples.lengths, self.stated_limits[1])
        cost, (sync, reason) = self.known_cost, self.choice
        plan = plan_in_shapes(
            samples.lengths,
            self.shapes,
            rows,
            tokens,
            cost,
            packed=not self.has_rows,
            num_positions=self._num_positions,
        )
        plan = replace(plan, sync=sync, reason=reason)
        return plan if cost is None else priced(plan, cost)

    def of_forwards(self, verb: str, fn: object) -> MicrobatchPlanner:
        """Return the planner of a call without a backward, which fills up for a known loss only."""
        return self if self.shapes and verb == "evaluate" and _is_known(fn) else self.free

    def check_goes_with(self, feature: str) -> None:
        raise PlanError(f"Shapes and {feature}; leave one of the two out")

    @property
    def _num_positions(self) -> int | None:
        return cast(Any, self.batching.pad).facts.most_positions

    def fitted(self, plan: Plan, samples: Samples) -> Plan:
        """Return a plan that was made before. Raises `PlanError` if it is of other samples or shapes."""
        fitted = super().fitted(plan, samples)
        longest = max(samples.lengths, default=0)
        known = shapes_within(self.shapes, longest, *self.limits, self._num_positions)
        for rows in fitted.microbatches:
            shape = plan.shapes.get(rows)
            if shape not in known or not _holds(shape, fitted.lengths_of(rows), is_packed=not self.has_rows):
                raise PlanError("plan is of other shapes than those of this accumulator; make another")
        return fitted

    def prepare(self, batch: Batch, hooks: LossHooks, user_plan: Plan | None = None) -> PreparedBatch:
        """Split, collate and weigh this rank's samples. Raises `PlanError` or `LossContractError`."""
        samples = self.samples(batch, hooks.prepare)
        plan = self.plan(samples) if user_plan is None else self.fitted(user_plan, samples)
        if plan.microbatches:
            samples.batching = InShapes(self.batching, {**self._of_dummy(samples), **plan.shapes})
        return collate_planned(samples, plan, hooks.weigh)

    def dummy(self, samples: Samples) -> Any:
        """Return the last sample of an earlier call as a microbatch, in the cheapest shape that is long enough."""
        samples.batching = InShapes(self.batching, self._of_dummy(samples))
        return samples.dummy()

    def _of_dummy(self, samples: Samples) -> dict[tuple[int, ...], Shape]:
        last = len(samples) - 1
        rows, tokens = self.limits
        alone = plan_in_shapes(
            samples.lengths[-1:], self.shapes, rows, tokens, self.known_cost, packed=not self.has_rows,
            num_positions=self._num_positions,
        )  # fmt: skip
        return {(last,): alone.shapes[0,]}


def _holds(shape: Shape, lengths: Sequence[int], *, is_packed: bool) -> bool:
    if is_packed:
        return sum(max(1, length) for length in lengths) <= shape[1]
    return len(lengths) <= shape[0] and max(lengths) <= shape[1]


def check_loss(loss_fn: object) -> None:
    """Raise `PlanError` for a loss that may count tokens without a label."""
    if not _is_known(loss_fn):
        raise PlanError(
            "Shapes fills microbatches up with tokens without a label, and only losses.next_token and "
            "losses.classification are known to leave them out; give one of these, or leave Shapes out"
        )


def _is_known(loss_fn: object) -> bool:
    """Return True for a loss of megabatch that leaves out labels of -100, inside of the trainer's own code too.

    `functools.wraps` copies the mark to functions that may count more, so the innermost function decides.
    """
    while is_own(loss_fn) and hasattr(loss_fn, "__wrapped__"):
        loss_fn = cast(Any, loss_fn).__wrapped__
    return is_own(loss_fn) and getattr(loss_fn, "skips_ignored_labels", False)

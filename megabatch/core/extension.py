"""Optional behaviour of calls and updates, as objects with events: the accumulator names none of them."""

from collections.abc import Callable, Generator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from megabatch.core.call import CallAgreement, MicrobatchStep, PreparedBatch
from megabatch.core.contract import LossHooks
from megabatch.core.samples import Batch
from megabatch.core.update import OpenUpdate, Update
from megabatch.core.wrapper import Wrapper
from megabatch.errors import MegabatchError, PlanError
from megabatch.planning.plan import Plan

Steps = Generator[MicrobatchStep]
# Stands for the index of a step after the last one.
END = -1
TWICE = "surround_steps() of an extension left a microbatch out or yielded one twice; yield each once"
TOO_FEW = "surround_steps() of an extension ended before the last microbatch; yield each once"


class Call(NamedTuple):
    """A call that is under way.

    Attributes:
        model: The argument of the loss.
        plan: This rank's plan with its dummy microbatches.
        is_new: True if the loss was not tried in a call before.
        takes_divisor: True if the loss divides its total itself.
    """

    model: Any
    wrapper: Wrapper
    loss_fn: Any
    prepared: PreparedBatch
    agreement: CallAgreement
    plan: Plan
    opened: OpenUpdate
    hooks: LossHooks
    is_new: bool
    takes_divisor: bool

    @property
    def given(self) -> list[object]:
        """Objects besides the model that a loss may use: the batch, as far as it is in memory."""
        return [self.prepared.samples.held(), self.prepared.collated]


class Extension:
    """Measures, guards or changes the calls of an accumulator. Override the events that you need.

    An event that no extension overrides costs nothing. Extensions run in the order in which you give them. Keep no
    reference to the accumulator, which every event is given: it would stay in memory with its model.
    """

    is_attached = False
    # True if `check_call` may have the call planned anew.
    plans_anew = False

    def attach(self, gradient: Any) -> None:
        """Raise `PlanError` for an accumulator that this extension does not go with, on all ranks alike. Collective."""

    def reserve_for(self, gradient: Any, optimizer: Any) -> None:
        """Learn the optimizer of the updates, in `GradientAccumulator.reserve_for`.

        Raise `PlanError` for an optimizer that this extension does not go with.
        """

    def tune(self, gradient: Any, batch: Batch, loss_fn: Any) -> None:
        """Measure for later calls what needs samples and a loss. Collective.

        This runs in `GradientAccumulator.tune`, and in `forward_backward` if a `check_call` has raised `ReplanError`.
        """

    def before_call(self, gradient: Any, batch: Batch, loss_fn: Any) -> None:
        """Run before the batch of `forward_backward` is split. Collective."""

    def check_call(self, gradient: Any, batch: Batch, prepared: PreparedBatch | None, loss_fn: Any) -> None:
        """Raise an error for a call, which is then raised on all ranks. Not collective.

        ``prepared`` is None if the batch could not be prepared, for which there is an error already.
        """

    def surround_steps(self, steps: Steps, call: Call) -> Steps:
        """Yield each microbatch of a call once. Between two of them, the forward and backward of the first has run.

        This is not called for a `JointLoss` and a pipeline, whose microbatches run together. A microbatch that is left
        out, or yielded twice, is an error.

        ``call.model`` is what the loss gets, and ``call.plan`` has the microbatches. ``p.grad`` has what was added so
        far in this update, by earlier calls too. Under DDP it has the sum of all ranks behind a call's last microbatch,
        and after `open` only in `after_finalize`.

        A step that you keep, keeps its microbatch in memory.
        """
        return steps

    def after_finalize(self, gradient: Any, update: Update) -> None:
        """Run when an update is complete, and ``p.grad`` is its gradient. An error is raised on this rank alone."""

    def after_drop(self, gradient: Any) -> None:
        """Run when the open update, if there is one, was dropped: by `discard`, or since a call failed.

        Its samples may be given again, in another cut.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, under names that no other extension uses.

        It becomes part of ``gradient.state_dict()``, which you save: the state of a `Learner` does not have it.
        """
        return {}

    def load_state_dict(self, gradient: Any, state: dict[str, Any]) -> None:
        """Remove from a state the entries of this extension, ``state.pop(name)``. Entries that remain are refused.

        The state of a run without this extension lacks the name.
        """


class Extensions:
    """The extensions of an accumulator, by event.

    Raises:
        PlanError: Something that is no `Extension`, or one that has an accumulator.
    """

    def __init__(self, extensions: Sequence[Extension]) -> None:
        _check_extensions(extensions)
        self.all = tuple(extensions)
        self.reserve_for = self._methods("reserve_for")
        self.tune = self._methods("tune")
        self.before_call = self._methods("before_call")
        # A check that plans the call anew comes last, since the others do not run again.
        self.check_call = sorted(self._methods("check_call"), key=attrgetter("__self__.plans_anew"))
        # After a microbatch, the first runs first.
        self.surround_steps = _watched(self._methods("surround_steps")[::-1])
        self.after_finalize = self._methods("after_finalize")
        self.after_drop = self._methods("after_drop")

    def _methods(self, event: str) -> list[Callable[..., Any]]:
        """Return the methods of the extensions that override an event."""
        base = getattr(Extension, event)
        overriding = [extension for extension in self.all if getattr(type(extension), event) is not base]
        return list(map(attrgetter(event), overriding))

    def attach(self, gradient: Any) -> None:
        """Attach the extensions to their accumulator."""
        for extension in self.all:
            extension.attach(gradient)
        for extension in self.all:
            extension.is_attached = True

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all extensions, in one. Raises `PlanError` if two use one name."""
        states: dict[str, Any] = {}
        for extension in self.all:
            for name, value in extension.state_dict().items():
                if name in states:
                    raise PlanError(f"two extensions save a state as {name!r}; give each a name of its own")
                states[name] = value
        return states

    def load_state_dict(self, gradient: Any, state: Mapping[str, Any]) -> dict[str, Any]:
        """Let each extension load its part of a state. Return the entries that remain."""
        remaining = dict(state)
        for extension in self.all:
            extension.load_state_dict(gradient, remaining)
        return remaining


def _check_extensions(extensions: Sequence[Extension]) -> None:
    """Raise `PlanError` for an object that cannot be attached as an extension."""
    if len(set(map(id, extensions))) < len(extensions):
        raise PlanError("an extension is given twice; give it once")
    for extension in extensions:
        if not isinstance(extension, Extension):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(f"extensions has a {type(extension).__name__}; give objects of megabatch.Extension")
        if extension.is_attached:
            raise PlanError(
                f"a {type(extension).__name__} in extensions belongs to another accumulator; give each its own"
            )


def _watched(surrounding: list[Callable[..., Steps]]) -> list[Callable[..., Steps]]:
    """Return the surrounding generators between two others, which check that every step passes through once.

    ``note`` is next to the accumulator's own steps and runs first. ``check`` is what the accumulator iterates over.
    """
    if not surrounding:
        return []
    waiting: list[int] = []

    def note(steps: Steps, call: Call) -> Steps:
        waiting.clear()
        for step in steps:
            waiting.append(step.index)
            yield step
            del step
        waiting.append(END)

    def check(steps: Steps, call: Call) -> Steps:
        for step in steps:
            if waiting != [step.index]:
                raise MegabatchError(TWICE)
            waiting.clear()
            yield step
            del step
        if waiting != [END]:
            raise MegabatchError(TOO_FEW)

    return [note, *surrounding, check]

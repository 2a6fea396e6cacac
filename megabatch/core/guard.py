"""Guards watch the calls of an update, and the errors of its ranks. Those of this file watch as little as possible."""

import contextlib
from collections.abc import Generator
from typing import Any

from megabatch.core.call import MicrobatchPlanner, MicrobatchStep, PreparedBatch
from megabatch.core.contract import LossHooks, Term, terms_of
from megabatch.core.extension import Call
from megabatch.core.mesh import DataRanks
from megabatch.inspection.error_kinds import is_out_of_memory, out_of_memory_error


class CallGuard:
    """Runs the microbatches of calls, and may watch for code that would make their gradient another one."""

    def is_new(self, loss_fn: Any) -> bool:
        """Return True for a loss that is to be tried, since no call had it before."""
        return False

    def check(self) -> None:
        """Raise `MegabatchError` if gradients or parameters have changed since the last call."""

    def check_weights(self, planner: MicrobatchPlanner, prepared: PreparedBatch, hooks: LossHooks) -> None:
        """Raise `LossContractError` for a ``weigh`` that counts padding. Not collective."""

    def enter(self, *, is_new: bool) -> None:
        """Note the state of the model before a call. ``is_new`` is True for the first call of a loss."""

    def leave(self, total_factor: float = 1.0) -> None:
        """Note the state of the model after a call, whose last total was multiplied by ``total_factor``."""

    def release(self) -> None:
        """Forget the state after the last call."""

    def run_step(self, gradient: Any, step: MicrobatchStep, call: Call) -> list[dict[str, Term]]:
        """Run forward and backward of one microbatch. Return its sums, in one part or in several."""
        return [call.opened.backward(terms_of(call.loss_fn(call.model, step.microbatch)), step)]


class ErrorGuard:
    """Makes running out of memory an error of one line. On several ranks, `ErrorBroadcast` takes its place."""

    def __init__(self, ranks: DataRanks) -> None:
        self._ranks = ranks

    @contextlib.contextmanager
    def listening(self, body: str | None = None) -> Generator[None]:
        """Surround code that may run out of memory.

        ``body`` is the name of a call or of code of the user's. `ErrorBroadcast` tells other ranks any error in it.
        """
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                raise out_of_memory_error(error, self._ranks.num_all) from error
            raise

    def surround_body(self, body: str) -> contextlib.AbstractContextManager[None]:
        """Surround code of the user's, whose errors stay as they are on one rank."""
        return contextlib.nullcontext()

    def agreeing(self) -> contextlib.AbstractContextManager[None]:
        """Surround an exchange between ranks. A single rank exchanges nothing."""
        return contextlib.nullcontext()

    def check(self) -> None:
        """Raise an error that another rank has broadcast by now."""

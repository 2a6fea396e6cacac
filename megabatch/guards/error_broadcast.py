"""Broadcast of errors: a rank that others wait for sends them its error, and all raise it.

It is used when memory runs out, when DDP waits for a gradient that never comes, and when a call or the body of a
user's own microbatch fails on one rank.

A collective that one rank has left half-way cannot be canceled, so the update is lost, and the processes too if one of
them waits there. The message goes through the store with which the ranks started. The store's host may be gone or
frozen, so only threads use it, and each wait for them has a time limit.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, cast

import torch

from megabatch.core.guard import ErrorGuard
from megabatch.core.mesh import DataRanks
from megabatch.errors import (
    LossContractError,
    MegabatchError,
    MicrobatchLimit,
    PlanError,
    PositionError,
    Shortage,
    in_one_line,
)
from megabatch.inspection.error_kinds import (
    agreeing,
    is_known_to_all,
    is_of_message,
    is_out_of_memory,
    mark_known,
    out_of_memory_error,
    whoever_runs,
)
from megabatch.torch_private.process_groups import default_store, groups_of_process

# Keys of the store.
NUMBER, TOLD, HEARD = "megabatch: broadcasts", "megabatch: told", "megabatch: heard"
# Other errors are a MegabatchError.
KINDS: dict[str, type[MegabatchError]] = {"loss": LossContractError, "plan": PlanError}
# The store goes away with the rank that holds it, or with the process group.
STORE_FAILS = (RuntimeError, ValueError)
# Seconds from one look into the store to the next.
SECONDS_TO_LOOK = 0.5
# Seconds in which the store has to answer.
SECONDS_TO_ANSWER = 1.0
# A rank gives the others this long before it leaves, since the store may be in its process.
SECONDS_TO_HEAR = 5.0
# A collective that has not broken by itself is aborted after this.
SECONDS_TO_WAKE = 3.0


class ErrorBroadcast(ErrorGuard):
    """Sends this rank's error to the other ranks, which raise it within `SECONDS_TO_HEAR`, wherever they wait.

    The constructor is collective and exchanges one small message. Ranks of other groups in the job do not hear it.
    """

    def __init__(self, ranks: DataRanks, device: torch.device) -> None:
        super().__init__(ranks)
        self._device = device
        # The received message.
        self._heard: str | None = None
        self._is_listening = False
        # Errors of bodies that ranks have told each other, after which a program may go on.
        self._num_survived = 0
        # A connection serves one call at a time, and the main thread's may take long.
        self._own: Any = None
        number = 0.0
        with contextlib.suppress(*STORE_FAILS):
            number = float(_store_of_process().add(NUMBER, 1))
        # The job has no other broadcast of this number.
        (self._number,) = max(ranks.exchange_numbers([number]))
        self.number = int(self._number)

    @contextlib.contextmanager
    def listening(self, body: str | None = None) -> Generator[None]:
        """Surround code that may wait for other ranks. Raise their `MegabatchError` in place of its consequences.

        ``body`` is the name of code of the user's: the other ranks are then told any error in it. Within another such
        context this adds nothing.
        """
        if self._is_listening:
            yield
            return
        self._is_listening = True
        ended = threading.Event()
        listener = threading.Thread(target=self._listen, args=(ended,), name="megabatch-errors", daemon=True)
        listener.start()
        try:
            yield
        except Exception as error:
            ended.set()
            if (cause := self._cause(error, body, answers=self._has_ended(listener))) is error:
                raise
            raise cause from error
        finally:
            self._is_listening = False
            if not ended.is_set():
                ended.set()
                self._has_ended(listener)
        if self._heard is not None:
            raise self._stop()

    def surround_body(self, body: str) -> contextlib.AbstractContextManager[None]:
        """Surround code of the user's: the other ranks are told any error in it."""
        return self.listening(body)

    def agreeing(self) -> contextlib.AbstractContextManager[None]:
        """Surround an exchange between ranks whose outcome is an error on all of them, or on none."""
        return agreeing()

    def check(self) -> None:
        """Raise the `MegabatchError` of another rank that has told its error by now."""
        self._in_a_thread(self._look, SECONDS_TO_ANSWER)
        if self._heard is not None:
            raise self._stop()

    def _cause(self, error: Exception, body: str | None, *, answers: bool) -> Exception:
        """Return the reason why this rank must stop. Send it to the other ranks if this rank is the first to know."""
        if is_out_of_memory(error):
            error = out_of_memory_error(error, self._ranks.num_all)
        # Ranks are in different calls also after an error of one of them, which then is the reason.
        is_position = isinstance(error, PositionError)
        if is_position and self._has_heard(answers=answers):
            return self._stop()
        if (
            isinstance(error, MegabatchError)
            and not is_known_to_all(error)
            and (error.shortage is not None or error.strands_others)
        ):
            if self._heard is None:
                speaker = "" if error.shortage or is_position else f"{whoever_runs(self._ranks.num_all)}: "
                self._tell(f"{speaker}{error}", error.shortage)
                # The other ranks no longer wait for collectives of this process then.
                _abort()
            return error
        is_own = body is not None and not is_of_message(error) and not is_position
        if not is_own:
            return self._stop() if self._has_heard(answers=answers) else error
        # All ranks may raise this error, and then the program may go on.
        if self._heard is None:
            self._tell(self._describe(error, body or ""), None, kind=_kind_of(error))
        self._heard, self._num_survived = None, self._num_survived + 1
        mark_known(error)
        return error

    def _has_heard(self, *, answers: bool) -> bool:
        """Return True if another rank has told its error. Look into the store if it still answers."""
        if self._heard is None and answers:
            self._in_a_thread(self._look, SECONDS_TO_ANSWER)
        return self._heard is not None

    def _describe(self, error: Exception, body: str) -> str:
        """Return the line for the other ranks about an error of this rank."""
        process = whoever_runs(self._ranks.num_all)
        if isinstance(error, MegabatchError):
            return f"{process}: {error}"
        return f"{process} failed in {body} ({in_one_line(error)}); mend that, and start the update again"

    def _tell(self, text: str, shortage: Shortage | None, *, kind: str | None = None) -> None:
        """Tell the others, and wait for as long as they may need to hear.

        ``kind`` names the class of an error after which the program may go on.
        """
        message = json.dumps([text, shortage, kind])
        self._in_a_thread(lambda: self._send(message), SECONDS_TO_HEAR + SECONDS_TO_ANSWER)

    def _send(self, message: str) -> None:
        """Tell the others, and wait until they have heard."""
        store, heard = self._store(), self._key(HEARD)
        # The first message stays in the store; another rank was faster if it is not this one.
        if store.compare_set(self._key(TOLD), "", message).decode() != message:
            store.add(heard, 1)
        deadline = time.monotonic() + SECONDS_TO_HEAR
        while store.add(heard, 0) < self._ranks.num_all - 1 and time.monotonic() < deadline:
            time.sleep(0.02)

    def _listen(self, ended: threading.Event) -> None:
        with contextlib.suppress(*STORE_FAILS):
            while not ended.wait(SECONDS_TO_LOOK):
                self._look()
                if self._heard is not None:
                    if not ended.wait(SECONDS_TO_WAKE):
                        _abort()
                    return

    def _look(self) -> None:
        store = self._store()
        if store.check([self._key(TOLD)]):
            self._heard = store.get(self._key(TOLD)).decode()
            store.add(self._key(HEARD), 1)

    def _stop(self) -> MegabatchError:
        """Return the received message as an error. Abort collectives that wait on a device."""
        if self._device.type != "cpu":
            _abort()
        text, shortage, kind = json.loads(cast(str, self._heard))
        if kind is not None:
            self._heard, self._num_survived = None, self._num_survived + 1
        heard = KINDS.get(kind or "", MegabatchError)(text)
        mark_known(heard)
        if shortage is not None:
            rank, samples, bound = shortage
            heard.shortage = Shortage(rank, tuple(samples), None if bound is None else MicrobatchLimit(*bound))
        return heard

    def _in_a_thread(self, work: Callable[[], None], seconds: float) -> None:
        def quiet() -> None:
            with contextlib.suppress(*STORE_FAILS):
                work()

        thread = threading.Thread(target=quiet, name="megabatch-errors", daemon=True)
        thread.start()
        self._has_ended(thread, seconds)

    def _has_ended(self, thread: threading.Thread, seconds: float = SECONDS_TO_ANSWER) -> bool:
        """Return True if a thread that uses the store ends in time. If it does not, it keeps the connection."""
        thread.join(seconds)
        if thread.is_alive():
            self._own = None
        return not thread.is_alive()

    def _key(self, name: str) -> str:
        return f"{name} ({self._number:.0f}, {self._num_survived})"

    def _store(self) -> Any:
        store = self._own
        if store is None:
            store = self._own = _store_of_process().clone()
        return store


def _kind_of(error: Exception) -> str:
    return next((name for name, kind in KINDS.items() if isinstance(error, kind)), "")


def _store_of_process() -> Any:  # torch's stubs leave out clone()
    return default_store()


def _abort() -> None:
    """Break the collectives that wait on a device; those of gloo break when a process ends."""
    for group in groups_of_process():
        # Some backends cannot abort.
        with contextlib.suppress(RuntimeError):
            cast(Any, group).abort()

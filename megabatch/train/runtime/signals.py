"""Stop: SIGTERM and SIGINT end a run after the update that runs, with a checkpoint, and before the first one at once.

Ranks get a signal at different times, or only some of them do, so they agree after each update. A second signal ends
the process whatever it is doing; the main thread may wait in a collective then, so a thread hears of signals too.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from multiprocessing import util
from types import FrameType
from typing import NoReturn

from megabatch.train.runtime.exit import StoppedError, end_children, leave_now, leave_to_parent, words_of
from megabatch.train.runtime.ranks import Ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SECONDS_OF_ONE = 1.0  # in which signals are one: of torchrun's own and the one it passes on, both reach a process
SECONDS_TO_LEAVE = 3.0  # in which the main thread leaves by itself, before the first update


class Stop:
    """Whether this run is to stop, and by which signal.

    Args:
        speaks: Whether this process says that it is ended, where the others cannot be asked who does.
    """

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        self._heard: signal.Signals | None = None
        self._ended = threading.Event()
        self.has_begun = False  # set with the first update, from which on a signal waits for the end of one
        self.agreed: signal.Signals | None = None

    def check(self) -> None:
        """Raise `StoppedError` where this process has got a signal, of which may come whatever else it has met."""
        if self._heard is not None:
            raise StoppedError(self._heard) from None

    def agree(self, ranks: Ranks) -> bool:
        """Whether any rank has got a signal; collective, between two updates."""
        asked = ranks.sum([float(self._heard == each) for each in SIGNALS])
        self.agreed = next((each for each, number in zip(SIGNALS, asked, strict=True) if number), None)
        return self.agreed is not None

    @contextlib.contextmanager
    def listening(self) -> Generator[None, None, None]:
        """Surrounds a run, once: signals are the run's, and whoever had them before gets them back.

        A signal that is ignored, as a shell does for what it runs in the background, stays so.
        """
        before = {each: signal.getsignal(each) for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN}
        read, write = os.pipe()
        os.set_blocking(write, False)
        pipe_before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        util.register_after_fork(self, Stop._begin_fork)
        thread = threading.Thread(target=self._listen, args=(read,), name="megabatch-stop", daemon=True)
        thread.start()
        for each in before:
            signal.signal(each, self._hear)
        try:
            yield
        finally:
            self._ended.set()
            for each, handler in before.items():
                signal.signal(each, handler)
            signal.set_wakeup_fd(pipe_before)
            os.close(write)  # which ends the thread
            thread.join()
            os.close(read)
            end_children()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, as soon as it runs Python."""
        self._heard = self._heard or signal.Signals(number)
        if not self.has_begun:
            raise StoppedError(self._heard)

    def _listen(self, read: int) -> None:
        """In a thread of its own, at once."""
        first: float | None = None  # on time.monotonic's clock
        while numbers := os.read(read, 1):
            if (number := numbers[0]) not in SIGNALS:
                continue
            if first is None:
                first = time.monotonic()
                if not self.has_begun:
                    threading.Thread(target=self._leave_soon, args=(number,), daemon=True).start()
            elif time.monotonic() - first > SECONDS_OF_ONE:
                self._leave(number)

    def _leave_soon(self, number: int) -> None:
        if not self._ended.wait(SECONDS_TO_LEAVE) and not self.has_begun:  # it may wait for a rank that never comes
            self._leave(number)

    def _leave(self, number: int) -> NoReturn:
        if self._speaks:
            print(words_of(number), file=sys.stderr, flush=True)
        leave_now(128 + number)

    def _begin_fork(self) -> None:
        if not self._ended.is_set():
            leave_to_parent()

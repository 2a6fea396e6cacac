"""Signals: SIGTERM and SIGINT stop a run after its current update, with a checkpoint; before the first one, at once.

Ranks get a signal at different times, or only some of them do, so they agree after each update. A second signal ends
the process at once. The main thread may wait in a collective then, so a thread receives signals too.
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

from megabatch.train.runtime.console import print_line
from megabatch.train.runtime.exit import (
    StoppedError,
    ignore_signals_in_worker,
    interruption_text,
    kill_workers,
    leave_now,
)
from megabatch.train.runtime.ranks import Ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Ends the numbers of signals in the pipe.
END = b"\0"
# torchrun passes a signal on that reaches the process directly too: both count as one.
SECONDS_OF_ONE = 1.0
# Seconds for the main thread to leave by itself before the first update.
SECONDS_TO_LEAVE = 3.0


class StopSignal:
    """The signal that stops this run, if any.

    Args:
        speaks: Print what a signal does, without asking the other ranks; only one of them speaks.
        folder: Of the run, which a message names.
    """

    def __init__(self, *, speaks: bool, folder: str = "") -> None:
        self._speaks, self._folder = speaks, folder
        self._received: signal.Signals | None = None
        self._ended = threading.Event()
        # True from the first update on. A signal then waits for the end of an update.
        self.has_begun = False
        self.agreed: signal.Signals | None = None
        # time.monotonic() from which this rank asks for a checkpoint.
        self.save_at: float | None = None
        # True once a rank has asked for it.
        self.is_save_due = False

    def check(self) -> None:
        """Raise `StoppedError` if this process has received a signal: it explains any other error."""
        if self._received is not None:
            raise StoppedError(self._received, self._folder) from None

    def agree(self, ranks: Ranks) -> bool:
        """Return True if any rank has received a signal. Collective, between two updates."""
        is_due = self.save_at is not None and time.monotonic() >= self.save_at
        *counts, num_due = ranks.sum([*(float(self._received == number) for number in SIGNALS), float(is_due)])
        self.is_save_due = num_due > 0
        self.agreed = next((number for number, count in zip(SIGNALS, counts, strict=True) if count), None)
        return self.agreed is not None

    @contextlib.contextmanager
    def handling(self) -> Generator[None, None, None]:
        """Handle signals while the block runs. Signals that were ignored, as in a shell's background, stay ignored."""
        before = {
            number: signal.getsignal(number) for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
        }
        read, write = os.pipe()
        os.set_blocking(write, False)
        pipe_before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        util.register_after_fork(self, StopSignal._after_fork)
        thread = threading.Thread(target=self._read_pipe, args=(read,), name="megabatch-signals", daemon=True)
        thread.start()
        for number in before:
            signal.signal(number, self._receive)
        try:
            yield
        finally:
            self._ended.set()
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(pipe_before)
            # Closing does not end the thread while a forked worker has the pipe too.
            os.write(write, END)
            thread.join()
            os.close(write)
            os.close(read)
            kill_workers()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, as soon as it runs Python code."""
        self._received = self._received or signal.Signals(number)
        if not self.has_begun:
            raise StoppedError(self._received, self._folder)

    def _read_pipe(self, read: int) -> None:
        """In a thread, at once."""
        first: float | None = None
        while (received := os.read(read, 1)) != END:
            if (number := received[0]) not in SIGNALS:
                continue
            if first is None:
                first = time.monotonic()
                if not self.has_begun:
                    threading.Thread(target=self._leave_soon, args=(number,), daemon=True).start()
                elif self._speaks:
                    name = signal.Signals(number).name
                    _say(f"megabatch: {name}: the run stops after this update; another, a second later, ends it now")
            elif time.monotonic() - first > SECONDS_OF_ONE:
                self._leave(number)

    def _leave_soon(self, number: int) -> None:
        """End the process from a thread: the main thread may wait for a rank that never comes."""
        if not self._ended.wait(SECONDS_TO_LEAVE) and not self.has_begun:
            self._leave(number)

    def _leave(self, number: int) -> NoReturn:
        if self._speaks:
            _say(interruption_text(number, self._folder))
        leave_now(128 + number)

    def _after_fork(self) -> None:
        if not self._ended.is_set():
            ignore_signals_in_worker()


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print_line(line, sys.stderr)

"""Leaving: how a process ends that has been told to, or cannot go on, and what becomes of those that it has forked."""

import multiprocessing
import os
import signal
from typing import NoReturn

CRASHED, FAILED, INTERRUPTED, UNREAD = 1, 2, 130, 141  # exit statuses; the last two as a shell's SIGINT and SIGPIPE


class StoppedError(KeyboardInterrupt):
    """A signal has come where a run can be left at once."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def end_of(error: KeyboardInterrupt) -> tuple[str, int]:
    """What is to be said of a signal, and the exit status: a shell's, 130 for SIGINT and 143 for SIGTERM."""
    number = error.number if isinstance(error, StoppedError) else int(signal.SIGINT)
    return words_of(number), 128 + number


def words_of(number: int) -> str:
    """Which signal it was, and how to go on."""
    name = signal.Signals(number).name
    return f"megabatch: ended by {name}; `megabatch train RUN_FOLDER` goes on from the last checkpoint, or begins again"


def drop_output() -> None:
    """Let stdout end nowhere, so that what is still in its buffer breaks nothing when the interpreter closes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def leave_now(status: int) -> NoReturn:
    """End this process from any of its threads, whatever the others are doing."""
    end_children()
    os._exit(status)


def end_children() -> None:
    """End the processes that load samples; one that is stuck in a sample of the user's would stay for ever."""
    for child in multiprocessing.active_children():
        child.kill()


def leave_to_parent() -> None:
    """In a process that loads samples: a signal to all of the group is its parent's, who may still need samples.

    It ends when it is told to, or sees that its parent has gone.
    """
    signal.set_wakeup_fd(-1)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)

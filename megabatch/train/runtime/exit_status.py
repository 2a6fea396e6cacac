"""Exit statuses, and the end of a process whose output nobody reads. Commands that need no torch import it."""

import os

CRASHED, FAILED, INTERRUPTED, UNREAD = 1, 2, 130, 141  # the last two as a shell's SIGINT and SIGPIPE


def drop_output() -> None:
    """Send stdout nowhere, so that its buffer breaks nothing when the interpreter closes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

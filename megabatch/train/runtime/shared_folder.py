"""Shared folder: replicas of a run take turns to write to its folder, and one that dies is followed by another.

Bytes of ``.lock`` are locked: RUN by each replica as long as it runs, which keeps other runs out, ROWS while rows and
small files are written, CHECKPOINT while a checkpoint is. The kernel frees them when a process dies.
"""

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from uuid import uuid4

RUN, ROWS, CHECKPOINT = range(3)
ID_BYTES = 32
SECONDS_BETWEEN_TRIES = 0.05
# Seconds to wait for a replica that was stopped in its turn, for example.
SECONDS_TO_WAIT = {ROWS: 30.0, CHECKPOINT: 600.0}


class SharedFolder:
    """A replica's part in the folder of a run. Every rank of the replica has one, and its main rank takes turns."""

    def __init__(self) -> None:
        # True if this replica writes the rows and checkpoints that all replicas have.
        self.is_writer = False
        # True if other replicas have made updates since they began or resumed the run.
        self.is_joined = False
        self._lock = -1

    def enter(self, lock: int) -> str:
        """Keep other runs out until this process ends. Return an id of the folder.

        Args:
            lock: File descriptor of ``.lock``. It stays open: closing it, or another one of the file, frees its locks.

        Raises:
            OSError: Another run has the folder (EACCES, EAGAIN), or its file system has no locks.
        """
        fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, RUN)
        self._lock = lock
        with self.turn(ROWS):
            if os.fstat(lock).st_size < ID_BYTES:
                os.pwrite(lock, uuid4().hex.encode(), 0)
                os.fsync(lock)
            return os.pread(lock, ID_BYTES, 0).decode()

    def take(self, byte: int) -> None:
        """Wait for a turn. Signals are handled meanwhile. Raises `TimeoutError`, an `OSError`."""
        deadline = time.monotonic() + SECONDS_TO_WAIT[byte]
        while True:
            try:
                return fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another replica has been writing for {SECONDS_TO_WAIT[byte]:.0f} s") from None
                time.sleep(SECONDS_BETWEEN_TRIES)

    def give(self, byte: int) -> None:
        """End a turn."""
        fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, byte)

    @contextmanager
    def turn(self, byte: int) -> Generator[None]:
        """Keep the other replicas from writing while the block runs."""
        self.take(byte)
        try:
            yield
        finally:
            self.give(byte)

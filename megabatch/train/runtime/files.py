"""Patient: a file that grows by whole pieces; for what a full disk has no room, there will be room later."""

import contextlib
import errno
import os
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of the disk, a user's share of it, a file


class Patient:
    """Appends to a file. What cannot be written waits in memory, and goes before what comes later; of a piece that was
    cut off nothing stays in the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = b""

    def add(self, piece: bytes) -> None:
        """Write a piece, or let it wait."""
        self._waiting += piece
        with contextlib.suppress(OSError):
            self.flush()

    def flush(self) -> None:
        """Write what waits. Raises `OSError` where that cannot be done; it goes on waiting."""
        if not self._waiting:
            return
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            write_all(descriptor, self._waiting)
        finally:
            os.close(descriptor)
        self._waiting = b""


def write_all(descriptor: int, data: bytes) -> None:
    """Append all of it, or nothing."""
    size = os.fstat(descriptor).st_size
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise

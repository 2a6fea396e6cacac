"""Write small files so that a crash, a power cut or a full disk leaves no half-written one."""

import contextlib
import errno
import os
import tempfile
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's quota, the file


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one, even after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write_synced(temporary, text)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_synced(path: Path, text: str) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_new(path: Path, text: str) -> None:
    """Write a file, whole or not at all. Raises `FileExistsError` if it exists."""
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except (OSError, UnicodeError):
            path.unlink(missing_ok=True)
            raise


def is_writable(folder: Path) -> bool:
    """Return True if files can be created in the folder. Creates an anonymous one to find out."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


class RetryingAppender:
    """Append whole pieces to a file. Pieces that find no room wait in memory and go first next time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending = b""

    def append(self, piece: bytes) -> None:
        """Append a piece, or keep it for later."""
        self._pending += piece
        with contextlib.suppress(OSError):
            self.flush()

    def flush(self) -> None:
        """Write what is pending. Raises `OSError` if that fails; everything stays pending then."""
        if not self._pending:
            return
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            _append_all_or_nothing(descriptor, self._pending)
        finally:
            os.close(descriptor)
        self._pending = b""


def _append_all_or_nothing(descriptor: int, data: bytes) -> None:
    size, left = os.fstat(descriptor).st_size, memoryview(data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise

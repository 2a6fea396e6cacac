"""A disk without room, for a run in processes of its own: filled up after one update, and emptied after another.

Where the system lets us, a small file system in memory that is filled by a file. Else a limit on the size of files,
which the process that writes sets itself: like a full disk it lets a part of a write through, and then fails.
"""

import contextlib
import subprocess
from collections.abc import Generator
from pathlib import Path

OWN = """
import os, resource
from pathlib import Path
import megabatch.train.checkpoints.writer

megabatch.train.checkpoints.writer.SECONDS_BETWEEN_TRIES = (0.1, 0.1)
FULL, EMPTY, MOUNTED, BALLAST = {full}, {empty}, {mounted}, Path("{ballast}")

def after(event):
    if MOUNTED and not event.is_main:
        return
    if event.step == FULL:
        fill(event.folder)
    if event.step == EMPTY:
        BALLAST.unlink() if MOUNTED else resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

def fill(folder):
    if not MOUNTED:  # a row more fits into half of what is left
        size = (folder / "metrics.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
        return
    with BALLAST.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return
"""


@contextlib.contextmanager
def small_disk(folder: Path) -> Generator[tuple[Path, bool], None, None]:
    """A folder to write runs to, and whether it is a file system of its own."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:  # no such command
        mounted = False
    try:
        yield folder, mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def filling(path: Path, disk: Path, *, mounted: bool, full: int, empty: int) -> str:
    """The key that lets a run fill the disk after the update ``full``, and empty it after ``empty``."""
    path.write_text(OWN.format(full=full, empty=empty, mounted=mounted, ballast=disk / "ballast"))
    return f"{path}:after"

"""Naming: where a run keeps its checkpoints, and what names one of them.

``checkpoints/step-N`` is a whole checkpoint, ``step-N.tmp`` one that is being written or deleted.
``checkpoints/latest`` names the folder to go on from, ``checkpoints/best`` that of the lowest watched loss.
"""

import os
import re
from pathlib import Path

POINTER = "latest"
BEST = "best"
META = "meta.json"
OPEN = "open"  # folder of an update that a signal has stopped inside
UNFINISHED = ".tmp"
STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")


def checkpoints_of(folder: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return folder / "checkpoints"


def path_of(folder: Path, step: int) -> Path:
    """Where a run keeps the checkpoint of that step."""
    return checkpoints_of(folder) / f"step-{step}"


def beside(whole: Path) -> Path:
    """Where a checkpoint is until it is whole."""
    return whole.with_name(whole.name + UNFINISHED)


def step_of(name: str) -> int | None:
    """The step of a checkpoint's name; None for any other, an unfinished one's among them."""
    found = STEP.fullmatch(name)
    return None if found is None else int(found[1])


def steps_of(folder: Path) -> list[int]:
    """The steps of the checkpoints that there are, whole or damaged, the first one first."""
    names = [path.name for path in checkpoints_of(folder).glob("step-*") if path.is_dir()]
    return sorted(step for name in names if (step := step_of(name)) is not None)


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has come to its first checkpoint, whatever became of it."""
    return (checkpoints_of(folder) / POINTER).exists() or bool(steps_of(folder))


def named_by(pointer: Path) -> str:
    """The name in the pointer's file; "" where there is no such file, or it cannot be read."""
    try:
        return pointer.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def step_named_by(pointer: Path) -> int | None:
    """The step that the pointer names; None where it names none."""
    return step_of(named_by(pointer))


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old text or the new one, never a part, even where power is lost."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write_through(temporary, text)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_new(path: Path, text: str) -> None:
    """Write a small file that is not there yet, whole or not at all. Raises `FileExistsError` where it is."""
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except (OSError, UnicodeError):
            path.unlink(missing_ok=True)
            raise


def write_through(path: Path, text: str) -> None:
    """Write a small file, and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())

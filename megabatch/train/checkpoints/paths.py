"""Paths: where a run keeps its checkpoints, and the pointers that name one of them.

``checkpoints/step-N`` is a whole checkpoint, ``step-N.tmp`` one that is being written or deleted.
``checkpoints/latest`` names the checkpoint to resume from, ``checkpoints/best`` the one with the lowest watched loss.
"""

import re
from pathlib import Path

from megabatch.errors import MegabatchError
from megabatch.train.runtime.files import CONFIG, UNFINISHED, check_own_path, is_file, read_file

POINTER = "latest"
BEST = "best"
META = "meta.json"
STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")


def recipe_of(folder: Path) -> Path:
    """Return the path of a run's recipe. Raises `MegabatchError` if the folder has no run."""
    if not is_file(folder / CONFIG):
        raise MegabatchError(
            f"{folder} is a folder without {CONFIG}, so no run to resume; give the path of a TOML file"
        )
    return folder / CONFIG


def recipe_named(path: Path) -> Path:
    """Return the recipe that a command line names: the file itself, or that of a run's folder."""
    return recipe_of(path) if path.is_dir() else path


def checkpoints_of(folder: Path) -> Path:
    """Return the folder of a run's checkpoints. Raises `MegabatchError` for a link, which leads out of the run."""
    check_own_path(folder / "checkpoints", "move the run as a whole")
    return folder / "checkpoints"


def path_of(folder: Path, step: int) -> Path:
    return checkpoints_of(folder) / f"step-{step}"


def unfinished_of(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name + UNFINISHED)


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's name; None for any other name."""
    match = STEP.fullmatch(name)
    return None if match is None else int(match[1])


def steps_of(folder: Path) -> list[int]:
    """Return the steps of a run's checkpoints, valid or damaged, in order."""
    names = [path.name for path in checkpoints_of(folder).glob("step-*") if path.is_dir() and not path.is_symlink()]
    return sorted(step for name in names if (step := step_of(name)) is not None)


def has_checkpoint(folder: Path) -> bool:
    """Return True if a run has ever written a checkpoint, as far as its folder shows."""
    return (checkpoints_of(folder) / POINTER).exists() or bool(steps_of(folder))


def holds_a_run(folder: Path) -> MegabatchError:
    return MegabatchError(
        f"{folder} already holds a run; resume it with --run.resume=true, or choose another run.folder"
    )


def named_by(pointer: Path) -> str:
    """Return the text of a pointer; "" if it cannot be read."""
    try:
        return read_file(pointer).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def step_named_by(pointer: Path) -> int | None:
    return step_of(named_by(pointer))

"""Meta: what a checkpoint says of itself, under a seal; and whether a run is the one that it was made by.

``meta.json`` has the sums of the checkpoint's other files, and its own: an edited one is seen as a damaged one is.
"""

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
import transformers

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.checkpoints.checksums import Sum, Sums
from megabatch.train.checkpoints.paths import META, POINTER, step_of, write_through

Meta = dict[str, Any]

FILES, SEAL = "files", "sha256"  # keys of META: the sums of the other files; the sum of all the rest of it
BEST_ONLY = "best_only"  # key of META: true in a checkpoint that is kept for as long as it is the best, and no longer
POSITIONS = ("updates", "watch")  # parts of META that say where a run is
TITLES = {  # part of META → what another value in it makes of a run, and how its keys are named
    "settings": ("recipe", ""),
    "model_config": ("model", "model.config."),
    "parameters": ("model", "the parameter "),
    "data": ("data set", "data: "),
    "derived": ("recipe", ""),  # last: it differs where one of the others does
}
SAY_LITTLE = "fingerprint"  # how keys begin that differ wherever something does; any other difference says more
MISSING = "missing"
NOTHING: tuple[object, ...] = (None, {}, [])
MAX_CHARACTERS = 80  # of a value in a message


class DamagedError(MegabatchError):
    """A checkpoint that is not as it was written; ``reason``: in what."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path} is damaged ({reason}); name an earlier step-N folder in the file checkpoints/{POINTER}, "
            "or start in a new run.folder"
        )
        self.reason = f"{path.name}: {reason}" if path.name == META else reason


def write_meta(checkpoint: Path, meta: Meta, sums: Sums) -> None:
    """Write ``meta.json``, the last file of a checkpoint."""
    files = {name: each._asdict() for name, each in sums.items()}
    text = json.dumps({**meta, FILES: files, SEAL: ""}, indent=1)
    write_through(checkpoint / META, json.dumps({**json.loads(text), SEAL: seal_of(json.loads(text))}, indent=1))


def seal_of(meta: Meta) -> str:
    """The SHA-256 of all that ``meta.json`` says but this."""
    rest = {key: value for key, value in meta.items() if key != SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_sums(checkpoint: Path) -> Sums | None:
    """The sums of the checkpoint's files; None where an earlier version has written it, without any.

    Raises `DamagedError` where ``meta.json`` is damaged.
    """
    meta = read_sealed(checkpoint)
    if FILES not in meta:
        return None
    try:
        return {name: Sum(**each) for name, each in meta[FILES].items()}
    except (AttributeError, TypeError) as error:  # of a later version
        raise DamagedError(checkpoint / META, in_one_line(error)) from None


def read_meta(checkpoint: Path) -> Meta:
    """What the checkpoint says of itself. Raises `DamagedError` where that is not what was written."""
    meta = read_sealed(checkpoint)
    missing = [part for part in (*TITLES, *POSITIONS) if part not in meta]
    if missing:
        raise DamagedError(checkpoint / META, f"{missing[0]} is missing")
    if not all(isinstance(meta[part], dict) for part in (*TITLES, *POSITIONS)):
        raise DamagedError(checkpoint / META, "a part of it is no table")
    return {key: value for key, value in meta.items() if key not in (FILES, SEAL)}


def read_sealed(checkpoint: Path) -> Meta:
    """All that ``meta.json`` holds, its seal unbroken; of an earlier version, without one."""
    path = checkpoint / META
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedError(path, "it is not there") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(path, in_one_line(error)) from None
    if not isinstance(meta, dict):
        raise DamagedError(path, "it is no table")
    meta = cast(Meta, meta)
    if (FILES in meta or SEAL in meta) and meta.get(SEAL) != seal_of(meta):
        raise DamagedError(path, "it is not what was written: its SHA-256 is another")
    if meta.get("step") != step_of(checkpoint.name):
        raise DamagedError(path, f"it is of step {shortened(meta.get('step'))}")
    return meta


def describe(*, model: Meta, data: Meta, settings: Meta, derived: Meta, recipe: str = "") -> Meta:
    """What makes a run another one: settings, the model's config and parameters, the data; as JSON will have it.

    ``recipe``, its whole text, and versions are there to be read by a person.
    """
    parts = {"settings": settings, "derived": derived, "model_config": {}, "parameters": {}, **model, "data": data}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "megabatch": own_version()}
    return json.loads(json.dumps({**parts, "versions": versions, "recipe": recipe}, default=str))


def own_version() -> str | None:
    """The version that is installed; None for a working copy that is not."""
    try:
        return version("megabatch")
    except PackageNotFoundError:
        return None


def check_same(checkpoint: Path, saved: Meta, here: Meta) -> None:
    """Raise `MegabatchError` that names the first thing in which a checkpoint and this run differ."""
    for part, (kind, title) in TITLES.items():
        difference = first_difference(saved[part], here[part])
        if difference is not None:
            key, there, now = difference
            change = (
                f"where it is not set it follows from run.max_epochs and the data: set {key} to {there}"
                if part == "derived"
                else "resume with the recipe it was made with"
            )
            raise MegabatchError(
                f"{checkpoint} is of another {kind}: {title}{key} is {there} there and {now} here; "
                f"{change}, or start in a new run.folder"
            )


def first_difference(saved: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The dotted key of the first values that differ, with both; of two that differ, the one that says more."""
    keys = [*saved, *(key for key in here if key not in saved)]
    for key in sorted(keys, key=lambda key: key.startswith(SAY_LITTLE)):
        there, now = saved.get(key, MISSING), here.get(key, MISSING)
        if isinstance(there, dict) and isinstance(now, dict):
            within = first_difference(cast(Meta, there), cast(Meta, now))
            if within is not None:
                return f"{key}.{within[0]}", *within[1:]
        elif there != now and not (there is MISSING and now in NOTHING):  # a key that an earlier version did not have
            return key, shortened(there), shortened(now)
    return None


def shortened(value: object) -> str:
    """The value as text, or its beginning where a line has no room for all of it."""
    text = str(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."

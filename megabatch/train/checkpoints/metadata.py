"""Metadata: ``meta.json`` describes a checkpoint, the run that made it and the SHA-256 of every file.

Each rank hashes the files that it wrote by reading them back, about 1 GB/s and mostly from the page cache. SHA-256
takes half the time of BLAKE2 on processors with instructions for it. ``meta.json`` has a digest of itself too, so an
edited one counts as damaged.
"""

import json
import stat
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, cast

from megabatch.autotune import device_text
from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.checkpoints.paths import META, POINTER, step_of
from megabatch.train.config import Config
from megabatch.train.config.secrets import MASK, mask
from megabatch.train.runtime.files import (
    DIGEST,
    check_seal,
    kind_of,
    read_table,
    sealed_text,
    sha256_of_file,
    write_synced,
)
from megabatch.train.runtime.ranks import Ranks

Meta = dict[str, Any]

# Key of meta.json: digests of the other files.
FILES = "files"
# Key of meta.json: delete this checkpoint once it is not the best one.
BEST_ONLY = "best_only"
# Keys of meta.json: the position of the run.
POSITIONS = ("updates", "watch")
# By key of meta.json, the kind of the difference, and a prefix for its keys in messages.
IDENTITY = {
    "settings": ("recipe", ""),
    "model_config": ("model", "model.config."),
    "parameters": ("model", "the parameter "),
    "data": ("data set", "data: "),
    # Last, since it differs whenever one of the others does.
    "derived": ("recipe", ""),
}
# Keys that differ whenever anything does come last: any other difference says more.
UNTELLING = "fingerprint"
MISSING = "missing"
# Characters of a value in a message.
MAX_CHARACTERS = 80


class DamagedError(MegabatchError):
    """A checkpoint that is not as it was written."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path} is damaged ({reason}); name an earlier step-N folder in the file checkpoints/{POINTER}, "
            "or start in a new run.folder"
        )
        self.reason = f"{path.name}: {reason}" if path.name == META else reason


class FileDigest(NamedTuple):
    """Size and content of a file."""

    num_bytes: int
    sha256: str  # hexadecimal


# By file name.
Digests = dict[str, FileDigest]


def hash_file(path: Path) -> FileDigest:
    return FileDigest(path.stat().st_size, sha256_of_file(path))


def hash_written_files(checkpoint: Path, ranks: Ranks) -> Digests:
    """Return the digests of all files in a folder; each rank hashes its own. Collective.

    Raises `MegabatchError` on every rank if one cannot read what it wrote.
    """
    patterns = [f"__{ranks.rank}_*", *([".metadata"] if ranks.is_main else [])]
    problem, local_digests = None, Digests()
    try:
        local_digests = {path.name: hash_file(path) for pattern in patterns for path in checkpoint.glob(pattern)}
    except OSError as error:
        problem = f"cannot read back what was written to {checkpoint} ({in_one_line(error)}); look at its disk"
    if problem := ranks.first_problem(problem):
        raise MegabatchError(problem)
    return {name: digest for digests in ranks.gather(local_digests) for name, digest in digests.items()}


def find_changed_file(checkpoint: Path, digests: Digests, ranks: Ranks) -> str | None:
    """Return what is wrong with the first file that differs from its digest, if any. Collective.

    The ranks share the work by size.
    """
    names = sorted(digests, key=lambda name: (-digests[name].num_bytes, name))
    problems = (size_problem(checkpoint / name, digests[name].num_bytes) for name in names)
    problem = next((damage for damage in problems if damage), None)
    if problem is None:
        share = names[ranks.rank :: ranks.size]
        problem = next((fault for name in share if (fault := content_problem(checkpoint / name, digests[name]))), None)
    return ranks.first_problem(problem)


def size_problem(path: Path, num_bytes: int, *, or_more: bool = False) -> str | None:
    """Return what is wrong with a file's size, if anything."""
    try:
        status = path.lstat()
    except (OSError, ValueError) as error:
        return f"{path.name} is not there" if isinstance(error, FileNotFoundError) else in_one_line(error)
    if not stat.S_ISREG(status.st_mode):
        return f"{path.name} is {kind_of(status.st_mode) or 'a folder'}, not a file"
    size = status.st_size
    is_right = size >= num_bytes if or_more else size == num_bytes
    return None if is_right else f"{path.name} has {size:,} bytes of {num_bytes:,}"


def content_problem(path: Path, expected: FileDigest) -> str | None:
    try:
        return None if hash_file(path) == expected else f"{path.name} is not what was written: its SHA-256 is another"
    except OSError as error:
        return f"{path.name} cannot be read ({in_one_line(error)})"


def write_meta(checkpoint: Path, meta: Meta, digests: Digests) -> None:
    meta = {**meta, FILES: {name: digest._asdict() for name, digest in digests.items()}}
    write_synced(checkpoint / META, sealed_text(meta))


def read_meta(checkpoint: Path) -> Meta:
    """Return a checkpoint's metadata. Raises `DamagedError` if it is not as it was written."""
    meta = _read_verified(checkpoint)
    missing = [part for part in (*IDENTITY, *POSITIONS) if part not in meta]
    if missing:
        raise DamagedError(checkpoint / META, f"{missing[0]} is missing")
    if not all(isinstance(meta[part], dict) for part in (*IDENTITY, *POSITIONS)):
        raise DamagedError(checkpoint / META, "a part of it is no table")
    return {key: value for key, value in meta.items() if key not in (FILES, DIGEST)}


def read_digests(checkpoint: Path) -> Digests:
    """Return the digests of a checkpoint's files.

    Raises `DamagedError` if ``meta.json`` is damaged, or names anything but files of the checkpoint.
    """
    meta = _read_verified(checkpoint)
    try:
        digests = {name: FileDigest(**fields) for name, fields in meta[FILES].items()}
    except (KeyError, AttributeError, TypeError) as error:
        raise DamagedError(checkpoint / META, in_one_line(error)) from None
    for name, digest in digests.items():
        if not is_plain_name(name):
            raise DamagedError(checkpoint / META, f"it names {shorten(repr(name))}, which is no file of a checkpoint")
        if type(digest.num_bytes) is not int or type(digest.sha256) is not str:
            raise DamagedError(checkpoint / META, f"it has no size and SHA-256 of {shorten(name)}")
    return digests


def is_plain_name(name: str) -> bool:
    """Return True for the name of a file in a folder, which leads neither out of it nor into another."""
    return Path(name).name == name and name not in ("", "..") and name.isprintable()


def describe_versions(checkpoint: Path) -> list[str]:
    """Return a line about a checkpoint that was made with other versions; none for the installed ones."""
    saved, here = _read_verified(checkpoint).get("versions"), installed_versions()
    if not isinstance(saved, dict):
        return []
    differing = [name for name in here if cast(Meta, saved).get(name, here[name]) != here[name]]
    if not differing:
        return []
    there = ", ".join(f"{name} {shorten(cast(Meta, saved)[name])}" for name in differing)
    now = ", ".join(f"{name} {here[name]}" for name in differing)
    return [f"{checkpoint} was made with {there}, and this is {now}"]


def _read_verified(checkpoint: Path) -> Meta:
    path = checkpoint / META
    try:
        meta = read_table(path)
        check_seal(meta)
    except FileNotFoundError:
        raise DamagedError(path, "it is not there") from None
    except ValueError as error:
        raise DamagedError(path, str(error)) from None
    if meta.get("step") != step_of(checkpoint.name):
        raise DamagedError(path, f"it is of step {shorten(meta.get('step'))}")
    return meta


def describe_run(*, model: Meta, data: Meta, settings: Meta, derived: Meta, recipe: str = "") -> Meta:
    """Return the identity of a run as JSON reads it back, with versions and the recipe's text for people."""
    parts = {"settings": settings, "derived": derived, "model_config": {}, "parameters": {}, **model, "data": data}
    identity: Meta = json.loads(json.dumps({**parts, "versions": installed_versions(), "recipe": recipe}, default=str))
    # Parameters have names such as cls_token, and no secrets.
    return {key: value if key == "parameters" else mask(value) for key, value in identity.items()}


def installed_versions() -> Meta:
    return {package: installed_version(package) for package in ("torch", "transformers", "megabatch")}


def installed_version(package: str) -> str | None:
    """Return the version of an installed package without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe_conditions(config: Config, ranks: Ranks) -> dict[str, object]:
    """Return what a measurement of memory depends on besides the model, the data and the batch size. Collective.

    It is the same on every rank, on devices of several kinds too: all of them measure again, or none does.
    """
    keys = {
        "update": ("memory", "sync", "accumulate_dtype", "one_row", "long_samples"),
        "model": ("dtype", "compute_dtype", "attention", "activation_checkpointing", "compile"),
        "optim": ("name", "function", "ema_decay"),
        "data": ("look_ahead",),
        "parallel": tuple(type(config.parallel).model_fields),
    }
    values = {f"{section}.{key}": getattr(getattr(config, section), key) for section in keys for key in keys[section]}
    devices = sorted(set(ranks.gather(device_text(ranks.device))))
    return {"device": " and ".join(devices), "number of ranks": ranks.size, **values}


def check_same_run(checkpoint: Path, saved: Meta, here: Meta) -> None:
    """Raise `MegabatchError` naming the first difference between a checkpoint's run and this one."""
    for part, (kind, prefix) in IDENTITY.items():
        difference = first_difference(saved[part], here[part])
        if difference is not None:
            key, there, now = difference
            change = (
                f"the learning rate follows run.max_epochs: add --{key}={there} to keep its course, or begin a new one "
                f"with these weights: --run.init_from={checkpoint.parents[1]} --run.folder=NEW"
                if part == "derived"
                else "resume with the recipe it was made with, or start in a new run.folder"
            )
            raise MegabatchError(
                f"{checkpoint} is of another {kind}: {prefix}{key} is {there} there and {now} here; {change}"
            )


def first_difference(saved: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the dotted key and both values of the most telling difference, if there is one."""
    keys = [*saved, *(key for key in here if key not in saved)]
    for key in sorted(keys, key=lambda key: key.startswith(UNTELLING)):
        there, now = saved.get(key, MISSING), here.get(key, MISSING)
        if isinstance(there, dict) and isinstance(now, dict):
            within = first_difference(cast(Meta, there), cast(Meta, now))
            if within is not None:
                return f"{key}.{within[0]}", *within[1:]
        elif there == MASK or (there is MISSING and now in (None, {}, [])):
            continue
        elif there != now:
            return key, shorten(there), shorten(now)
    return None


def shorten(value: object) -> str:
    """Return a value as text that fits into a message."""
    text = str(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."

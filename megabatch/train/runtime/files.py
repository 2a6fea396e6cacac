"""Files of a run: a crash, a power cut or a full disk leaves no half-written one, and rows wait until there is room."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.runtime.shared_folder import ROWS, SharedFolder

# The disk, the user's quota, or the file is full.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_THERE = (FileNotFoundError, NotADirectoryError)
# Files of a run with rows.
METRICS, CUTS, TIMELINE = "metrics.jsonl", "cuts.jsonl", "timeline.jsonl"
SKIPPED = "skipped.jsonl"
CONFIG, ENVIRONMENT, PLAN, LOG, LOCK = "config.toml", "environment.json", "plan.txt", "log.txt", ".lock"
# Conditions on which the bits of a microbatch depend.
CONDITIONS = ("threads", "devices", "cpu_capability", "torch", "torch_build", "cuda")
# Key of a sealed table: the digest of everything else in it.
DIGEST = "sha256"
# Bytes at the end of a file of rows, which have those of its last update.
TAIL_BYTES = 2**16
# Ending of a name until the file is whole.
UNFINISHED = ".tmp"
# Names by `unfinished_name`.
UNFINISHED_NAME = re.compile(rf"\..+\.[0-9a-f]{{32}}{re.escape(UNFINISHED)}")
Row = dict[str, Any]
# Starts of a run whose environment.json is damaged.
UNKNOWN: list[Row] = [{}]

# json.dumps would make an encoder for each row.
to_json = json.JSONEncoder(allow_nan=False).encode


def unfinished_name(path: Path) -> Path:
    """Return a name beside the path that nobody else has."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{UNFINISHED}")


def remove_unfinished(folder: Path) -> None:
    """Delete what killed processes have left of `replace_text` in a folder, and nothing else."""
    for path in folder.glob(f".*{UNFINISHED}"):
        if UNFINISHED_NAME.fullmatch(path.name):
            path.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one, even after a power cut."""
    temporary = unfinished_name(path)
    try:
        write_synced(temporary, text)
        if path.is_dir() and not path.is_symlink():
            move_aside(path)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def new_folder(path: Path) -> Generator[Path]:
    """Yield a folder beside the path, which takes its name at a good end and is gone at any other."""
    unfinished = unfinished_name(path)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        os.replace(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


class NotAFileError(OSError):
    """A folder in the place of a file of a run, a link that leads elsewhere, or a pipe that waits for ever."""


def kind_of(mode: int) -> str:
    """Return what a path is that is neither a file nor a folder, by its mode; "" for those."""
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return ""
    kinds = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file of a run and return its descriptor. Raises `NotAFileError` for anything else in its place."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode):
            raise NotAFileError(errno.EINVAL, f"it is {kind_of(mode) or 'a folder'}, not a file", str(path))
    # The flags are for a path that was changed in between: a pipe is opened at once, and a link not at all.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(errno.EINVAL, "it is not a file", str(path))
    return descriptor


def read_file(path: Path) -> bytes:
    """Return the content of a file of a run. Raises `NotAFileError` for anything else in its place."""
    with os.fdopen(open_file(path), "rb") as file:
        return file.read()


def is_file(path: Path) -> bool:
    """Return True for a file; a link to one is none, since it may lead out of a run's folder."""
    return path.is_file() and not path.is_symlink()


def check_own_path(path: Path, change: str = "choose another run.folder") -> None:
    """Raise `MegabatchError` for a link, a pipe or a device: a run deletes and writes in its folder alone."""
    try:
        kind = kind_of(path.lstat().st_mode)
    except NOT_THERE:
        return
    if kind:
        elsewhere = " to another file or folder" if kind == "a link" else ""
        raise MegabatchError(f"{path} is {kind}{elsewhere}; put a file or folder there, or {change}")


def write_synced(path: Path, text: str) -> None:
    """Write a file that is not there yet and wait until it is on the disk. It follows no link that others have put."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move_aside(path: Path) -> Path:
    """Rename a file that is damaged, so that nothing of it is lost; return its new name."""
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    os.replace(path, aside)
    return aside


def remove_path(path: Path) -> None:
    """Delete a folder, or a file or link in its place; nothing if it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sealed_text(table: dict[str, Any]) -> str:
    """Return a table as JSON with a digest of its own."""
    table = json.loads(json.dumps(table))
    return json.dumps({**table, DIGEST: digest_of(table)}, indent=1)


def digest_of(table: dict[str, Any]) -> str:
    fields = {key: value for key, value in table.items() if key != DIGEST}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def read_table(path: Path) -> dict[str, Any]:
    """Return a table of JSON. Raises `FileNotFoundError`, or `ValueError` for anything else."""
    try:
        table = json.loads(read_file(path))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(in_one_line(error)) from None
    if not isinstance(table, dict):
        raise ValueError("it is no table")
    return cast(Row, table)


def check_seal(table: Row) -> None:
    """Raise `ValueError` for a table that is not as `sealed_text` wrote it."""
    if table.get(DIGEST) != digest_of(table):
        raise ValueError("it is not what was written: its SHA-256 is another")


def sha256_of_file(path: Path) -> str:
    with os.fdopen(open_file(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def open_to_append(path: Path) -> int:
    """Open a file of a run to write at its end. It has no other name then, under which it would change too."""
    descriptor = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if os.fstat(descriptor).st_nlink < 2:
        return descriptor
    os.close(descriptor)
    copy = unfinished_name(path)
    shutil.copyfile(path, copy, follow_symlinks=False)
    os.replace(copy, path)
    return open_file(path, os.O_WRONLY | os.O_APPEND)


class RetryingAppender:
    """Append whole pieces to a file. Pieces that find no room wait in memory and go first next time."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        # Pieces for the next `write`.
        self.pending: list[str] = []

    def write(self) -> None:
        """Write what is pending, if there is room."""
        with contextlib.suppress(OSError):
            self._append()

    def flush(self) -> None:
        """Write what is pending. Raises `OSError` if that fails; everything stays pending then."""
        self._append()

    def _append(self) -> None:
        if not self.pending or self.path is None:
            return
        descriptor = open_to_append(self.path)
        size, pending_bytes = os.fstat(descriptor).st_size, memoryview("".join(self.pending).encode())
        try:
            while pending_bytes:
                pending_bytes = pending_bytes[os.write(descriptor, pending_bytes) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
        finally:
            os.close(descriptor)
        self.pending.clear()


class JsonlFile(RetryingAppender):
    """A file with one JSON object a line, each with the "step" of its update, which only the main rank writes."""

    # True if each update has one row.
    has_every_update = False

    def __init__(self, path: Path, *, enabled: bool) -> None:
        super().__init__(path)
        self._file, self.is_enabled = path, enabled
        # Folder of replicas, one of which writes the rows that all of them make.
        self.shared: SharedFolder | None = None

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row. Floats keep every digit."""
        if self.is_enabled:
            self.pending.append(f"{to_json(row)}\n")

    def _append(self) -> None:
        """Write what is pending. A replica that is not the writer keeps its rows until another has written them."""
        if self.shared is None or not self.pending:
            super()._append()
            return
        with self.shared.turn(ROWS):
            self.pending[:] = rows_not_in(self._file, self.pending)
            if self.shared.is_writer:
                super()._append()

    def cut(self, step: int) -> list[str]:
        """Drop the rows that a run which was never stopped would not have after ``step`` updates.

        Returns warnings: nothing that is wrong with rows keeps a run from going on. A damaged file is kept aside.
        """
        if not self.is_enabled or not (self.has_every_update or self._file.exists()):
            return []
        rows, problem = find_rows(self._file)
        resumed_rows = [row for row in rows if self.is_kept(row, step)]
        odd = irregular_steps([row["step"] for row in resumed_rows if not is_evaluation(row)], step)
        warnings = [f"{self._file} {odd}"] if odd and self.has_every_update else []
        if warnings:
            resumed_rows = [*{(row["step"], row.get("set")): row for row in resumed_rows}.values()]
        if problem:
            aside = move_aside(self._file)
            warnings.append(f"{self._file} is damaged ({problem}); it is kept as {aside.name}, its other rows stay")
        if self._file.exists() or resumed_rows:
            replace_text(self._file, "".join(json.dumps(row) + "\n" for row in resumed_rows))
        return warnings

    def is_kept(self, row: Row, step: int) -> bool:
        """Return True for a row that stays in a run that resumes after ``step`` updates."""
        return row["step"] <= step

    def rows(self) -> list[Row]:
        self.write()
        return read_rows(self._file) if self.is_enabled else []


def read_rows(path: Path) -> list[Row]:
    """Return the file's rows, without a last line that a kill has cut off.

    Raises:
        MegabatchError: Any other line holds no row.
    """
    rows, problem = find_rows(path)
    if problem:
        raise MegabatchError(f"{path} is damaged ({problem}); mend or delete that line")
    return rows


def find_rows(path: Path) -> tuple[list[Row], str]:
    """Return the rows that can be read, without a last line that a kill has cut off, and what the first other is."""
    try:
        *lines, cut_off = read_file(path).split(b"\n")
    except NOT_THERE:
        return [], ""
    except NotAFileError as error:
        return [], str(error.strerror)
    parsed = [row_of(line) for line in (*lines, cut_off)]
    wrong = (number for number, line in enumerate(lines, start=1) if line.strip() and parsed[number - 1] is None)
    first = next(wrong, None)
    problem = "" if first is None else f"line {first} is no row with a step"
    return [row for row in parsed if row is not None], problem


def rows_not_in(path: Path, lines: Sequence[str]) -> list[str]:
    """Return the lines after the last row of a file, to which every replica adds the same rows in the same order.

    A last line that a kill has cut off is removed from the file.
    """
    if not path.exists():
        return [*lines]
    with os.fdopen(open_file(path, os.O_RDWR), "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        *tail, cut_off = file.read().split(b"\n")
        file.truncate(size - len(cut_off))
    steps = [row["step"] for line in tail if (row := row_of(line)) is not None]
    last = next(reversed(steps), -1)
    later = [line for line in lines if json.loads(line)["step"] >= last]
    num_missing = sum(json.loads(line)["step"] > last for line in later)
    num_written = min(steps.count(last), len(later) - num_missing)
    return later[num_written:]


def irregular_steps(steps: Sequence[int], last: int | None = None) -> str:
    """Return which of the updates 1 to ``last`` (None: the last one there) lack a row or have several; "" for none."""
    counts = Counter(steps)
    last = max(counts, default=0) if last is None else last
    missing = [step for step in range(1, last + 1) if step not in counts]
    doubled = [step for step, number in counts.items() if number > 1]
    shown = {"lacks": missing, "has more than one row of": doubled}
    parts = [f"{verb} {len(numbers)} updates, first {numbers[0]}" for verb, numbers in shown.items() if numbers]
    return " and ".join(parts)


def row_of(line: bytes) -> Row | None:
    try:
        row: Any = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return cast(Row, row) if isinstance(row, dict) and type(cast(Row, row).get("step")) is int else None


def flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a table and of the tables in it, with their values."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from flat(cast(dict[str, Any], value), f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Return every start of the run so far. A damaged file tells of one start of which nothing is known."""
    with contextlib.suppress(NotAFileError, ValueError, RecursionError, KeyError, TypeError):
        try:
            starts = list(json.loads(read_file(folder / ENVIRONMENT))["starts"])
        except NOT_THERE:
            return []
        if all(isinstance(start, dict) for start in starts):
            return starts
    return UNKNOWN


def differing_conditions(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return which of the `CONDITIONS` differ between two starts, in words; the number of devices does not matter."""
    shown = [
        {key: sorted(value) if key == "devices" else value for key, value in start.items()} for start in (before, after)
    ]
    there, here = ({key: start[key] for key in CONDITIONS if key in start} for start in shown)
    return [f"{key} was {there[key]} and is {here[key]}" for key in there if key in here and there[key] != here[key]]


def is_evaluation(row: Mapping[str, Any]) -> bool:
    return "set" in row

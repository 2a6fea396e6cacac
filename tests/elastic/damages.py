"""Ways to damage a run's checkpoints, each drawn from a seed, and what must come of it, told by comparing bytes."""

import filecmp
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

Damage = Callable[[Path, Random], None]  # of a folder of checkpoints
STEPS = (2, 4, 6)


def some_checkpoint(checkpoints: Path, draw: Random) -> Path:
    """Mostly the latest one."""
    return checkpoints / f"step-{draw.choice((6, 6, 6, 4, 2))}"


def some_file(checkpoints: Path, draw: Random) -> Path:
    """A file of a checkpoint that has a byte."""
    files = sorted(path for path in some_checkpoint(checkpoints, draw).iterdir() if path.stat().st_size)
    return draw.choice(files)


def flip(checkpoints: Path, draw: Random) -> None:
    path = some_file(checkpoints, draw)
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def flip_tensor(checkpoints: Path, draw: Random) -> None:
    path = draw.choice(sorted((checkpoints / "step-6").glob("*.distcp")))
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def zero(checkpoints: Path, draw: Random) -> None:
    """A stretch of zeros, as after a loss of power."""
    path = some_file(checkpoints, draw)
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data))
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    path.write_bytes(data)


def cut(checkpoints: Path, draw: Random) -> None:
    path = some_file(checkpoints, draw)
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def lengthen(checkpoints: Path, draw: Random) -> None:
    path = some_file(checkpoints, draw)
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, 99)))


def empty(checkpoints: Path, draw: Random) -> None:
    some_file(checkpoints, draw).write_bytes(b"")


def remove(checkpoints: Path, draw: Random) -> None:
    some_file(checkpoints, draw).unlink()


def swap(checkpoints: Path, draw: Random) -> None:
    """Two files of one checkpoint, or of two, under each other's name."""
    one, other = some_file(checkpoints, draw), some_file(checkpoints, draw)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def older(checkpoints: Path, draw: Random) -> None:
    """An older file in place of a newer one of the same name."""
    new, old = draw.choice(((6, 4), (6, 2), (4, 2)))
    path = draw.choice(sorted((checkpoints / f"step-{new}").iterdir()))
    path.write_bytes((checkpoints / f"step-{old}" / path.name).read_bytes())


def older_folder(checkpoints: Path, draw: Random) -> None:
    """A whole older checkpoint under the name of a newer one."""
    new, old = draw.choice(((6, 4), (6, 2), (4, 2)))
    shutil.rmtree(checkpoints / f"step-{new}")
    shutil.copytree(checkpoints / f"step-{old}", checkpoints / f"step-{new}")


def remove_folder(checkpoints: Path, draw: Random) -> None:
    shutil.rmtree(some_checkpoint(checkpoints, draw))


def empty_folder(checkpoints: Path, draw: Random) -> None:
    path = some_checkpoint(checkpoints, draw)
    shutil.rmtree(path)
    path.mkdir()


def edit(checkpoints: Path, draw: Random) -> None:
    """Another value in meta.json, which stays JSON."""
    path = some_checkpoint(checkpoints, draw) / "meta.json"
    meta = json.loads(path.read_text())
    key = draw.choice(sorted(meta))
    within = draw.choice(sorted(meta[key])) if isinstance(meta[key], dict) and meta[key] else None
    value = draw.choice([None, 0, 7, "a", [], {}, {"a": 1}, "0" * 64])
    kind = draw.randrange(3)
    if kind == 0:
        del meta[key]
    elif kind == 1 or within is None:
        meta[key] = value
    else:
        meta[key][within] = value
    path.write_text(json.dumps(meta, indent=1))


def replace_meta(checkpoints: Path, draw: Random) -> None:
    """Any text in place of meta.json."""
    path = some_checkpoint(checkpoints, draw) / "meta.json"
    path.write_bytes(draw.choice([b"{}", b"[]", b"null", b"3", b'"a"', b"[" * 9999, draw.randbytes(300), b"\0" * 100]))


def point(checkpoints: Path, draw: Random) -> None:
    """A pointer that names another one, none, or nothing."""
    names = [b"", b"step-", b"step-5", b"step-99", b"step-4", b"step-2\n", b"step-06", b"../../x", b"/", b"step-6.tmp",
             b"\0" * 6, b"\xff\xfe", draw.randbytes(9), b"a" * 5000, "step-\u0666".encode()]  # fmt: skip
    (checkpoints / "latest").write_bytes(draw.choice(names))


def remove_pointer(checkpoints: Path, draw: Random) -> None:
    (checkpoints / draw.choice(("latest", "latest", "best"))).unlink(missing_ok=True)


def file_for_folder(checkpoints: Path, draw: Random) -> None:
    """A file where a checkpoint was, or a folder where a pointer was."""
    if draw.randrange(2):
        path = some_checkpoint(checkpoints, draw)
        shutil.rmtree(path)
        path.write_bytes(b"a")
    else:
        (checkpoints / "latest").unlink()
        (checkpoints / "latest").mkdir()


def two(checkpoints: Path, draw: Random) -> None:
    for _ in range(2):
        draw.choice((flip, cut, empty, edit))(checkpoints, draw)


def all_of_them(checkpoints: Path, draw: Random) -> None:
    for step in STEPS:
        path = draw.choice(sorted((checkpoints / f"step-{step}").iterdir()))
        path.write_bytes(path.read_bytes()[:-1] if draw.randrange(2) else b"")


def nothing(checkpoints: Path, draw: Random) -> None:
    """The newest one must be taken."""


KINDS: dict[str, Damage] = {
    "a bit of any file": flip, "a bit of tensors": flip_tensor, "zeros": zero, "cut": cut, "lengthened": lengthen,
    "emptied": empty, "missing": remove, "swapped": swap, "an older file": older, "an older checkpoint": older_folder,
    "checkpoint missing": remove_folder, "checkpoint emptied": empty_folder, "meta.json edited": edit,
    "meta.json replaced": replace_meta, "pointer": point, "pointer missing": remove_pointer,
    "file and folder exchanged": file_for_folder, "two files": two, "all checkpoints": all_of_them, "none": nothing,
}  # fmt: skip


def step_to_expect(checkpoints: Path, pristine: Path) -> int | None:
    """The newest checkpoint, up to the pointer's, of which no byte has changed; None: there is none."""
    pointer = checkpoints / "latest"
    text = pointer.read_bytes().strip() if pointer.is_file() else b""
    named = int(text[5:]) if re.fullmatch(rb"step-[1-9][0-9]*", text) else 10**9
    same = [
        step for step in STEPS if step <= named and is_same(checkpoints / f"step-{step}", pristine / f"step-{step}")
    ]
    return max(same, default=None)


def is_same(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in other.iterdir())
    if not one.is_dir() or sorted(path.name for path in one.iterdir()) != names:
        return False
    return not any(filecmp.cmpfiles(one, other, names, shallow=False)[1:])

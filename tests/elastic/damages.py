"""Ways to damage a run's checkpoints, each drawn from a seed, and what must come of it, told by comparing bytes."""

import filecmp
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

Damage = Callable[[Path, Random], None]  # of a file, or of a folder of checkpoints


def steps_of(checkpoints: Path) -> list[int]:
    """The checkpoints that have their names, the newest first."""
    return sorted((int(path.name[5:]) for path in checkpoints.glob("step-*") if path.suffix != ".tmp"), reverse=True)


def some_checkpoint(checkpoints: Path, draw: Random) -> Path:
    """Mostly the latest one."""
    steps = steps_of(checkpoints)
    return checkpoints / f"step-{draw.choice((*steps[:1] * 3, *steps[1:]))}"


def two_steps(checkpoints: Path, draw: Random) -> list[int]:
    """A newer and an older one."""
    return sorted(draw.sample(steps_of(checkpoints), 2), reverse=True)


def some_file(checkpoints: Path, draw: Random) -> Path:
    """A file of a checkpoint that has a byte."""
    files = sorted(path for path in some_checkpoint(checkpoints, draw).iterdir() if path.stat().st_size)
    return draw.choice(files)


# Damages of any file that has a byte


def flip(path: Path, draw: Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def zero(path: Path, draw: Random) -> None:
    """A stretch of zeros, as after a loss of power."""
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data))
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    path.write_bytes(data)


def cut(path: Path, draw: Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def lengthen(path: Path, draw: Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, 99)))


def empty(path: Path, draw: Random) -> None:
    path.write_bytes(b"")


def remove(path: Path, draw: Random) -> None:
    path.unlink()


def damage_rows(path: Path, draw: Random) -> None:
    """A line that is no row, one that is missing, or one that is there twice."""
    lines = path.read_bytes().splitlines(keepends=True)
    place = draw.randrange(len(lines))
    lines[place : place + 1] = draw.choice(([], [lines[place]] * 2, [b'{"step": 2, "lo\n', lines[place]]))
    path.write_bytes(b"".join(lines))


OF_ANY_FILE: tuple[Damage, ...] = (flip, zero, cut, lengthen, empty, remove)
BESIDE = {  # what lies beside a run's checkpoints -> its files below the folder of both, and what may come of them
    "token cache": ("cache/*/samples.arrow", OF_ANY_FILE),
    "summary of the token cache": ("cache/*/summary.json", OF_ANY_FILE),
    "metrics": ("{run}/metrics.jsonl", (damage_rows, *OF_ANY_FILE)),
    "environment.json": ("{run}/environment.json", OF_ANY_FILE),
    "other logs": ("{run}/[clpt]*.*", OF_ANY_FILE),  # config.toml, cuts.jsonl, log.txt, plan.txt, timeline.jsonl
}


def damage_beside(kind: str, place: Path, run: str, draw: Random) -> None:
    """Damage a file beside the checkpoints of a run, if there is one that has a byte."""
    pattern, ways = BESIDE[kind]
    files = sorted(path for path in place.glob(pattern.format(run=run)) if path.stat().st_size)
    if files:
        draw.choice(ways)(draw.choice(files), draw)


# Damages of the folder of checkpoints


def of_some_file(damage: Damage) -> Damage:
    return lambda checkpoints, draw: damage(some_file(checkpoints, draw), draw)


def flip_tensor(checkpoints: Path, draw: Random) -> None:
    newest = checkpoints / f"step-{steps_of(checkpoints)[0]}"
    flip(draw.choice(sorted(newest.glob("*.distcp"))), draw)


def swap(checkpoints: Path, draw: Random) -> None:
    """Two files of one checkpoint, or of two, under each other's name."""
    one, other = some_file(checkpoints, draw), some_file(checkpoints, draw)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def older(checkpoints: Path, draw: Random) -> None:
    """An older file in place of a newer one of the same name."""
    new, old = two_steps(checkpoints, draw)
    path = draw.choice(sorted((checkpoints / f"step-{new}").iterdir()))
    path.write_bytes((checkpoints / f"step-{old}" / path.name).read_bytes())


def older_folder(checkpoints: Path, draw: Random) -> None:
    """A whole older checkpoint under the name of a newer one."""
    new, old = two_steps(checkpoints, draw)
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
        draw.choice((*map(of_some_file, (flip, cut, empty)), edit))(checkpoints, draw)


def all_of_them(checkpoints: Path, draw: Random) -> None:
    for step in steps_of(checkpoints):
        path = draw.choice(sorted((checkpoints / f"step-{step}").iterdir()))
        path.write_bytes(path.read_bytes()[:-1] if draw.randrange(2) else b"")


def nothing(checkpoints: Path, draw: Random) -> None:
    """The newest one must be taken."""


KINDS: dict[str, Damage] = {
    "a bit of any file": of_some_file(flip), "a bit of tensors": flip_tensor, "zeros": of_some_file(zero),
    "cut": of_some_file(cut), "lengthened": of_some_file(lengthen), "emptied": of_some_file(empty),
    "missing": of_some_file(remove), "swapped": swap, "an older file": older, "an older checkpoint": older_folder,
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
        step for step in steps_of(pristine)
        if step <= named and is_same(checkpoints / f"step-{step}", pristine / f"step-{step}")
    ]  # fmt: skip
    return max(same, default=None)


def is_same(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in other.iterdir())
    if not one.is_dir() or sorted(path.name for path in one.iterdir()) != names:
        return False
    return not any(filecmp.cmpfiles(one, other, names, shallow=False)[1:])

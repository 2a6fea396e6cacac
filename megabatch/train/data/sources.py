"""Places: what a recipe's path names: files of one kind, a saved data set, one of the hub."""

import difflib
import glob
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megabatch.errors import MegabatchError
from megabatch.train.config import SourceConfig
from megabatch.train.data.stdlib import stdlib_root

Kind = Literal["stdlib", "jsonl", "csv", "parquet", "text", "documents", "saved", "hub"]

KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "documents",
    ".rst": "documents",
    ".py": "documents",
}
SAVED_FILES = ("dataset_info.json", "dataset_dict.json")  # what save_to_disk writes at the top of its folder
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True)
class Place:
    """What is read, and how."""

    kind: Kind
    paths: tuple[str, ...]  # files in the order they are read; of saved and stdlib one folder, of hub the id


def place_of(source: SourceConfig, key: str) -> Place:
    """What ``source`` names, seen to exist unless it is on the hub. ``key`` is its table in the recipe."""
    place = found_place(source, key)
    if place.kind not in ("saved", "hub") and (source.split != "train" or source.subset is not None):
        raise MegabatchError(
            f"{key}.split or {key}.subset is set, and {key}.path is {place.kind}, which has none; remove it"
        )
    return place


def found_place(source: SourceConfig, key: str) -> Place:
    """What ``path`` and ``source`` say."""
    if source.source == "stdlib":
        if source.path is not None:
            raise MegabatchError(
                f'{key}.source is "stdlib", which has no path, and {key}.path is {source.path!r}; leave one of them out'
            )
        return Place("stdlib", (str(stdlib_root()),))
    names = [source.path] if isinstance(source.path, str) else source.path
    if not names or not all(names):
        raise MegabatchError(
            f"{key}.path names nothing; set it to a file, a glob, a list of them, a folder that save_to_disk has "
            f'written or a hub id, or set {key}.source to "stdlib"'
        )
    if source.source == "hub":
        return Place("hub", (only(names, f"{key}.path", "a hub id"),))
    places = [one_place(name, source.source, key) for name in names]
    kinds: list[Kind] = sorted({place.kind for place in places})
    if len(kinds) > 1:
        raise MegabatchError(
            f"{key}.path names {' and '.join(kinds)} together; give each kind its own table, [data.mixture.<name>]"
        )
    if kinds[0] in ("saved", "hub"):
        only(names, f"{key}.path", "a saved data set or a hub id")
    return Place(kinds[0], tuple(path for place in places for path in place.paths))


def only(names: list[str], key: str, what: str) -> str:
    """The one name of a list; ``what`` it must be one of."""
    if len(names) > 1:
        raise MegabatchError(
            f"{key} names {len(names)} places, and {what} stands alone; give each its own table, [data.mixture.<name>]"
        )
    return names[0]


def one_place(name: str, asked: Kind | None, key: str) -> Place:
    """What one name of ``path`` stands for."""
    path = expanded(name, f"{key}.path")
    if path.is_dir():
        return saved_place(path, asked, key)
    if path.exists():
        return Place(asked or kind_of(str(path), key), (str(path),))
    if glob.has_magic(name):
        return glob_place(str(path), asked, key)
    if asked is None and ending_of(name) not in KINDS and HUB_ID.fullmatch(name):
        return Place("hub", (name,))
    raise MegabatchError(f"{key}.path is {name!r}, and there is no such file{near(path)}; set it to what is to be read")


def expanded(name: str, key: str) -> Path:
    """The path, ~ being a user's own folder. ``key``: what is blamed where there is no such user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise MegabatchError(f"{key} is {name!r}, and no user is known by that name; write the whole path") from None


def saved_place(folder: Path, asked: Kind | None, key: str) -> Place:
    """A folder, which must be one of save_to_disk."""
    if asked not in (None, "saved") or not any((folder / name).exists() for name in SAVED_FILES):
        raise MegabatchError(
            f"{key}.path is {str(folder)!r}, a folder that datasets' save_to_disk has not written; name the files in "
            f'it, as in "{folder}/*.jsonl"'
        )
    return Place("saved", (str(folder),))


def glob_place(pattern: str, asked: Kind | None, key: str) -> Place:
    """The files that a pattern matches, sorted."""
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
    if not paths:
        raise MegabatchError(f"{key}.path is {pattern!r}, and no file matches it; set it to what is to be read")
    kinds: dict[str, Kind] = {path: asked or kind_of(path, key) for path in paths}
    for path in paths:
        if kinds[path] != kinds[paths[0]]:
            raise MegabatchError(
                f"{key}.path is {pattern!r}, which matches {paths[0]} and {path}, files of two kinds; narrow it, as in "
                f'"{Path(pattern).parent}/*{Path(path).suffix}"'
            )
    return Place(kinds[paths[0]], tuple(paths))


def kind_of(path: str, key: str) -> Kind:
    """What a file is, by its ending."""
    kind = KINDS.get(ending_of(path))
    if kind is None:
        raise MegabatchError(
            f"{key}.path names {path}, whose ending says nothing of what it is; set {key}.source to jsonl, csv, "
            f"parquet, text (a line a document) or documents (a file a document), or name a file that ends in "
            f"{', '.join(KINDS)} or in one of them and .gz"
        )
    return kind


def ending_of(path: str) -> str:
    """The ending in small letters, without .gz after it."""
    return Path(path.lower().removesuffix(".gz")).suffix


def near(path: Path) -> str:
    """The name in its folder that comes nearest to a missing file's, as words."""
    if not path.parent.is_dir():
        return f", and no folder {path.parent}"
    found = difflib.get_close_matches(path.name, [each.name for each in path.parent.iterdir()], n=1)
    return f" ({path.parent / found[0]} comes nearest)" if found else ""

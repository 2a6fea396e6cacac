"""Sources: files, saved data sets and data sets of the hub that a recipe names, and their rows, each with a name.

To add a kind of file, write a reader of rows and name it in `READERS`.
"""

import codecs
import csv
import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal, cast

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.config import Config, SourceConfig
from megabatch.train.config.recipe_paths import near
from megabatch.train.data.stdlib import stdlib_functions, stdlib_root

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
# By ending of a file of another program, the format to save in its place.
DOCUMENTS = {
    **dict.fromkeys((".xlsx", ".xls", ".ods"), ".csv"),
    **dict.fromkeys((".pdf", ".docx", ".doc", ".odt", ".html"), ".txt"),
}
# Delimiters of csv: the first one that the first line has.
DELIMITERS = ",;\t|"
# Files at the top of a folder that save_to_disk has written.
SAVED_FILES = ("dataset_info.json", "dataset_dict.json")
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# Python's stand-in for a byte that is not UTF-8.
ESCAPED = re.compile("[\udc80-\udcff]")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Excel's "Unicode text" begins with one.
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Words of json for a file with several values.
MORE_THAN_ONE = "Extra data"
# A line takes about 34 times its bytes of memory until it is tokens.
MAX_LINE_BYTES, PIECE_BYTES = 64 << 20, 1 << 20
# Python's own limit, 128 KiB, is less than many a text has.
MAX_CELL_BYTES = 2**31 - 1
# Names of ShareGPT's speakers.
ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "model": "assistant", "bot": "assistant", "tool": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class SourceFiles:
    """The files that hold rows, and their kind."""

    kind: Kind
    paths: tuple[str, ...]  # files in the order they are read; of saved and stdlib one folder, of hub the id

    def files(self) -> list[Path]:
        """Return the files that hold the rows; none of the hub and of the standard library."""
        if self.kind in ("hub", "stdlib"):
            return []
        # Beside its rows, datasets keeps what it has computed from them.
        if self.kind == "saved":
            return sorted(path for path in Path(self.paths[0]).rglob("*.arrow") if not path.name.startswith("cache-"))
        return [Path(path) for path in self.paths]


@dataclass(frozen=True)
class Row:
    """One row of a source."""

    name: str  # where it comes from: "gsm8k.jsonl:17"
    fields: Mapping[str, Any]


class BrokenRowError(MegabatchError):
    """A row that cannot be used; the text names the row and the reason."""


class LongRowError(BrokenRowError):
    """A row too long to be read, which is left out with the samples that are too long."""


Rows = Iterator[Row | BrokenRowError]


def rows_of(source: SourceConfig, key: str) -> Rows:
    """Yield the rows of a source in an order that does not change, and in the place of a broken one its error.

    Args:
        source: At most its ``max_samples`` rows are read.
        key: The source's table in the recipe, for messages.

    Raises `MegabatchError` at once where the source is not there.
    """
    files = find_files(source, key)
    if files.kind == "stdlib":
        functions = stdlib_functions(Path(files.paths[0]))
        rows: Rows = (
            Row(function.name, {"prompt": function.prompt, "response": function.response}) for function in functions
        )
    elif files.kind == "saved":
        rows = numbered(files.paths[0], saved_rows(files.paths[0], source.split, key))
    elif files.kind == "hub":
        rows = numbered(files.paths[0], hub_rows(files.paths[0], source, key))
    else:
        rows = chain.from_iterable(file_rows(files.kind, path, key) for path in files.paths)
    return islice(rows, source.max_samples)


def named_sources(config: Config) -> dict[str, SourceConfig]:
    """Return the places of text that a recipe names, by the key of their table."""
    sets = {f"eval.sets.{name}": source for name, source in config.eval.sets.items()}
    if config.data.function is not None:
        return sets
    mixture = {f"data.mixture.{name}": source for name, source in config.data.mixture.items()}
    return {**(mixture or {"data": config.data}), **sets}


def find_files(source: SourceConfig, key: str) -> SourceFiles:
    """Return what ``source`` names, seen to exist unless it is on the hub. ``key`` is its table in the recipe."""
    names = [source.path] if isinstance(source.path, str) else source.path or []
    if source.source == "stdlib":
        if source.path is not None:
            raise MegabatchError(
                f'{key}.source is "stdlib", which has no path, and {key}.path is {source.path!r}; leave one of them out'
            )
        sources = [SourceFiles("stdlib", (str(stdlib_root()),))]
    else:
        sources = [files_named(name, source.source, key) for name in names if name]
    if len(sources) < max(1, len(names)):
        raise MegabatchError(
            f"{key}.path names nothing; set it to a file, a glob, a list of them, a folder that save_to_disk has "
            f'written or a hub id, or set {key}.source to "stdlib"'
        )
    kinds: list[Kind] = sorted({files.kind for files in sources})
    kind = kinds[0]
    if len(kinds) > 1:
        raise MegabatchError(
            f"{key}.path names {' and '.join(kinds)} together; give each kind its own table, [data.mixture.<name>]"
        )
    if kind in ("saved", "hub") and len(sources) > 1:
        raise MegabatchError(
            f"{key}.path names {len(sources)} places, and a saved data set or a hub id stands alone; give each its own "
            "table, [data.mixture.<name>]"
        )
    if kind not in ("saved", "hub") and (source.split != "train" or source.subset is not None):
        raise MegabatchError(f"{key}.split or {key}.subset is set, and {key}.path is {kind}, which has none; remove it")
    return SourceFiles(kind, tuple(path for files in sources for path in files.paths))


def files_named(name: str, stated_kind: Kind | None, key: str) -> SourceFiles:
    if stated_kind == "hub":
        return SourceFiles("hub", (name,))
    path = expanded(name, f"{key}.path")
    if stated_kind in (None, "saved") and any((path / file).exists() for file in SAVED_FILES):
        return SourceFiles("saved", (str(path),))
    if path.is_dir():
        paths = sorted(str(file) for file in path.rglob("*") if ending_of(file.name) in KINDS and file.is_file())
        if not paths or stated_kind == "saved":
            raise MegabatchError(
                f"{key}.path is {str(path)!r}, a folder without files that end in {', '.join(KINDS)}, which "
                "save_to_disk has not written either; name another"
            )
    else:
        matches = sorted(match for match in glob.glob(str(path), recursive=True) if Path(match).is_file())
        paths = [str(path)] if path.exists() else matches
    if not paths and stated_kind is None and ending_of(name) not in KINDS and HUB_ID.fullmatch(name):
        return SourceFiles("hub", (name,))
    if not paths:
        where = "" if path.is_absolute() else f": it is relative to the current folder, {Path.cwd()}"
        raise MegabatchError(
            f"{key}.path is {name!r}, and there is no such file{near(path)}; set it to what is to be read{where}"
        )
    kinds: list[Kind] = [stated_kind or kind_of(matched, key) for matched in paths]
    for matched, kind in zip(paths, kinds, strict=True):
        if kind != kinds[0]:
            raise MegabatchError(
                f"{key}.path is {str(path)!r}, which matches {paths[0]} and {matched}, files of two kinds; narrow it, "
                f'as in "{path if path.is_dir() else path.parent}/*{Path(matched).suffix}"'
            )
    return SourceFiles(kinds[0], tuple(paths))


def expanded(name: str, key: str) -> Path:
    """Return the path, where ~ is the user's own folder. ``key`` is blamed where there is no such user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise MegabatchError(f"{key} is {name!r}, and no user is known by that name; write the whole path") from None


def kind_of(path: str, key: str) -> Kind:
    kind = KINDS.get(ending_of(path))
    if (advice := DOCUMENTS.get(ending_of(path))) is not None:
        raise MegabatchError(f"{key}.path names {path}, which is not read; save it as {advice}")
    if kind is None:
        raise MegabatchError(
            f"{key}.path names {path}, whose ending says nothing of what it is; set {key}.source to jsonl, csv, "
            f"parquet, text (a line a document) or documents (a file a document), or name a file that ends in "
            f"{', '.join(KINDS)} or in one of them and .gz"
        )
    return kind


def ending_of(path: str) -> str:
    """Return the ending in small letters, without .gz after it."""
    return Path(path.lower().removesuffix(".gz")).suffix


def saved_rows(folder: str, split: str, key: str) -> Iterable[Any]:
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(folder)
    except Exception as error:
        raise MegabatchError(f"cannot read the saved data set {folder} ({in_one_line(error)}); save it again") from None
    if not isinstance(dataset, DatasetDict):
        return dataset
    if split not in dataset:
        raise MegabatchError(f"{folder} has no split {split!r}, only {', '.join(map(str, dataset))}; set {key}.split")
    return dataset[split]


def hub_builder(name: str, subset: str | None, key: str) -> Any:
    """Return the reader of a data set of the hub; its ``hash`` names the version. Without network, a cached one."""
    from datasets import load_dataset_builder

    try:
        builder = load_dataset_builder(name, name=subset)
    except Exception as error:
        raise MegabatchError(
            f"{key}.path is {name!r}, which is nothing here, and it cannot be had from the Hugging Face hub "
            f"({in_one_line(error)}); name a file, or see to the network, {key}.path and {key}.subset"
        ) from None
    # To datasets, "json", "text" and others mean the files of the working folder.
    if builder.repo_id is None:
        raise MegabatchError(f"{key}.path is {name!r}, which is nothing here, and no data set of the hub; name a file")
    return builder


def hub_rows(name: str, source: SourceConfig, key: str) -> Iterable[Any]:
    """Return the rows of a split, which are streamed and never downloaded whole."""
    builder = hub_builder(name, source.subset, key)
    try:
        return builder.as_streaming_dataset(split=source.split)
    except Exception as error:
        raise MegabatchError(
            f"{key}.path is {name!r}, of which the split {source.split!r} cannot be read ({in_one_line(error)}); set "
            f"{key}.split"
        ) from None


def numbered(place: str, rows: Iterable[Any]) -> Rows:
    """Yield the rows that datasets reads. It cannot pass over a broken one: what it raises ends the run."""
    number = 0
    try:
        for number, fields in enumerate(rows, start=1):
            yield Row(f"{place}:{number}", fields)
    except Exception as error:
        raise MegabatchError(
            f"cannot read the row {number + 1} of {place} ({in_one_line(error)}); mend it, or try again"
        ) from None


def file_rows(kind: Kind, path: str, key: str) -> Rows:
    """Yield the rows of one file. A fault that is not of a single row is an error of ``key``."""
    try:
        with cast(IO[bytes], gzip.open(path)) if path.lower().endswith(".gz") else Path(path).open("rb") as file:
            if kind in TEXT_KINDS and cast(Any, file).peek(2)[:2] in UTF16_MARKS:
                file = io.BufferedReader(cast(Any, io.BytesIO(file.read().decode("utf-16").encode())))
            yield from READERS[kind](path, file)
    except MegabatchError:
        raise
    except (OSError, EOFError, ValueError, RuntimeError, csv.Error, zlib.error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())[:200]
        raise MegabatchError(
            f"cannot read {path} as {kind} ({reason}); mend it, or set {key}.path or {key}.source"
        ) from None


def json_rows(path: str, file: Any) -> Rows:
    """Yield an object a line; a file may be one list of objects instead."""
    if not file.peek(1).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
        return line_rows(path, file, json.loads)
    content = file.read()
    try:
        objects = json.loads(content.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        if error.msg != MORE_THAN_ONE:
            raise
        return line_rows(path, io.BytesIO(content), json.loads)
    return (row_of(f"{path}:{number}", fields) for number, fields in enumerate(objects, start=1))


def line_rows(path: str, file: IO[bytes], read: Callable[[str], Any]) -> Rows:
    """Yield the lines that are not blank. Only newlines end them: JSON strings may hold U+2028."""
    for number, line in enumerate(short_lines(file), start=1):
        if line is None:
            yield LongRowError(f"{path}:{number} has a line of more than {MAX_LINE_BYTES >> 20} MiB")
            continue
        line, name = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line, f"{path}:{number}"
        if not line.strip():
            continue
        try:
            yield row_of(name, read(line.decode()))
        except UnicodeDecodeError as error:
            yield not_utf8(name, error)
        except json.JSONDecodeError as error:
            yield BrokenRowError(f"{name} is not JSON ({error.msg}, at its character {error.pos + 1})")
        except (ValueError, RecursionError):
            yield BrokenRowError(f"{name} has a number of thousands of digits, or is nested too deeply")


def short_lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Yield each line; None for one that is too long, which is read in pieces and never held whole."""
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(PIECE_BYTES)
        yield None


def row_of(name: str, fields: Any) -> Row | BrokenRowError:
    if isinstance(fields, dict):
        return Row(name, cast(dict[str, Any], fields))
    return BrokenRowError(f"{name} is a JSON {type(fields).__name__}, not an object with fields")


def not_utf8(name: str, error: UnicodeDecodeError) -> BrokenRowError:
    return BrokenRowError(f"{name} is not text in UTF-8 (at its byte {error.start + 1})")


def document_rows(path: str, file: IO[bytes]) -> Rows:
    try:
        yield Row(path, {"text": file.read().decode("utf-8-sig")})
    except UnicodeDecodeError as error:
        yield not_utf8(path, error)


def csv_rows(path: str, file: Any) -> Rows:
    """Yield a record a row, of which every value is text; the first record has the names of the fields.

    Python's csv and not that of pandas: "007" stays text, and each broken record is named.
    """
    csv.field_size_limit(MAX_CELL_BYTES)
    with io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="\n") as text:
        line = text.readline()
        delimiters = "\t" if ending_of(path) == ".tsv" else DELIMITERS
        delimiter = next((candidate for candidate in delimiters if candidate in line), delimiters[0])
        records = csv.reader(chain([line], text), delimiter=delimiter, strict=True)
        header = [field.strip() for field in next(records, [])]
        if not header or len(set(header)) < len(header):
            raise MegabatchError(f"the first line of {path} must name its fields, each once, and is {header}; add it")
        while True:
            record, problem, name = list[str](), "", f"{path}:{records.line_num + 1}"
            try:
                record = next(records)
            except StopIteration:
                return
            except csv.Error as error:
                problem = f"is no record of csv ({error})"
            if not record and not problem:
                continue
            if not problem and len(record) != len(header):
                problem = f"has {len(record)} values, and the first line names {len(header)} fields"
            text_of_record = "".join(record)
            if not text_of_record.isascii() and (escaped := ESCAPED.search(text_of_record)):
                problem = f"is not text in UTF-8 (byte 0x{ord(escaped[0]) - 0xDC00:02x}), so save the file as UTF-8"
            yield BrokenRowError(f"{name} {problem}") if problem else Row(name, dict(zip(header, record, strict=True)))


def parquet_rows(path: str, file: IO[bytes]) -> Rows:
    import pyarrow.parquet as pq

    number = 0
    for batch in pq.ParquetFile(file).iter_batches(batch_size=1000):
        for fields in cast(list[dict[str, Any]], batch.to_pylist()):
            number += 1
            yield Row(f"{path}:{number}", fields)


TEXT_KINDS = ("jsonl", "csv", "text", "documents")
READERS: dict[Kind, Callable[[str, Any], Rows]] = {
    "jsonl": json_rows,
    "csv": csv_rows,
    "parquet": parquet_rows,
    "text": partial(line_rows, read=lambda line: {"text": line.removesuffix("\n").removesuffix("\r")}),
    "documents": document_rows,
}


def standard_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with role and content; one of another form, or of an unknown speaker, as it is."""
    role = ROLES.get(str(message.get("from")))
    if role is None or "role" in message or "value" not in message:
        return message
    more = {name: value for name, value in message.items() if name not in ("from", "value")}
    return {"role": role, "content": message["value"], **more}

"""Rows: what a source of text consists of, read lazily, one after the other, with names for messages.

To add a kind of source, write a generator of rows, name it in `rows_of` and the kind in places.py.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import DatasetDict, load_from_disk

from megabatch.errors import MegabatchError
from megabatch.train.config import SourceConfig
from megabatch.train.data.hub import hub_rows
from megabatch.train.data.sources import Place, ending_of, place_of
from megabatch.train.data.stdlib import stdlib_functions

MAX_CELL_BYTES = 2**31 - 1  # of csv; Python's own limit, 128 KiB, is less than many a text has
ROWS_AT_ONCE = 1000  # of a column format


@dataclass(frozen=True)
class Row:
    """One row of a source."""

    name: str  # where it comes from: "gsm8k.jsonl:17"
    fields: Mapping[str, Any]


class BrokenRowError(MegabatchError):
    """One row that cannot be used; the text names the row and says why."""


Rows = Iterator[Row | BrokenRowError]


def rows_of(source: SourceConfig, key: str) -> Rows:
    """The rows of a source in an order that does not change, at most its max_samples; in the place of a broken one its
    error. ``key`` is the source's table in the recipe. Raises at once where the source itself is not there."""
    place = place_of(source, key)
    match place.kind:
        case "stdlib":
            rows = function_rows(Path(place.paths[0]))
        case "saved":
            rows = saved_rows(place.paths[0], source.split, key)
        case "hub":
            named = hub_rows(place.paths[0], source.subset, source.split, key)
            rows = (Row(name, fields) for name, fields in named)
        case _:
            rows = chain.from_iterable(file_rows(place, path, key) for path in place.paths)
    return islice(rows, source.max_samples)


def file_rows(place: Place, path: str, key: str) -> Rows:
    """The rows of one file; what the system has against reading it is an error of ``key``."""
    try:
        match place.kind:
            case "csv":
                yield from csv_rows(path)
            case "parquet":
                yield from parquet_rows(path)
            case "text":
                yield from text_rows(path)
            case "documents":
                yield document_row(path)
            case _:
                yield from json_rows(path)
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:  # EOFError: a .gz that ends too early
        reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
        raise MegabatchError(
            f"cannot read {path} as {place.kind} ({reason}); mend it, or set {key}.path or {key}.source"
        ) from None


def function_rows(root: Path) -> Rows:
    for function in stdlib_functions(root):
        yield Row(function.name, {"prompt": function.prompt, "response": function.response})


def json_rows(path: str) -> Rows:
    """An object a line; a file .json may be one list of objects instead."""
    is_list = ending_of(path) == ".json" and starts_a_list(path)
    with open_bytes(path) as file:
        yield from listed_rows(path, file.read()) if is_list else lined_rows(path, file)


def starts_a_list(path: str) -> bool:
    """Whether the first thing in a file is a JSON list."""
    with open_bytes(path) as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def lined_rows(path: str, file: IO[bytes]) -> Rows:
    for name, line in lines_of(path, file):
        try:
            yield Row(name, json_object(line.decode("utf-8"), name))
        except BrokenRowError as error:
            yield error
        except UnicodeDecodeError as error:
            yield BrokenRowError(f"{name} is not text in UTF-8 (at its byte {error.start + 1})")


def listed_rows(path: str, content: bytes) -> Rows:
    try:
        rows = cast(list[Any], json_value(content.decode("utf-8-sig"), path))
    except (BrokenRowError, UnicodeDecodeError) as error:
        raise MegabatchError(f"cannot read {path} ({error}); write one list of objects, or an object a line") from None
    for number, fields in enumerate(rows, start=1):
        name = f"{path}:{number}"
        yield Row(name, cast(dict[str, Any], fields)) if isinstance(fields, dict) else not_an_object(name, fields)


def text_rows(path: str) -> Rows:
    """A line a row, in the field "text"."""
    with open_bytes(path) as file:
        for name, line in lines_of(path, file):
            try:
                yield Row(name, {"text": line.decode("utf-8").removesuffix("\n").removesuffix("\r")})
            except UnicodeDecodeError as error:
                yield BrokenRowError(f"{name} is not text in UTF-8 (at its byte {error.start + 1})")


def document_row(path: str) -> Row | BrokenRowError:
    """The whole file, in the field "text"."""
    with open_bytes(path) as file:
        try:
            return Row(path, {"text": file.read().decode("utf-8-sig")})
        except UnicodeDecodeError as error:
            return BrokenRowError(f"{path} is not text in UTF-8 (at its byte {error.start + 1})")


def lines_of(path: str, file: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """The lines that are not blank, with their names. Only newlines end them: JSON strings may hold U+2028."""
    for number, line in enumerate(file, start=1):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if line.strip():
            yield f"{path}:{number}", line


def csv_rows(path: str) -> Rows:
    """A record a row, of which every value is text; the first record has the names of the fields."""
    csv.field_size_limit(MAX_CELL_BYTES)
    with open_bytes(path) as file:
        whole = (line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line for number, line in enumerate(file))
        text = (line.decode("utf-8", errors="surrogateescape") for line in whole)  # half a surrogate is refused later
        records = csv.reader(text, delimiter="\t" if ending_of(path) == ".tsv" else ",", strict=True)
        header = csv_header(records, path)
        for number, record in enumerate(csv_records(records), start=1):
            name = f"{path}:{number}"
            if isinstance(record, csv.Error):
                yield BrokenRowError(f"{name} is no record of csv ({record})")
            elif len(record) != len(header):
                yield BrokenRowError(f"{name} has {len(record)} values, and the first line names {len(header)} fields")
            else:
                yield Row(name, dict(zip(header, record, strict=True)))


def csv_header(records: Iterator[list[str]], path: str) -> list[str]:
    try:
        record = next(records, [])
    except csv.Error as error:
        raise MegabatchError(
            f"the first line of {path} must name its fields, and is no record of csv ({error}); mend it"
        ) from None
    header = [field.strip() for field in record]
    if not header or len(set(header)) < len(header):
        raise MegabatchError(f"the first line of {path} must name its fields, each once, and is {header}; add it")
    return header


def csv_records(records: Iterator[list[str]]) -> Iterator[list[str] | csv.Error]:
    """The records that are not blank; after a broken one the reader goes on with the next line."""
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            yield error
        else:
            if record:
                yield record


def parquet_rows(path: str) -> Rows:
    with pq.ParquetFile(path) as file:
        yield from table_rows(path, file.iter_batches(batch_size=ROWS_AT_ONCE))


def saved_rows(folder: str, split: str, key: str) -> Rows:
    """A data set of save_to_disk; of several splits the one that is asked for."""
    try:
        found = load_from_disk(folder)
    except Exception as error:  # pyarrow, json and datasets each have their own
        reason = " ".join(str(error).split())[:200]
        raise MegabatchError(f"cannot read the saved data set {folder} ({reason}); save it again") from None
    if isinstance(found, DatasetDict):
        if split not in found:
            raise MegabatchError(f"{folder} has no split {split!r}, only {', '.join(map(str, found))}; set {key}.split")
        found = found[split]
    tables = cast(Iterator[Any], found.with_format("arrow").iter(batch_size=ROWS_AT_ONCE))
    return table_rows(folder, (batch for table in tables for batch in table.to_batches()))


def table_rows(place: str, batches: Iterator[Any]) -> Rows:
    """The rows of pyarrow's record batches; text in them that is none breaks its row only."""
    number = 0
    for batch in batches:
        for row in batch_rows(batch):
            number += 1
            name = f"{place}:{number}"
            broken = BrokenRowError(f"{name} is not text in UTF-8")
            yield broken if row is None else Row(name, row)


def batch_rows(batch: Any) -> list[dict[str, Any] | None]:
    try:
        return cast(list[dict[str, Any] | None], batch.to_pylist())
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
        return [row for index in range(batch.num_rows) for row in batch_rows(batch.slice(index, 1))]


def open_bytes(path: str) -> IO[bytes]:
    """A file, or what a .gz holds."""
    return cast(IO[bytes], gzip.open(path)) if path.lower().endswith(".gz") else Path(path).open("rb")


def json_object(line: str, name: str) -> dict[str, Any]:
    value = json_value(line, name)
    if not isinstance(value, dict):
        raise not_an_object(name, value)
    return cast(dict[str, Any], value)


def not_an_object(name: str, value: object) -> BrokenRowError:
    return BrokenRowError(f"{name} is a JSON {type(value).__name__}, not an object with fields")


def json_value(text: str, name: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BrokenRowError(f"{name} is not JSON ({error.msg}, at its character {error.pos + 1})") from None
    except (ValueError, RecursionError):  # Python's own limits
        raise BrokenRowError(f"{name} has a number of thousands of digits, or is nested too deeply") from None

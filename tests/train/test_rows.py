"""Rows: every form gives the same ones, a broken one breaks itself alone, and what a place may be."""

import csv
import gzip
import json
import os
import shutil
from itertools import accumulate
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from megabatch.train.config import SourceConfig
from megabatch.train.data.sources import Row, rows_of
from tests.unit.failures.table import line_of

FIELDS = [
    {"prompt": 'one,\n"two"', "response": "a\u2028b\x85c"},
    {"prompt": "", "response": "NA"},
    {"prompt": "007", "response": "é" * 9},
]


def rows(path: str | Path | list[str], **values: Any) -> list[Row]:
    found = list(rows_of(SourceConfig(path=path if isinstance(path, list) else str(path), **values), "data"))
    assert all(isinstance(row, Row) for row in found), found
    return [row for row in found if isinstance(row, Row)]


def mixed(path: Path, **values: Any) -> list[tuple[str, str | dict[str, Any]]]:
    """Rows and broken rows: the name of a row and its fields, or "broken" and the text."""
    found = rows_of(SourceConfig(path=str(path), **values), "data")
    return [(row.name, dict(row.fields)) if isinstance(row, Row) else ("broken", str(row)) for row in found]


def refusal(path: Any, **values: Any) -> str:
    source = SourceConfig(path=path if path is None or isinstance(path, list) else str(path), **values)
    return line_of(lambda: list(rows_of(source, "eval.sets.x")))


def write_jsonl(path: Path, fields: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in fields), encoding="utf-8")
    return path


def write_csv(path: Path, delimiter: str, **how: Any) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter, **how)
        writer.writerows([list(FIELDS[0]), *(list(row.values()) for row in FIELDS)])
    return path


def write_gz(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content))
    return path


def written(folder: Path) -> dict[str, Path]:
    """The same rows, in every form that holds them."""
    table = pa.Table.from_pylist(FIELDS)
    jsonl = write_jsonl(folder / "a.jsonl", FIELDS)
    listed = folder / "b.json"
    listed.write_text(" \n" + json.dumps(FIELDS, indent=2), encoding="utf-8-sig")
    pq.write_table(table, folder / "c.parquet", row_group_size=2)
    Dataset(table).save_to_disk(folder / "d")
    DatasetDict({"other": Dataset(table.slice(1)), "train": Dataset(table)}).save_to_disk(folder / "e")
    gz = write_gz(folder / "f.jsonl.gz", jsonl.read_bytes())
    listed_gz = write_gz(folder / "i.json.gz", listed.read_bytes())
    forms = [jsonl, listed, folder / "c.parquet", folder / "d", folder / "e", gz, listed_gz]
    forms += [write_csv(folder / "g.csv", ","), write_csv(folder / "h.tsv", "\t")]
    forms.append(write_gz(folder / "j.csv.gz", b"\xef\xbb\xbf" + (folder / "g.csv").read_bytes()))
    quoted = write_csv(folder / "k.csv", ",", quoting=csv.QUOTE_ALL)
    quoted.write_bytes(b"\xef\xbb\xbf" + quoted.read_bytes())
    forms.append(quoted)
    return {path.name: path for path in forms}


def test_every_form_gives_the_same_rows_named_by_their_number_or_their_line_of_csv(tmp_path: Path) -> None:
    for path in written(tmp_path).values():
        first = 2 if {".csv", ".tsv"} & {*path.suffixes} else 1  # the first line names the fields
        lines = accumulate((1 + "".join(map(str, fields.values())).count("\n") for fields in FIELDS), initial=first)
        numbers = list(lines) if first == 2 else range(1, len(FIELDS) + 1)
        expected = [Row(f"{path}:{number}", fields) for number, fields in zip(numbers, FIELDS, strict=False)]
        assert rows(path) == expected, path


def test_no_more_rows_than_asked_for_and_none_read_ahead(tmp_path: Path) -> None:
    for path in written(tmp_path).values():
        assert len(rows(path, max_samples=2)) == 2, path
    path = tmp_path / "endless.jsonl"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)  # a reader of whole files would wait for its end for ever
    os.write(writer, b'{"text": "a"}\n' * 3 + b" " * 20_000)
    assert [row.fields for row in rows(path, max_samples=3)] == [{"text": "a"}] * 3
    os.close(writer)


def test_text_is_a_line_a_row_and_blank_lines_are_none(tmp_path: Path) -> None:
    for name in ("a.txt", "a.TXT"):
        (tmp_path / name).write_bytes("\ufeffa\u2028b\r\n\n  \n  c\n\x0c\nd".encode())
        assert [(row.name, row.fields) for row in rows(tmp_path / name)] == [
            (f"{tmp_path / name}:{number}", {"text": text}) for number, text in [(1, "a\u2028b"), (4, "  c"), (6, "d")]
        ]


def test_a_broken_line_breaks_its_own_row_only(tmp_path: Path) -> None:
    """tests/elastic/bad_data.md has other broken lines."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + b"[" * 100_000 + b'\n{"text": "b"}\n')
    first, (broken, said), last = mixed(path)
    assert (first, last) == ((f"{path}:1", {"text": "a"}), (f"{path}:3", {"text": "b"}))
    assert (broken, said) == ("broken", f"{path}:2 has a number of thousands of digits, or is nested too deeply")


def test_a_broken_record_of_csv_breaks_its_own_row_only(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,more\na,b\n\nc\n"d" e,f\n' + b"g" * 200_000 + b',h\n"i,j')
    assert mixed(path) == [
        (f"{path}:2", {"text": "a", "more": "b"}),
        ("broken", f"{path}:4 has 1 values, and the first line names 2 fields"),
        ("broken", f"{path}:5 is no record of csv (',' expected after '\"')"),
        (f"{path}:6", {"text": "g" * 200_000, "more": "h"}),
        ("broken", f"{path}:7 is no record of csv (unexpected end of data)"),
    ]


def test_broken_text_in_a_table_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    cells = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    pq.write_table(pa.table({"text": cells}), path)
    assert refusal(path).startswith(f"cannot read {path} as parquet ('utf-8' codec can't decode byte 0xff")


def test_a_row_of_a_list_that_is_no_object_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}, 1]')
    assert mixed(path) == [
        (f"{path}:1", {"text": "a"}),
        ("broken", f"{path}:2 is a JSON int, not an object with fields"),
    ]
    path.write_text('[{"text": "a"}, ')
    assert refusal(path).startswith(f"cannot read {path} as jsonl (Expecting value")


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    forms = written(tmp_path)
    next(forms["d"].glob("*.arrow")).write_bytes(b"")
    assert refusal(forms["d"]).startswith(f"cannot read the saved data set {forms['d']} (")
    (tmp_path / "a.csv").write_text("")
    assert "must name its fields" in refusal(tmp_path / "a.csv")
    for header in ('"text" more,x', '"text'):
        (tmp_path / "a.csv").write_text(f"{header}\na,b\n")
        assert refusal(tmp_path / "a.csv").startswith(f"cannot read {tmp_path}/a.csv as csv (")
    assert refusal(forms["a.jsonl"], source="parquet").startswith(f"cannot read {forms['a.jsonl']} as parquet (")


def hub_in_cache(folder: Path) -> Path:
    """A cache of datasets that holds org/name as if it had been downloaded."""
    made = datasets.load_dataset(
        "json", data_files=str(write_jsonl(folder / "a.jsonl", FIELDS)), cache_dir=str(folder / "made")
    )
    del made
    info_file = next((folder / "made").rglob("dataset_info.json"))
    entry = folder / "cache" / "org___name" / "default" / "0.0.0" / "abc"
    shutil.copytree(info_file.parent, entry)
    (entry / "json-train.arrow").rename(entry / "name-train.arrow")
    info = json.loads(info_file.read_text()) | {"dataset_name": "name"}
    (entry / "dataset_info.json").write_text(json.dumps(info))
    return folder / "cache"


def test_a_hub_data_set_that_was_downloaded_is_read_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(hub_in_cache(tmp_path)))
    assert rows("org/name") == [Row(f"org/name:{number}", fields) for number, fields in enumerate(FIELDS, start=1)]
    assert rows("org/name", source="hub", max_samples=1) == rows("org/name")[:1]
    assert "the split 'test' cannot be read (ValueError: Bad split: test." in refusal("org/name", split="test")
    assert "for config 'x'" in refusal("org/name", subset="x")


def test_a_hub_id_without_network_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.json", FIELDS)
    monkeypatch.chdir(tmp_path)
    for name in ("org/missing", "missing"):
        said = refusal(name)
        assert said.startswith(
            f"eval.sets.x.path is '{name}', which is nothing here, and it cannot be had from the Hug"
        )
        assert said.endswith("; name a file, or see to the network, eval.sets.x.path and eval.sets.x.subset")
    assert "no data set of the hub" in refusal("json")  # datasets would read the working folder


def test_a_file_of_documents_is_one_document(tmp_path: Path) -> None:
    """By its ending, or because the recipe says so; a line is one where it says that."""
    text = "# a title\n\nand more\n"
    for name in ("a.md", "b.txt"):
        (tmp_path / name).write_text(text)
    whole = [{"text": text}]
    found = {
        (name, kind): [row.fields for row in rows_of(SourceConfig(path=str(tmp_path / name), source=kind), "data")]
        for name, kind in (("a.md", None), ("b.txt", "documents"), ("b.txt", None), ("a.md", "text"))
    }
    assert found["a.md", None] == found["b.txt", "documents"] == whole
    assert found["b.txt", None] == found["a.md", "text"] == [{"text": "# a title"}, {"text": "and more"}]


def test_globs_are_sorted_and_lists_keep_their_order(tmp_path: Path) -> None:
    for name in ("b/2", "b/10", "a"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": name}])
    texts = [row.fields["text"] for row in rows(tmp_path / "**" / "*.jsonl")]
    assert texts == ["a", "b/10", "b/2"]
    listed = [str(tmp_path / "b" / "*.jsonl"), str(tmp_path / "a.jsonl")]
    assert [row.name for row in rows(listed)] == [f"{tmp_path / name}.jsonl:1" for name in ("b/10", "b/2", "a")]
    assert [row.fields["text"] for row in rows(listed, max_samples=2)] == ["b/10", "b/2"]
    (tmp_path / "[x].jsonl").write_text('{"text": "brackets"}')
    assert [row.fields["text"] for row in rows(tmp_path / "[x].jsonl")] == ["brackets"]


def test_home_and_the_working_folder_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert rows("~/a.jsonl") == rows("~/*.jsonl") == rows(tmp_path / "a.jsonl")
    monkeypatch.chdir(tmp_path)
    assert [row.name for row in rows("a.jsonl")] == ["a.jsonl:1"]


def test_a_source_may_say_what_its_ending_does_not(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.data", FIELDS)
    assert [row.fields for row in rows(path, source="jsonl")] == FIELDS
    assert len(rows(path, source="text")) == len(FIELDS)
    assert refusal(path) == (
        f"eval.sets.x.path names {path}, whose ending says nothing of what it is; set eval.sets.x.source to jsonl, "
        "csv, parquet, text (a line a document) or documents (a file a document), or name a file that ends in .jsonl, "
        ".json, .csv, .tsv, .parquet, .txt, .md, .rst, .py or in "
        "one of them and .gz"
    )


def test_a_missing_file_is_refused_with_its_folder(tmp_path: Path) -> None:
    assert f", and no folder {tmp_path}/no;" in refusal(tmp_path / "no" / "a.jsonl")
    assert "there is no such file;" in refusal(tmp_path / "zzz.csv")
    assert "there is no such file;" in refusal(tmp_path / "*.csv")


def test_what_names_no_rows_is_refused(tmp_path: Path) -> None:
    assert refusal(None).startswith("eval.sets.x.path names nothing; set it to a file, ")
    assert refusal([]).startswith("eval.sets.x.path names nothing")
    assert refusal("a.jsonl", source="stdlib").startswith('eval.sets.x.source is "stdlib", which has no path')


def test_kinds_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    forms = written(tmp_path)
    assert "names csv and jsonl together" in refusal([str(forms["g.csv"]), str(forms["a.jsonl"])])
    assert "names 2 places, and a saved data set or a hub id stands alone" in refusal(
        [str(forms["d"]), str(forms["e"])]
    )


def test_a_split_that_is_not_there_is_refused(tmp_path: Path) -> None:
    saved = written(tmp_path)["e"]
    assert [row.fields for row in rows(saved, split="other")] == FIELDS[1:]
    assert refusal(saved, split="test") == f"{saved} has no split 'test', only other, train; set eval.sets.x.split"
    (tmp_path / "a.txt").write_text("a\n")
    assert "eval.sets.x.path is text, which has none" in refusal(tmp_path / "a.txt", split="test")

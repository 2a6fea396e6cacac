"""Places: what a path names, by its ending or because the recipe says so."""

from pathlib import Path

import pytest

from tests.train.test_rows import FIELDS, refusal, rows, write_jsonl, written


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


def test_a_missing_file_is_refused_with_the_name_that_comes_nearest(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", FIELDS)
    assert refusal(tmp_path / "trian.jsonl") == (
        f"eval.sets.x.path is '{tmp_path}/trian.jsonl', and there is no such file ({tmp_path}/train.jsonl comes "
        "nearest); set it to what is to be read"
    )
    assert f", and no folder {tmp_path}/no;" in refusal(tmp_path / "no" / "a.jsonl")
    assert "there is no such file;" in refusal(tmp_path / "zzz.csv")
    assert "there is no such file;" in refusal(tmp_path / "*.csv")


def test_what_names_no_rows_is_refused(tmp_path: Path) -> None:
    assert refusal(None).startswith("eval.sets.x.path names nothing; set it to a file, ")
    assert refusal([]).startswith("eval.sets.x.path names nothing")
    assert refusal("a.jsonl", source="stdlib").startswith('eval.sets.x.source is "stdlib", which has no path')
    assert refusal(tmp_path) == (
        f"eval.sets.x.path is '{tmp_path}', a folder that datasets' save_to_disk has not written; name the files in "
        f'it, as in "{tmp_path}/*.jsonl"'
    )


def test_kinds_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    forms = written(tmp_path)
    assert "names csv and jsonl together" in refusal([str(forms["g.csv"]), str(forms["a.jsonl"])])
    assert f"matches {tmp_path}/a.jsonl and {tmp_path}/g.csv, files of two kinds" in refusal(tmp_path / "[ag].*")
    assert "names 2 places, and a saved data set or a hub id stands alone" in refusal(
        [str(forms["d"]), str(forms["e"])]
    )


def test_a_split_that_is_not_there_is_refused(tmp_path: Path) -> None:
    saved = written(tmp_path)["e"]
    assert [row.fields for row in rows(saved, split="other")] == FIELDS[1:]
    assert refusal(saved, split="test") == f"{saved} has no split 'test', only other, train; set eval.sets.x.split"

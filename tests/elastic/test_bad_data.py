"""Every kind of bad data in bad_data.md ends as the table says: with that line, or as so many samples."""

import gzip
import json
import os
import re
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import ByT5Tokenizer

from megabatch import MegabatchError
from megabatch.train.cli import commands as cli
from megabatch.train.data.load import Data, load_data
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from tests.train.data_for_tests import CPU, recipe

GOOD = [{"text": "one"}, {"text": "two"}, {"text": "three"}]
MANY = 5000  # rows, more than are read at once
Keys = dict[str, Any]  # of [data]
KINDS: dict[str, Callable[[Path], Keys]] = {}
MEDDLING: dict[str, Callable[[Path], None]] = {}  # what happens to the file while it is read
DAMAGING: dict[str, Callable[[Path], None]] = {}  # what happens to the cache's entry between two runs
OWN = """
import os
import torch

class Samples(list):
    def __getitem__(self, index):
        return made(index, super().__getitem__(index))

def sample_of(number, *shape):
    return {"x": torch.full((3, *shape), float(number)), "y": torch.tensor(1.0)}

def model():
    return torch.nn.Linear(3, 1)

def loss(model, microbatch):
    return (model(microbatch["x"]).squeeze(-1) - microbatch["y"]).square().sum(), len(microbatch["y"])

def made(index, sample):
    if sample == "raises":
        raise ValueError("no such picture")
    if sample == "dies" and torch.utils.data.get_worker_info() is not None:
        os._exit(9)
    if sample == "dies":
        return sample_of(3)
    return sample

def all_but(bad):
    return Samples([sample_of(0), sample_of(1), sample_of(2), bad])
"""


def kind(name: str) -> Callable[[Callable[[Path], Keys]], Callable[[Path], Keys]]:
    """Enters a kind under the name that the table has for it."""

    def enter(make: Callable[[Path], Keys]) -> Callable[[Path], Keys]:
        KINDS[name] = make
        return make

    return enter


def lines(path: Path, rows: Iterable[Any]) -> Keys:
    """A .jsonl of rows; what is no mapping is written as it is."""
    written = (json.dumps(row).encode() if isinstance(row, dict) else row for row in rows)
    path.write_bytes(b"".join(row + b"\n" for row in written))
    return {"path": str(path)}


def with_row(row: Any) -> Callable[[Path], Keys]:
    """The good rows, and another in their midst."""
    return lambda folder: lines(folder / "a.jsonl", [GOOD[0], GOOD[1], row, GOOD[2]])


for name, row in {
    "a line that is no JSON": b'{"text": ',
    "JSON that is no object": b'["text"]',
    "a number of thousands of digits": b'{"text": ' + b"1" * 5000 + b"}",
    "a row without the field": {"body": "x"},
    "a value of another type": {"text": 3},
    "null": {"text": None},
    "an empty text": {"text": ""},
    "bytes that are no UTF-8": b'{"text": "\xff\xfe"}',
    "a NUL byte in JSON": b'{"text": "a\x00b"}',
    "half of a surrogate pair": b'{"text": "\\ud800"}',
    "a blank line": b"   ",
}.items():
    kind(name)(with_row(row))


@kind("a byte order mark")
def byte_order_mark(folder: Path) -> Keys:
    keys = lines(folder / "a.jsonl", [*GOOD, {"text": "four"}])
    Path(keys["path"]).write_bytes(b"\xef\xbb\xbf" + Path(keys["path"]).read_bytes())
    return keys


@kind("a prompt without a response")
def prompt_only(folder: Path) -> Keys:
    return lines(folder / "a.jsonl", [{"prompt": "p", "response": part} for part in ("r", "", "s", "t")])


@kind("a line of 300 MB")
def long_line(folder: Path) -> Keys:
    with (folder / "a.jsonl").open("wb") as file:
        file.write(b'{"text": "one"}\n{"text": "two"}\n')
        file.seek(300_000_000, os.SEEK_CUR)  # no disk holds it
        file.write(b'\n{"text": "three"}\n')
    return {"path": str(folder / "a.jsonl")}


@kind("a sample that is far too long")
def too_long(folder: Path) -> Keys:
    return with_row({"text": "x" * 100_000})(folder)


def chat(*messages: Any) -> Callable[[Path], Keys]:
    good = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    rows = [{"messages": each} for each in (good, good, list(messages), good)]
    return lambda folder: lines(folder / "a.jsonl", rows)


USER = {"role": "user", "content": "hi"}
CHATS = {
    "a chat in which nobody answers": [USER],
    "a message without a role": [USER, {"content": "yes"}],
    "a message without content": [USER, {"role": "assistant"}],
    "a role that the template does not know": [
        {"role": "wizard", "content": "ho"}, {"role": "assistant", "content": "yes"},
    ],
}  # fmt: skip
for name, messages in CHATS.items():
    kind(name)(chat(*messages))


@kind("an empty file among others")
def empty_shard(folder: Path) -> Keys:
    (folder / "a.jsonl").touch()
    lines(folder / "b.jsonl", [*GOOD, {"text": "four"}])
    return {"path": str(folder / "*.jsonl")}


@kind("nothing but empty files")
def all_empty(folder: Path) -> Keys:
    (folder / "a.jsonl").touch()
    (folder / "b.jsonl").write_text("\n\n")
    return {"path": str(folder / "*.jsonl")}


@kind("a .gz that was cut off")
def truncated_gz(folder: Path) -> Keys:
    content = gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in GOOD * 1000))
    (folder / "a.jsonl.gz").write_bytes(content[: len(content) // 2])
    return {"path": str(folder / "a.jsonl.gz")}


@kind("a .gz that is none")
def no_gz(folder: Path) -> Keys:
    (folder / "a.jsonl.gz").write_bytes(b'{"text": "one"}\n')
    return {"path": str(folder / "a.jsonl.gz")}


@kind("a .parquet that is none")
def no_parquet(folder: Path) -> Keys:
    (folder / "a.parquet").write_bytes(b"PAR1 and so on")
    return {"path": str(folder / "a.parquet")}


@kind("a shard with other columns")
def other_columns(folder: Path) -> Keys:
    pq.write_table(pa.Table.from_pylist(GOOD), folder / "a.parquet")
    pq.write_table(pa.Table.from_pylist([{"body": "x"}]), folder / "b.parquet")
    return {"path": str(folder / "*.parquet")}


@kind("a .csv without the column")
def csv_without_column(folder: Path) -> Keys:
    (folder / "a.csv").write_text("body,number\nx,1\n")
    return {"path": str(folder / "a.csv"), "text_field": "text"}


@kind("a ragged row of .csv")
def ragged_csv(folder: Path) -> Keys:
    (folder / "a.csv").write_text("text,number\none,1\ntwo\nthree,3\nfour,4\n")
    return {"path": str(folder / "a.csv")}


@kind("bytes that are no UTF-8 in .csv")
def csv_bytes(folder: Path) -> Keys:
    (folder / "a.csv").write_bytes(b"text\none\ntwo\nb\xff\nthree\n")
    return {"path": str(folder / "a.csv")}


@kind("a folder without data")
def folder_of_others(folder: Path) -> Keys:
    (folder / "others").mkdir()
    (folder / "others" / "a.html").write_text("x")
    return {"path": str(folder / "others")}


@kind("a file that is not there")
def missing(folder: Path) -> Keys:
    lines(folder / "train.jsonl", GOOD)
    return {"path": str(folder / "trian.jsonl")}


@kind("files of two kinds")
def two_kinds(folder: Path) -> Keys:
    lines(folder / "a.jsonl", GOOD)
    (folder / "a.txt").write_text("one\n")
    return {"path": str(folder / "a.*")}


@kind("a file of an unknown kind")
def unknown_kind(folder: Path) -> Keys:
    (folder / "a.data").write_text("one\n")
    return {"path": str(folder / "a.data")}


def own(folder: Path, bad: str) -> Keys:
    (folder / "own.py").write_text(f"{OWN}\ndef samples():\n    return all_but({bad})\n")
    return {"function": f"{folder / 'own.py'}:samples"}


for name, bad in {
    "a sample of your own that cannot be read": '"raises"',
    "a sample of your own that is of another shape": "sample_of(3, 2)",
    "a sample of your own that is no mapping": "[1, 2]",
    "a sample of your own that lacks a value": '{"x": torch.zeros(3)}',
    "a number in a sample of your own that is not finite": "sample_of(float('nan'))",
}.items():
    kind(name)(lambda folder, bad=bad: own(folder, bad))


@kind("a loader's process that dies")
def loader_dies(folder: Path) -> Keys:
    return {**own(folder, '"dies"'), "num_workers": 1}


def many(folder: Path) -> Keys:
    return lines(folder / "a.jsonl", GOOD * (MANY // 3))


def appended(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"text": "late"}\n')


def cut_off(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def garbled(path: Path) -> None:
    path.write_bytes(b"?" * path.stat().st_size)


MEDDLING |= {
    "a file that grows while it is read": appended,
    "a file that is cut off while it is read": cut_off,
    "a file that is deleted while it is read": Path.unlink,
}
DAMAGING |= {
    "tokenized data that was cut off": lambda entry: cut_off(entry / "samples.arrow"),
    "tokenized data that was overwritten": lambda entry: garbled(entry / "samples.arrow"),
    "tokenized data without its summary": lambda entry: (entry / "summary.json").write_text("{}"),
}
KINDS |= dict.fromkeys([*MEDDLING, *DAMAGING], many)


PAGE = Path(__file__).with_name("bad_data.md").read_text()
TABLE = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("|")][2:]
GUARD = (
    "{% for m in messages %}{% if m['role'] == 'wizard' %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
RECIPE = """
[model]
function = "{folder}/own.py:model"
[loss]
function = "{folder}/own.py:loss"
[data]
function = "{folder}/own.py:samples"
{more}
[update]
global_batch_size = 4
micro_batch_size = 2
[eval]
num_samples = 0
[run]
folder = "{folder}/run"
tensorboard = false
"""


class Meddling(Console):
    """Does something when the first sample has been read."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__(enabled=False, loss_digits=4)
        self._actions = [action]

    @contextmanager
    def progress(self, what: str, total: int | None, unit: str) -> Generator[Callable[[int], None]]:
        yield lambda _: self._actions.pop()() if self._actions else None


def load(folder: Path, keys: dict[str, Any], how: str, tokenizer: Any, console: Console) -> Data:
    data = {"broken_rows": how, "cache": str(folder / "cache"), **keys}
    update = {"max_microbatch_tokens": 256, "micro_batch_size": None}
    return load_data(recipe(folder, data=data, update=update), tokenizer, Ranks(0, 1, CPU), console)


def ids_of(data: Data) -> list[list[int]]:
    return [sample["input_ids"].tolist() for sample in cast(Any, data.train)]


def loaded(name: str, how: str, folder: Path, chatty: dict[bool, Any]) -> Data:
    keys, tokenizer, silent = KINDS[name](folder), ByT5Tokenizer(), Console(enabled=False, loss_digits=4)
    if name in CHATS:
        tokenizer = copy(chatty[True])
        tokenizer.chat_template = GUARD + tokenizer.chat_template
    if name in MEDDLING:
        silent = Meddling(lambda: MEDDLING[name](folder / "a.jsonl"))
    if name in DAMAGING:
        before = ids_of(load(folder, keys, how, tokenizer, silent))
        (entry,) = (folder / "cache").iterdir()
        DAMAGING[name](entry)
        again = load(folder, keys, how, tokenizer, silent)
        assert ids_of(again) == before
        return again
    return load(folder, keys, how, tokenizer, silent)


def trained(name: str, how: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the last words, at status 2, of a run with samples of the user's own."""
    keys = KINDS[name](folder)
    more = "".join(f"{key} = {value}\n" for key, value in keys.items() if key != "function")
    more += 'broken_rows = "skip"\n' if how == "skip" else ""
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder, more=more))
    assert cli.run(["train", str(folder / "recipe.toml")]) == 2
    return capsys.readouterr().err.removeprefix("megabatch: ").removesuffix("\n")


def test_the_table_has_every_kind_that_is_tested() -> None:
    assert [kind for kind, _, _ in TABLE] == list(dict.fromkeys(kind for kind, _, _ in TABLE))
    assert {kind for kind, _, _ in TABLE} == KINDS.keys()
    assert len(KINDS) >= 24


@pytest.mark.parametrize("how", ["stop", "skip"])
@pytest.mark.parametrize(("name", "stop", "skip"), TABLE, ids=[row[0] for row in TABLE])
def test_it_ends_as_the_table_says(
    tmp_path: Path,
    chatty: dict[bool, Any],
    capsys: pytest.CaptureFixture[str],
    name: str,
    stop: str,
    skip: str,
    how: str,
) -> None:
    said = {"stop": stop, "skip": skip}[how]
    line = re.fullmatch("`(.*)`", said)
    if "of your own" in name or "loader" in name:
        assert line is not None
        found = trained(name, how, tmp_path, capsys)
    elif line is None:
        data = loaded(name, how, tmp_path, chatty)
        num_rows = MANY // 3 * 3 if name in DAMAGING else 3 if name == "a blank line" else 4
        assert len(data.train) == num_rows - (said == "left out")
        return
    else:
        with pytest.raises(MegabatchError) as caught:
            loaded(name, how, tmp_path, chatty)
        found = str(caught.value)
    assert line[1] in found
    assert len(found.splitlines()) == 1

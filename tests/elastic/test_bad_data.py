"""Every kind of bad data that the documents list ends as they say: with that line, or as so many samples."""

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import ByT5Tokenizer

from megabatch import MegabatchError
from megabatch.train.cli import commands as cli
from megabatch.train.data.load import Data, load_data
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from tests.elastic.bad_data import CHATS, DAMAGING, KINDS, MANY, MEDDLING
from tests.train.data_for_tests import CPU, recipe

SECTION = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text().partition("## Bad data")[2]
TABLE = [line.strip("| ").split(" | ") for line in SECTION.partition("\n## ")[0].splitlines() if line.startswith("|")][
    2:
]
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
    """What a run with samples of the user's own says on its way out, of status 2."""
    keys = KINDS[name](folder)
    more = "".join(f"{key} = {value}\n" for key, value in keys.items() if key != "function")
    more += 'broken_rows = "skip"\n' if how == "skip" else ""
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder, more=more))
    assert cli.run(["train", str(folder / "recipe.toml")]) == 2
    return capsys.readouterr().err.removeprefix("megabatch: ").removesuffix("\n")


def test_the_documents_list_every_kind_that_is_tested() -> None:
    assert [kind for kind, _, _ in TABLE] == list(dict.fromkeys(kind for kind, _, _ in TABLE))
    assert {kind for kind, _, _ in TABLE} == KINDS.keys()
    assert len(KINDS) >= 24


@pytest.mark.parametrize("how", ["stop", "skip"])
@pytest.mark.parametrize(("name", "stop", "skip"), TABLE, ids=[row[0] for row in TABLE])
def test_it_ends_as_the_documents_say(
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

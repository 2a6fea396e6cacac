"""Every planted bug can be planted: its text stands once in its file."""

import importlib
from pathlib import Path

import pytest

import megabatch
from tests.exact.mutations import Mutation

TABLES = [
    file.stem
    for file in sorted(Path(__file__).parent.glob("*.py"))
    if file.name != Path(__file__).name and "Mutation(" in file.read_text()
]


@pytest.mark.parametrize("table", TABLES)
def test_a_planted_text_stands_once(table: str) -> None:
    importlib.import_module(f"tests.exact.{table}")
    folder = Path(megabatch.__file__).parent
    counts = {bug.name: (folder / bug.file).read_text().count(bug.text) for bug in Mutation.known}
    assert not {name: count for name, count in counts.items() if count != 1}

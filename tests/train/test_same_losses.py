"""The recipes print the same losses with any number of processes and either wrapper, cut smaller to be quick."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from megabatch.train.data.stdlib import stdlib_functions, stdlib_root
from tests.train.conftest import Bench, write_pairs

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"
MAX_BYTES, NUM_SAMPLES, NUM_HELD_OUT = 450, 213, 4  # 209 to train on: 29 updates of 7, and one of 6
FLOAT64 = {"eval__num_samples": NUM_HELD_OUT, "model__config__n_embd": 16, "model__config__n_head": 1}
FLOAT32 = {"eval__num_samples": NUM_HELD_OUT, "model__config__hidden_size": 32, "run__max_steps": 10}
CELLS: list[tuple[int, str | None]] = [(1, None), (2, "ddp"), (3, "fsdp2"), (4, "fsdp2")]


@pytest.fixture
def short_functions(tmp_path: Path) -> Path:
    """The recipes' own text, without the long functions."""
    pairs = stdlib_functions(stdlib_root())
    short = ((pair.prompt, pair.response) for pair in pairs if len((pair.prompt + pair.response).encode()) < MAX_BYTES)
    return write_pairs(tmp_path / "short.jsonl", list(islice(short, NUM_SAMPLES)))


def losses(bench: Bench, recipe: str, ranks: int, wrapper: str | None, **values: Any) -> list[float]:
    folder = bench.path / f"{recipe}-{ranks}-{wrapper}"
    path = RECIPES / f"{recipe}.toml"
    bench.train(recipe=path, ranks=ranks, parallel__wrapper=wrapper, run__folder=folder, **values)
    return [row[key] for row in bench.rows(folder) for key in ("loss", "eval_loss") if key in row]


def test_float64_agrees_to_ten_digits_for_thirty_updates(bench: Bench, short_functions: Path) -> None:
    data = {"data__source": "jsonl", "data__path": short_functions, "data__max_sample_tokens": None}
    found = {cell: losses(bench, "gpt2-float64", *cell, **data, **FLOAT64) for cell in CELLS}
    reference = found[1, None]
    assert len(reference) == 30 + 3  # updates, and evaluations at 0, 15 and 30
    assert reference[-1] < reference[0] - 1
    for cell, same in found.items():
        assert same == pytest.approx(reference, rel=1e-10), cell


def test_float32_agrees_to_four_digits_for_ten_updates(bench: Bench, short_functions: Path) -> None:
    cells: list[tuple[int, str | None]] = [(1, None), (2, "ddp"), (3, "fsdp2")]
    data = {"data__source": "jsonl", "data__path": short_functions, "data__max_sample_tokens": None}
    found = {cell: losses(bench, "stdlib", *cell, **data, **FLOAT32) for cell in cells}
    assert len(found[1, None]) >= 10 + 2
    for cell, same in found.items():
        assert same == pytest.approx(found[1, None], rel=1e-4), cell

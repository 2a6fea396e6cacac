"""A run to its end: what it writes, what it says, what becomes of the last samples."""

from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from megabatch.train.data.stdlib import stdlib_functions, stdlib_root
from tests.train.conftest import NO_DROPOUT, Bench, write_pairs

pytestmark = pytest.mark.slow


KEYS_OF_AN_UPDATE = [
    "step",
    "loss",
    "grad_norm",
    "lr",
    "weight",
    "epoch",
    "num_samples",
    "num_microbatches",
    "num_tokens",
    "num_target_tokens",
    "padding",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "memory_gib",
    "time",
    "seconds",
    "run_hash",
]


def test_a_run_writes_its_metrics_its_checkpoint_and_its_report(bench: Bench) -> None:
    said = bench.train(run__save_every=4)
    updates = [row for row in bench.rows() if "loss" in row]
    evaluations = [row for row in bench.rows() if "eval_loss" in row]
    assert all(sorted(row) == sorted(KEYS_OF_AN_UPDATE) for row in updates)
    assert [row["step"] for row in updates] == [1, 2, 3, 4, 5, 6]
    assert [row["num_samples"] for row in updates] == [8, 8, 8, 8, 8, 5]
    assert [row["step"] for row in evaluations] == [0, 2, 4, 6]
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"] - 0.5
    assert [row["lr"] for row in updates[:3]] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01])
    assert all(0 <= row["padding"] < 1 and row["tokens_per_second"] > 0 and row["memory_gib"] > 0 for row in updates)
    times = [row["seconds"] for row in bench.rows()]
    assert 0 < times[0] < times[-1] < 100
    assert times == sorted(times)
    assert all(abs(datetime.now(UTC) - datetime.fromisoformat(row["time"])).seconds < 100 for row in bench.rows())
    assert sorted(path.name for path in (bench.folder / "checkpoints").iterdir()) == ["latest", "step-4", "step-6"]
    assert (bench.folder / "checkpoints" / "latest").read_text() == "step-6"
    assert "update.global_batch_size" in (bench.folder / "report.html").read_text()
    for text in ("plan  6 updates of 8 samples", "real tokens", "padding", "sync last"):
        assert text in said


def test_the_screen_has_a_short_plan_and_the_folder_the_whole_one(bench: Bench) -> None:
    said = bench.train(run__max_steps=2, run__verbose="false", update__one_row="true", eval__num_samples=0)
    lines = said.splitlines()
    plan = lines[: next(place for place, line in enumerate(lines) if line.startswith("folder  ")) + 1]
    assert plan[0].startswith("run           2 updates of 8 samples")
    assert len(plan) <= 12
    assert {line[12:14] for line in plan} == {"  "}
    whole = (bench.folder / "plan.txt").read_text().splitlines()
    assert f"there has all {len(whole)} lines" in plan[-1] or len(whole) < 12
    assert all(any(line[14:] in each for each in whole) for line in plan[:-1])
    assert lines[-3].startswith("2 updates in ")
    assert lines[-2] == f"a page to look at: {bench.folder / 'report.html'}"
    assert lines[-1].startswith(f"next: megabatch export {bench.folder} --to {bench.folder}-model, or megabatch runs ")


def test_only_the_main_rank_speaks(bench: Bench) -> None:
    main, other = bench.finish(ranks=2, run__max_steps=2)
    assert main.out.count("update    2  loss ") == 1
    assert (other.status, other.out, other.err) == (0, "", "")


@pytest.mark.parametrize(
    ("tail", "epochs", "words", "sizes"),
    [
        ("step", 1, "its last update was stepped exactly: 5 of 8 samples", [*[8] * 5, 5]),
        ("drop", 1, "the data ran out: dropped 5 samples of each epoch, too few for an update of 8", [8] * 5),
        ("carry", 2, "the data ran out: 2 samples were left, too few for an update of 8", [8] * 11),
    ],
)
def test_a_tail_is_as_asked_and_said(bench: Bench, tail: str, epochs: int, words: str, sizes: list[int]) -> None:
    assert words in bench.train(update__tail=tail, run__max_epochs=epochs)
    assert [row["num_samples"] for row in bench.rows() if "loss" in row] == sizes


def test_fewer_samples_than_ranks(bench: Bench, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "two.jsonl", [("a", "bc"), ("def", "g")])
    bench.train(ranks=3, data__path=data, run__max_epochs=2, **NO_DROPOUT)
    bench.train(data__path=data, run__max_epochs=2, run__folder=tmp_path / "alone", **NO_DROPOUT)
    assert [row["num_samples"] for row in bench.rows()] == [2, 2]
    assert bench.losses() == pytest.approx(bench.losses(tmp_path / "alone"), rel=1e-12)


def test_an_update_without_a_target_is_logged_and_not_stepped(bench: Bench, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import torch\n"
        "def load():\n"
        "    ids = torch.tensor([3, 4, 5])\n"
        "    return [{'input_ids': ids, 'labels': ids}, {'input_ids': ids, 'labels': torch.full((3,), -100)}]\n"
    )
    values = {"data__function": f"{own}:load", "update__global_batch_size": 1, "run__max_epochs": 2}
    said = bench.train(**values, **NO_DROPOUT)
    assert said.count("nothing to learn in its samples: not stepped") == 2
    mute = [row for row in bench.rows() if row["num_target_tokens"] == 0]
    assert [(row["loss"], row["grad_norm"]) for row in mute] == [(None, None)] * 2
    learned = [row["lr"] for row in bench.rows() if row["num_target_tokens"]]
    assert learned == pytest.approx([0.01 / 3, 0.02 / 3])  # the schedule counts updates that were stepped


def test_a_number_of_updates_that_the_data_do_not_have_is_said(bench: Bench) -> None:
    said = bench.train(run__max_steps=9)
    assert "the data ran out after 1 epoch" in said
    assert "run.max_steps = 9 is not reached: raise run.max_epochs, which is 1\n" in said
    resumed = bench.train(run__max_steps=9, run__resume=True)
    assert "finished at update 6: raise run.max_epochs, which is 1, to train on\n" in resumed
    assert "finished at update 6: raise run.max_steps, which is 2, to" in bench.train(
        run__max_steps=2, run__resume=True
    )
    assert "is not reached" not in bench.train(run__folder=bench.path / "two", run__max_steps=2)


RECIPES = Path(__file__).parents[2] / "recipes"
MAX_BYTES, NUM_SAMPLES, NUM_HELD_OUT = 450, 213, 4  # 209 to train on: 29 updates of 7, and one of 6
FLOAT64 = {"eval__num_samples": NUM_HELD_OUT, "model__config__n_embd": 16, "model__config__n_head": 1}
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
    data["update__tail"] = "step"
    found = {cell: losses(bench, "gpt2-float64", *cell, **data, **FLOAT64) for cell in CELLS}
    reference = found[1, None]
    assert len(reference) == 30 + 3  # updates, and evaluations at 0, 15 and 30
    assert reference[-1] < reference[0] - 1
    for cell, same in found.items():
        assert same == pytest.approx(reference, rel=1e-10), cell

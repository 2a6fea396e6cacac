"""A run to its end: what it writes, what it says, what becomes of the last samples."""

import json
import math
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
    "memory_gib",
    "time",
    "seconds",
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
    for text in ("plan  6 updates of 8 samples", "real tokens", "padding", "sync last", "a held-out prompt"):
        assert text in said


def test_questions_and_answers_are_learned_by_naming_their_fields(bench: Bench, tmp_path: Path) -> None:
    """Functions of the standard library: what an epoch learns is every byte of every answer, and its end."""
    pairs = [pair for pair in islice(stdlib_functions(stdlib_root()), 400) if len(pair.prompt + pair.response) < 700]
    data = tmp_path / "questions.jsonl"
    rows = [{"question": pair.prompt, "answer": pair.response} for pair in pairs[:60]]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"data__path": data, "data__prompt_field": "question", "data__response_field": "answer"}
    sizes = {"model__config__n_positions": 1024, "update__max_microbatch_tokens": 2048, "eval__num_samples": 0}
    losses: list[list[float]] = []
    for ranks in (1, 2, 3):
        bench.train(ranks=ranks, run__folder=tmp_path / f"{ranks}", **values, **sizes, **NO_DROPOUT)
        updates = bench.rows(tmp_path / f"{ranks}")
        assert sum(row["num_target_tokens"] for row in updates) == sum(len(row["answer"].encode()) + 1 for row in rows)
        losses.append([row["loss"] for row in updates])
    assert losses[0][-1] < losses[0][0] - 0.5
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    assert losses[2] == pytest.approx(losses[0], rel=1e-10)


def test_the_plan_is_said_before_the_first_update(bench: Bench) -> None:
    said = bench.train(run__max_steps=1, ranks=2)
    assert said.index("plan  wrapper ddp: ") < said.index("gradient accumulation steps (derived): ")
    assert said.index("gradient accumulation steps (derived): ") < said.index("update    1  loss ")
    assert "real tokens/s" in said
    assert "data ranks" not in said


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


def test_ranks_without_a_sample_are_spoken_of(bench: Bench) -> None:
    said = bench.train(run__max_steps=1, ranks=3, update__global_batch_size=2)
    assert "plan  an update of 2 samples has none for some of the 3 data ranks, which only wait" in said


def test_only_the_main_rank_speaks(bench: Bench) -> None:
    main, other = bench.finish(ranks=2, run__max_steps=2)
    assert main.out.count("update    2  loss ") == 1
    assert (other.status, other.out, other.err) == (0, "", "")


def test_tail_step_steps_the_short_update_and_says_so(bench: Bench) -> None:
    said = bench.train()
    assert "the epoch's data ran out: its last update was stepped exactly: 5 of 8 samples" in said
    assert bench.rows()[-2]["num_samples"] == 5


def test_tail_drop_drops_the_samples_and_says_so(bench: Bench) -> None:
    said = bench.train(update__tail="drop")
    assert "the data ran out: dropped 5 samples of each epoch, too few for an update of 8" in said
    assert [row["num_samples"] for row in bench.rows() if "loss" in row] == [8] * 5


def test_tail_carry_fills_updates_over_epochs(bench: Bench) -> None:
    said = bench.train(update__tail="carry", run__max_epochs=2)
    assert "the data ran out: 2 samples were left, too few for an update of 8" in said
    assert [row["num_samples"] for row in bench.rows() if "loss" in row] == [8] * 11


def test_the_logged_loss_is_the_loss_of_the_update_before_it_was_stepped(bench: Bench, tmp_path: Path) -> None:
    """With every sample in the one update, held out or not is all that differs: the untrained model's loss, ln 384."""
    bench.train(run__max_steps=1, update__global_batch_size=45, **NO_DROPOUT)
    (update,) = [row for row in bench.rows() if "loss" in row]
    assert update["loss"] == pytest.approx(math.log(384), abs=0.1)
    assert update["num_samples"] == 45
    bench.train(run__max_steps=1, run__folder=tmp_path / "b", update__global_batch_size=45, ranks=3, **NO_DROPOUT)
    (split,) = [row for row in bench.rows(tmp_path / "b") if "loss" in row]
    assert split["loss"] == pytest.approx(update["loss"], rel=1e-12)
    for key in ("num_tokens", "num_target_tokens", "num_samples", "lr"):
        assert split[key] == update[key]


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


def test_the_held_out_loss_is_the_same_where_a_rank_has_less_to_evaluate(bench: Bench, tmp_path: Path) -> None:
    """Five samples on three ranks, one by one: the last rank runs a dummy microbatch, which is not counted."""
    values = {"update__micro_batch_size": 1, "run__max_steps": 2, **NO_DROPOUT}
    bench.train(run__folder=tmp_path / "alone", **values)
    bench.train(ranks=3, parallel__wrapper="fsdp2", **values)
    alone, split = ([row for row in bench.rows(folder) if "eval_loss" in row] for folder in (tmp_path / "alone", None))
    assert [row["eval_loss"] for row in split] == pytest.approx([row["eval_loss"] for row in alone], rel=1e-12)
    assert [row["num_target_tokens"] for row in split] == [row["num_target_tokens"] for row in alone]


def test_a_number_of_updates_that_the_data_do_not_have_is_said(bench: Bench) -> None:
    said = bench.train(run__max_steps=9)
    assert "the data ran out after 1 epoch" in said
    assert "run.max_steps = 9 is not reached: raise run.max_epochs, which is 1\n" in said
    assert "is not reached" not in bench.train(run__folder=bench.path / "two", run__max_steps=2)


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

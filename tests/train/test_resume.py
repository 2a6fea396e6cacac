"""A run that stops, or is killed, and goes on: the same file of metrics as if it had never stopped."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.conftest import Bench, states_of, timeless, write_pairs
from tests.train.test_checkpoint import reseal

pytestmark = pytest.mark.slow

Refuse = Callable[..., str]
KINDS: dict[str, dict[str, Any]] = {
    "map-style": {},
    "stream": {"data__streaming": True, "data__shuffle_window": 20, "data__num_workers": 1, "optim__decay_steps": 40},
    "packed": {"data__pack_tokens": 200, "update__global_batch_size": 3},
    "mixture": {"data__mixture__long__weight": 1, "data__mixture__short__weight": 3, "data__num_workers": 2},
}


def mixture_of(bench: Bench) -> dict[str, Any]:
    """Two files of other lengths in place of the recipe's one."""
    files = {name: bench.path / f"{name}.jsonl" for name in ("long", "short")}
    for length, path in zip((40, 3), files.values(), strict=True):
        write_pairs(path, [(f"{length} and {k}: ", "ab" * (k % 5 + length)) for k in range(30)])
    return {f"data__mixture__{name}__path": path for name, path in files.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_fourteen_updates_at_once_are_eight_and_six(bench: Bench, tmp_path: Path, kind: str) -> None:
    values = {
        "run__max_epochs": 30,
        "eval__every": 7,
        **KINDS[kind],
        **(mixture_of(bench) if kind == "mixture" else {}),
    }
    whole = tmp_path / "whole"
    bench.train(run__folder=whole, **{**values, "run__max_steps": 14})
    bench.train(**{**values, "run__max_steps": 8})
    bench.train(**{**values, "run__max_steps": 14}, run__resume=True)
    assert timeless(bench.rows()) == timeless(bench.rows(whole))
    assert len(bench.losses()) == 14
    one, other = (
        states_of(folder / "checkpoints" / "step-14", tmp_path / f"{number}.pt")
        for number, folder in enumerate((whole, bench.folder))
    )
    assert one.keys() == other.keys()
    assert len(one) > 50
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_stream_whose_last_evaluation_is_the_best_keeps_its_last_checkpoint(bench: Bench) -> None:
    """The update before the end was saved in its turn, and nobody knew that it is the last."""
    bench.train(**KINDS["stream"], run__save_every=3, eval__every=4, eval__patience=9, optim__lr=0.01)
    losses = {row["step"]: row["eval_loss"] for row in bench.rows() if "eval_loss" in row}
    assert min(losses, key=losses.__getitem__) == max(losses) == 6
    assert (bench.folder / "checkpoints" / "best").read_text() == "step-6"


def test_a_run_at_its_end_has_nothing_left_to_do(bench: Bench) -> None:
    bench.train(run__max_steps=2)
    files = ["metrics.jsonl", "plan.txt", "report.html"]
    before = [(bench.folder / name).read_bytes() for name in files]
    bench.train(run__max_steps=2, run__resume=True)
    assert [(bench.folder / name).read_bytes() for name in files] == before


def test_a_checkpoint_of_another_model_is_refused(bench: Bench, refuse: Refuse) -> None:
    bench.train(run__max_steps=2)
    checkpoint = bench.folder / "checkpoints" / "step-2"
    for ranks in (1, 2):
        assert refuse(run__resume=True, model__config__n_embd=32, ranks=ranks) == (
            f"{checkpoint} is of another model: model.config.n_embd is 16 there and 32 here; "
            "resume with the recipe it was made with, or start in a new run.folder"
        )
    meta = json.loads((checkpoint / "meta.json").read_text())
    meta["parameters"]["transformer.wte.weight"] = ["float64", 400, 16]
    (checkpoint / "meta.json").write_text(json.dumps(meta))
    reseal(checkpoint)
    assert refuse(run__resume=True).startswith(
        f"{checkpoint} is of another model: the parameter transformer.wte.weight is ['float64', 400, 16] there and "
    )


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_new_run_begins_with_the_weights_of_another(bench: Bench, refuse: Refuse, ranks: int) -> None:
    bench.train(run__max_steps=2, optim__ema_decay=0.5)
    second, values = bench.path / "second", {"parallel__wrapper": "fsdp2"} if ranks > 1 else {}
    start = {"run__init_from": bench.folder, "run__folder": second}
    assert f"{start['run__init_from']}, and its model is another: transformer.wte.weight is [384, 16] there and " in (
        refuse(**start, model__config__n_embd=32)
    )
    said = bench.train(ranks=ranks, run__max_steps=1, **start, **values)
    assert f"begins with the average of the weights of {bench.folder}/checkpoints/step-2" in said
    before, after = (
        [row["eval_loss"] for row in bench.rows(folder) if "eval_loss" in row] for folder in (None, second)
    )
    assert after[0] == pytest.approx(before[-1], rel=1e-12)
    assert bench.rows(second)[1]["step"] == 1
    assert "begins with" not in bench.train(ranks=ranks, run__max_steps=2, run__resume=True, **start, **values)


def test_more_epochs_ask_for_the_course_of_the_learning_rate(bench: Bench, refuse: Refuse) -> None:
    bench.train(run__max_epochs=1)
    line = refuse(run__max_epochs=2, run__resume=True)
    assert "; the learning rate follows run.max_epochs: add --optim.decay_steps=6 to keep its course, or begin " in line
    assert f" with these weights: --run.init_from={bench.folder} --run.folder=NEW" in line
    bench.train(run__max_epochs=2, run__resume=True, optim__decay_steps=6)
    assert bench.rows()[-1]["step"] == 12


def test_a_checkpoint_has_what_was_learned_and_the_recipe_it_was_made_with(bench: Bench) -> None:
    bench.train(run__max_steps=3)
    checkpoint = bench.folder / "checkpoints" / "step-3"
    meta = json.loads((checkpoint / "meta.json").read_text())
    assert meta["recipe"] == (bench.folder / "config.toml").read_text()
    assert meta["versions"].keys() == {"torch", "transformers", "megabatch"}
    assert meta["learned"] is None
    (checkpoint / "meta.json").write_text(json.dumps(meta | {"learned": [1, 1]}))
    reseal(checkpoint)
    bench.train(run__max_steps=5, run__resume=True)
    assert [row["num_microbatches"] == 8 for row in bench.rows() if "loss" in row] == [False] * 3 + [True] * 2

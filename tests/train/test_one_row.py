"""Runs whose samples lie in one row: those of padded samples, with no padding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch.train.model.build import build
from megabatch.train.model.build_accumulator import build_accumulator
from megabatch.train.plan.search import SIMULATION
from megabatch.train.plan.simulation import text_sample
from tests.train.conftest import NO_DROPOUT, Bench
from tests.train.contexts import ALONE, SILENT
from tests.train.model_recipes import recipe
from tests.train.test_plan import planned
from tests.train.test_plan import recipe as recipe_of_a_plan

__all__ = ["recipe_of_a_plan"]

SLOW = "plan  update.one_row takes longer than padding does, unless model.attention is "
BLOOM = """[model.config]
model_type = "bloom"
vocab_size = 384
hidden_size = 16
n_layer = 1
n_head = 2

"""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "wrapper"), [(1, None), (2, "ddp"), (2, "fsdp2")])
def test_losses_are_those_of_padded_samples(bench: Bench, ranks: int, wrapper: str | None) -> None:
    folders = [bench.path / name for name in ("padded", "row")]
    for folder in folders:
        one_row = folder.name == "row"
        keys = {"parallel__wrapper": wrapper, "update__one_row": one_row, "run__folder": folder}
        said = bench.train(ranks=ranks, **keys, **NO_DROPOUT)
        assert said.count(SLOW) == one_row
    padded, in_rows = (bench.losses(folder) for folder in folders)
    assert in_rows == pytest.approx(padded, rel=1e-10)
    assert {row["padding"] for row in bench.rows(folders[1]) if "padding" in row} == {0.0}
    assert max(row["padding"] for row in bench.rows(folders[0]) if "padding" in row) > 0.01


@pytest.mark.slow
def test_a_measured_bound_is_that_of_rows(bench: Bench) -> None:
    keys = {"update__max_microbatch_tokens": "auto", "update__memory": "2GiB", "run__save_every": 1, **NO_DROPOUT}
    bench.train(update__one_row=True, run__max_steps=2, **keys)
    said = bench.train(update__one_row=False, run__max_steps=4, run__resume=True, **keys)
    assert "the bound is chosen anew: update.one_row was True and is False" in said


def test_a_model_is_tried_as_it_computes() -> None:
    """Some attention runs in bfloat16 alone, as autocast gives it."""
    config = recipe(model={"compute_dtype": "bfloat16", "dtype": "float32"}, update={"one_row": True})
    parallel_model, seen = build(config, ALONE, SILENT, None, None), list[Any]()
    parallel_model.base.register_forward_hook(lambda module, inputs, output: seen.append(output.logits.dtype))
    build_accumulator(parallel_model.model, config, None)
    assert set(seen) == {torch.bfloat16}


def test_a_plan_has_them_in_one_row(recipe_of_a_plan: Path) -> None:
    sample = text_sample(5, "", recipe(update={"one_row": True}))
    assert {name: tuple(value.shape) for name, value in sample.microbatch(3).items()} == {
        "input_ids": (1, 15), "position_ids": (1, 15), "shift_labels": (1, 15),
    }  # fmt: skip
    padded, in_rows = (planned(recipe_of_a_plan, 2, update__one_row=each) for each in (False, True))
    assert {row.choice for row in in_rows} == {row.choice for row in padded}
    assert any(row.by == SIMULATION and row.fits == "yes" for row in in_rows)

"""One run on ever other ranks: the same samples in each update, at the same learning rate, to the same losses."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch.train.runtime.files import read_starts
from tests.train.conftest import NO_DROPOUT, Bench, states_of, timeless

pytestmark = pytest.mark.full
HSDP = {"parallel__wrapper": "fsdp2", "parallel__dp_replicate": 2, "parallel__dp_shard": 2}
LAID: list[tuple[int, dict[str, Any]]] = [
    (4, HSDP),
    (2, {"parallel__wrapper": "ddp"}),
    (3, {"parallel__wrapper": "fsdp2"}),
    (1, {}),
    (4, {"parallel__wrapper": "ddp"}),
    (2, {"parallel__wrapper": "replicate"}),
]
OF_RANKS = ("num_microbatches", "slowest_over_mean")  # of a row: what follows from the number of ranks
SAME_BITS: list[dict[str, Any]] = [
    {"model__dtype": "float32", "update__same_bits": "true", "optim__ema_decay": 0.9},
    {
        "model__dtype": "bfloat16", "update__same_bits": "true", "update__max_microbatch_tokens": "none",
        "update__micro_batch_size": 2, "data__streaming": "true", "optim__decay_steps": 20,
    },
]  # fmt: skip
EXACT = ("step", "lr", "epoch", "num_samples", "num_tokens", "num_target_tokens", "weight")


@pytest.mark.parametrize("tail", ["step", "carry"])
def test_a_run_on_ever_other_ranks_is_the_same_run(bench: Bench, tmp_path: Path, tail: str) -> None:
    values = {"run__max_epochs": 3, "optim__ema_decay": 0.9, "update__tail": tail, **NO_DROPOUT}
    whole = tmp_path / "whole"
    bench.train(run__folder=whole, **values, run__max_steps=16)
    for number, (ranks, laid) in enumerate(LAID):
        steps = 3 * (number + 1) if number + 1 < len(LAID) else 16
        bench.train(ranks=ranks, run__resume=number > 0, run__max_steps=steps, **laid, **values)
    one, other = ([row for row in bench.rows(folder) if "lr" in row] for folder in (whole, bench.folder))
    assert len(one) == 16
    for key in EXACT:
        assert [row.get(key) for row in one] == [row.get(key) for row in other], key
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in other] == pytest.approx([row[key] for row in one], rel=1e-10), key
    held_out = [
        {row["step"]: row["eval_loss"] for row in bench.rows(folder) if "eval_loss" in row and row["step"] % 2 == 0}
        for folder in (whole, bench.folder)
    ]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-10)


@pytest.mark.parametrize("given", SAME_BITS)
def test_a_run_with_same_bits_is_the_same_to_the_bit(bench: Bench, tmp_path: Path, given: dict[str, Any]) -> None:
    values = {"run__max_epochs": 3, "update__max_norm": 0.3, **NO_DROPOUT, **given}
    whole = tmp_path / "whole"
    bench.train(run__folder=whole, **values, run__max_steps=12)
    for number, (ranks, laid) in enumerate(LAID):
        steps = 2 * (number + 1)
        bench.train(ranks=ranks, run__resume=number > 0, run__max_steps=steps, **laid, **values)
    one, other = (
        states_of(folder / "checkpoints" / "step-12", tmp_path / "state.pt") for folder in (whole, bench.folder)
    )
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    mine, theirs = (
        [{key: value for key, value in row.items() if key not in OF_RANKS} for row in timeless(bench.rows(folder))
         if "loss" in row or row["step"] % 2 == 0]
        for folder in (whole, bench.folder)
    )  # fmt: skip
    assert mine == theirs
    assert all(row["grad_norm"] > 0.3 for row in mine if "loss" in row), "a clip does not bite"
    start = read_starts(bench.folder)[-1]
    assert start["threads"] == [1]
    assert {"devices", "cpu_capability", "torch_build"} <= start.keys()

"""What a loss prepares is what it sees: in training in any precision, in an evaluation, and in a verification."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from megabatch import loss, verify
from tests.train.conftest import NO_DROPOUT, Bench
from tests.unit.failures.table import SAMPLES

OWN = """
from megabatch import loss, losses


def with_scale(microbatch):
    return {**microbatch, "scale": 2.0}


@loss(weigh=lambda microbatch: microbatch["scale"] / 2 * losses.count_targets(microbatch), prepare=with_scale)
def prepared(model, microbatch):
    scale = microbatch["scale"]
    total, weight = losses.next_token(model, {key: microbatch[key] for key in ("input_ids", "labels")})
    return scale * total, scale / 2 * weight


@loss(weigh=losses.count_targets)
def plain(model, microbatch):
    total, weight = losses.next_token(model, microbatch)
    return 2.0 * total, weight
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        (1, {}),
        (1, {"model__compute_dtype": "bfloat16", "model__dtype": "float32"}),
        (2, {"parallel__wrapper": "fsdp2"}),
    ],
    ids=["plain", "mixed", "fsdp2"],
)
def test_training_and_evaluation(bench: Bench, tmp_path: Path, ranks: int, values: dict[str, Any]) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    for name in ("prepared", "plain"):
        of_one = {"loss__function": f"{own}:{name}", "run__folder": tmp_path / name, **NO_DROPOUT, **values}
        bench.train(ranks=ranks, run__max_steps=3, **of_one)
    rows, expected = (bench.rows(tmp_path / name) for name in ("prepared", "plain"))
    for key in ("loss", "grad_norm", "eval_loss"):
        assert [row[key] for row in rows if key in row] == [row[key] for row in expected if key in row]
    assert any("eval_loss" in row for row in rows)


def test_a_verification() -> None:
    @loss(weigh=lambda microbatch: len(microbatch["y"]), prepare=lambda microbatch: {"y": microbatch["x"]})
    def prepared(model: nn.Module, microbatch: Any) -> Any:
        return model(microbatch["y"]).square().sum(), len(microbatch["y"])

    width = SAMPLES[0]["x"].shape[-1]
    assert verify(nn.Linear(width, 1).double(), prepared, SAMPLES).ok

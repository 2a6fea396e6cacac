"""A plan of a model that is frozen in part: what is not trained has no gradient, in the closed form and in runs."""

from pathlib import Path
from typing import Any

import pytest

from megabatch.train.plan.estimate import estimate_cost
from megabatch.train.plan.search import CERTAIN, SIMULATION
from tests.train.test_plan import LLAMA, planned, subject

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "llama.toml"
    path.write_text(LLAMA)
    return path


FROZEN: dict[str, tuple[int, dict[str, Any]]] = {
    "adapters": (1, {"model__dtype": "bfloat16"}),
    "adapters ddp": (2, {"parallel__wrapper": "ddp"}),
    "adapters fsdp2": (2, {"parallel__wrapper": "fsdp2", "model__dtype": "bfloat16"}),
    "freeze fsdp2": (2, {"parallel__wrapper": "fsdp2", "model__freeze": "*embed*,*.layers.0.*"}),
}


@pytest.mark.parametrize("name", FROZEN)
def test_what_is_frozen_costs_no_gradient(recipe: Path, name: str) -> None:
    """Neither in a run, which must agree with the closed form, nor in what is sent."""
    world, values = FROZEN[name]
    values = {**values, "model__config__num_hidden_layers": 2, "model__config__hidden_size": 128}
    lora = {"model__lora__r": 4, "model__lora__target_modules": ["q_proj", "v_proj"]} if "adapters" in name else {}
    what, rows = subject(recipe, world, **values, **lora), planned(recipe, world, **values, **lora)
    runs = [row for row in rows if row.by == SIMULATION]
    for row in runs:
        guess = estimate_cost(row.choice, what.sizes, what.sample.length_tokens, what.device)
        assert guess.peak_bytes * CERTAIN <= row.peak_bytes
        assert guess.sent_bytes == pytest.approx(row.sent_bytes, rel=1e-3, abs=8192) or not lora
    if lora:
        sizes = what.sizes
        assert sizes.num_trained == 2 * 2 * 2 * 4 * 128  # layers, modules, A and B of each
        kept = {kind: max(row.at_peak.get(kind, 0) for row in runs) for kind in ("gradients", "optimizer states")}
        assert 0 < kept["gradients"] <= 2 * 4 * sizes.num_trained
        assert 0 < kept["optimizer states"] <= 2 * 4 * sizes.num_trained + 8192  # in blocks of 512
        if name == "adapters ddp":
            assert all(row.sent_bytes == pytest.approx(4 * sizes.num_trained, abs=8192) for row in runs)

"""bfloat16 in both ways, on every wrapper: at most twice as far off as an uncut bfloat16 backward is."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megabatch import GradientAccumulator, loss, losses, verify
from megabatch.core.contract import weigh_of
from megabatch.train.model.build import build, in_precision
from megabatch.train.parallel.wrap import accumulation_of, precision_text
from megabatch.train.runtime.ranks import Ranks
from tests.train.conftest import NO_DROPOUT, Bench
from tests.train.contexts import ALONE, SILENT
from tests.train.model_recipes import recipe
from tests.train.on_ranks import on_ranks
from tests.unit.failures.table import SAMPLES

MIXED = {"compute_dtype": "bfloat16"}
WAYS: dict[str, dict[str, Any]] = {
    "mixed": MIXED,
    "pure": {"dtype": "bfloat16"},
    "wide": {"dtype": "bfloat16"},  # with update.accumulate_dtype
}
LENGTHS = (9, 3, 12, 5, 7, 2, 11, 6)
Gradients = dict[str, Tensor]


def samples() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 385, (length,), generator=draw) for length in LENGTHS]
    return [{"input_ids": each, "labels": each} for each in tokens]


def cut(ranks: Ranks, way: str, wrapper: str | None) -> dict[str, Any]:
    """The gradient of this rank's share, in microbatches of two samples, summed by the accumulator."""
    config = recipe(WAYS[way], wrapper=wrapper, update={"accumulate_dtype": "float32"} if way == "wide" else None)
    parallel_model = build(config, ranks, SILENT, None, None)
    gradient = GradientAccumulator(
        parallel_model.model, micro_batch_size=2, accumulate_dtype=accumulation_of(config.update)
    )
    loss = in_precision(losses.next_token, config.model, parallel_model, ranks.device)
    gradient.forward_backward(samples()[ranks.rank :: ranks.size], loss)
    update = gradient.finalize()
    whole = {
        name: (each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad)
        for name, each in parallel_model.base.named_parameters()
        if each.grad is not None
    }
    return {"loss": float(update.loss), "gradients": whole, "words": parallel_model.words}


def uncut(way: dict[str, Any], *, exact: bool) -> Gradients:
    """Plain torch: one forward and backward of every sample; exact: of the same weights in float32."""
    config = recipe(way)
    model: nn.Module = build(config, ALONE, SILENT, None, None).base
    model = model.float() if exact else model
    rows = nn.utils.rnn.pad_sequence([each["input_ids"] for each in samples()], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([each["labels"] for each in samples()], batch_first=True, padding_value=-100)
    with torch.autocast("cpu", torch.bfloat16, enabled=not exact and "compute_dtype" in way):
        logits = model(input_ids=rows).logits.float()
        F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def error(found: Gradients, exact: Gradients) -> float:
    assert found.keys() == exact.keys()
    one, other = (torch.cat([each[name].double().flatten() for name in exact]) for each in (found, exact))
    return float((one - other).norm() / other.norm())


def cut_in_every_way(ranks: Ranks, wrapper: str | None) -> dict[str, Any]:
    return {way: cut(ranks, way, wrapper) for way in WAYS}


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "wrapper"), [(1, None), (2, "ddp"), (2, "fsdp2")])
def test_a_cut_gradient_is_as_exact_as_an_uncut_one(tmp_path: Path, num_ranks: int, wrapper: str | None) -> None:
    found = [cut_in_every_way(ALONE, None)] if wrapper is None else on_ranks(2, tmp_path, cut_in_every_way, wrapper)
    for way, keys in WAYS.items():
        exact = uncut(keys, exact=True)
        own = error(uncut(keys, exact=False), exact)
        assert 1e-3 < own < 3e-2, way  # bfloat16 is at work, and no more than that
        for each in found:
            assert 1e-3 < error(each[way]["gradients"], exact) < 2 * own, (way, wrapper)
            kept = {"mixed": torch.float32}.get(way, torch.bfloat16)
            assert {gradient.dtype for gradient in each[way]["gradients"].values()} == {kept}
            assert each[way]["loss"] == found[0][way]["loss"]


def test_the_weight_is_still_counted_from_the_data() -> None:
    for keys in (MIXED, {}):
        config = recipe(keys)
        parallel_model = build(config, ALONE, SILENT, None, None)
        loss = in_precision(losses.next_token, config.model, parallel_model, ALONE.device)
        assert weigh_of(loss) is losses.count_targets


def test_autocast_ends_with_the_loss() -> None:
    config = recipe(MIXED)
    parallel_model = build(config, ALONE, SILENT, None, None)
    seen: list[bool] = []

    def look(model: nn.Module, microbatch: Any) -> tuple[Tensor, float]:
        seen.append(torch.is_autocast_enabled("cpu"))
        return torch.zeros(()), 1.0

    in_precision(look, config.model, parallel_model, ALONE.device)(parallel_model.model, {})
    assert [*seen, torch.is_autocast_enabled("cpu")] == [True, False]


def test_a_wider_sum_of_mixed_precision_is_said() -> None:
    line = precision_text(recipe(MIXED).model, "ddp", torch.float64)
    assert line.endswith("computed in bfloat16 (autocast), gradients added in float64")


@pytest.mark.parametrize(
    ("keys", "update", "line"),
    [
        ({}, None, "precision: float32 throughout"),
        (MIXED, None, "precision: parameters and gradients in float32, computed in bfloat16 (autocast)"),
        (WAYS["pure"], None, "precision: bfloat16 throughout"),
        ({**WAYS["pure"], **MIXED}, None, "precision: bfloat16 throughout"),
        (WAYS["wide"], {"accumulate_dtype": "float32"}, "precision: bfloat16 throughout, gradients added in float32"),
    ],
)
def test_the_precision_is_said(keys: dict[str, Any], update: dict[str, Any] | None, line: str) -> None:
    assert line in build(recipe(keys, update=update), ALONE, SILENT, None, None).words


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
        numbers = [row[key] for row in rows if key in row]
        # On two ranks, the one with fewer microbatches does not cut its own smaller for a loss that prepares them.
        assert numbers == pytest.approx([row[key] for row in expected if key in row], rel=1e-12)
    assert any("eval_loss" in row for row in rows)


def test_a_verification() -> None:
    @loss(weigh=lambda microbatch: len(microbatch["y"]), prepare=lambda microbatch: {"y": microbatch["x"]})
    def prepared(model: nn.Module, microbatch: Any) -> Any:
        return model(microbatch["y"]).square().sum(), len(microbatch["y"])

    width = SAMPLES[0]["x"].shape[-1]
    assert verify(nn.Linear(width, 1).double(), prepared, SAMPLES).ok

"""The router loss of a mixture of experts in `megabatch train`: the plain sum over sequences, whatever the cut."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megabatch import MegabatchError, losses
from megabatch.experts import TOKENS
from megabatch.train.config import Config
from megabatch.train.config.recipe import load_config
from megabatch.train.data.load import load_data
from megabatch.train.data.updates import Updates
from megabatch.train.model.architecture import load_tokenizer
from megabatch.train.model.build import build, in_precision
from megabatch.train.model.build_accumulator import build_accumulator
from megabatch.train.model.expert_balance import router_coefficient, router_words, train_with_router
from megabatch.train.plan.search import SIMULATION
from megabatch.train.runtime.ranks import Ranks
from megabatch.verification.float64_copy import Float64WithoutDropout
from tests.train.conftest import Bench
from tests.train.contexts import ALONE, SILENT
from tests.train.model_recipes import FAMILIES, recipe
from tests.train.test_plan import LLAMA, planned, subject

COEFFICIENT = 0.5
TOP_K, EXPERTS = 2, 4
MIXTRAL = {**FAMILIES["mixtral"], "initializer_range": 0.5, "router_aux_loss_coef": COEFFICIENT}
SIZE = 7  # samples of an update
Gradients = dict[str, Tensor]


def lines(folder: Path) -> Path:
    """Texts of 1 to 30 bytes."""
    draw, path = random.Random(0), folder / "texts.jsonl"
    texts = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 30))) for _ in range(40)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def config_of(
    path: Path, rows: int = 1, *, wrapper: str | None = None, model: dict[str, Any] | None = None,
    router_loss: object = COEFFICIENT, **data: Any,
) -> Config:  # fmt: skip
    found = recipe(
        {"config": MIXTRAL, "dtype": "float64", **(model or {})}, wrapper=wrapper,
        data={"path": str(path), "cache": str(path.parent / "cache"), **data},
        update={"global_batch_size": SIZE, "micro_batch_size": rows},
    )  # fmt: skip
    return found.model_copy(update={"loss": found.loss.model_copy(update={"router_loss": router_loss})})


def gradient_of(ranks: Ranks, config: Config) -> tuple[Gradients, dict[str, float], list[Any]]:
    """The gradient of the first update as the trainer makes it, its terms, and this rank's samples."""
    tokenizer = load_tokenizer(config.model)
    updates = Updates(load_data(config, tokenizer, ranks, SILENT), config, ranks)
    with Float64WithoutDropout():  # norms and routers of transformers round to float32, experts have no float64
        parallel_model = build(config, ranks, SILENT, None, tokenizer)
        with_router = train_with_router(losses.next_token, config, parallel_model, updates)
        loss_fn = in_precision(with_router, config.model, parallel_model, ALONE.device)
        gradient = build_accumulator(parallel_model.model, config, None)
        gradient.forward_backward(updates.peek(), loss_fn)
        update = gradient.finalize()
    whole = {
        name: (each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad)
        for name, each in parallel_model.base.named_parameters()
        if each.grad is not None
    }
    terms = {name: float(value) for name, value in update.terms.items()}
    return whole, terms, list(updates.peek())


def router_loss_of(logits: Sequence[Tensor]) -> Tensor:
    """transformers' router loss of one sequence, [T, E] per layer, expert by expert."""
    chosen = torch.cat([each.topk(TOP_K).indices for each in logits])  # [layers * T, k]
    shares = torch.cat([each.softmax(-1) for each in logits]).mean(0)  # [E]
    load = torch.stack([(chosen == expert).sum().double() / len(chosen) for expert in range(EXPERTS)])
    return EXPERTS * (load * shares).sum()


def expected(config: Config, samples: Sequence[Any], coefficient: float) -> tuple[Gradients, dict[str, float]]:
    """Plain torch: each sample alone, nothing padded."""
    alone = config.model_copy(update={"parallel": recipe().parallel})
    count = sum(int((each["labels"][1:] != -100).sum()) for each in samples)
    text, balance = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    with Float64WithoutDropout():
        model: nn.Module = build(alone, ALONE, SILENT, None, None).base
        for each in samples:
            inputs = {key: each[key][None] for key in ("input_ids", "position_ids") if key in each}
            output = model(**inputs, output_router_logits=True)
            text = text + F.cross_entropy(output.logits[0, :-1], each["labels"][1:], reduction="sum") / count
            balance = balance + router_loss_of(output.router_logits) / len(samples)
        (text + coefficient * balance).backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return found, {"next_token": text.item(), "balance": coefficient * balance.item()}


def worst_error(found: Gradients, wanted: Gradients) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


def check(config: Config, coefficient: float, results: Sequence[tuple[Gradients, dict[str, float], list[Any]]]) -> None:
    samples = [sample for _, _, own in results for sample in own]
    assert len(samples) == SIZE
    assert all(TOKENS in sample for sample in samples)
    wanted, terms = expected(config, samples, coefficient)
    for found, told, _ in results:
        assert worst_error(found, wanted) <= 1e-12
        assert told == pytest.approx(terms, rel=1e-12)


@pytest.mark.parametrize("rows", [1, 3, SIZE])
def test_the_gradient_is_plain_torchs_under_every_cut(tmp_path: Path, rows: int) -> None:
    config = config_of(lines(tmp_path), rows)
    check(config, COEFFICIENT, [gradient_of(ALONE, config)])


def test_a_packed_row_is_a_sequence_and_gets_no_mask(tmp_path: Path) -> None:
    """transformers would then no longer keep its documents apart."""
    config = config_of(lines(tmp_path), 3, model={"attention": "eager"}, pack_tokens=48)
    check(config, COEFFICIENT, [gradient_of(ALONE, config)])


def test_it_goes_through_layers_that_are_recomputed(tmp_path: Path) -> None:
    path, float32 = lines(tmp_path), {"dtype": "float32"}
    kept, again = (
        gradient_of(ALONE, config_of(path, 3, model={**float32, "activation_checkpointing": each}))[0]
        for each in (False, True)
    )
    assert worst_error(again, kept) == 0


def test_the_coefficient_counts(tmp_path: Path) -> None:
    path = lines(tmp_path)
    (with_it, _, _), (without, _, _), (off, terms, _) = (
        gradient_of(ALONE, config_of(path, 3, router_loss=each)) for each in (COEFFICIENT, 0.0, "off")
    )
    gate = "model.layers.0.mlp.gate.weight"
    assert float((with_it[gate] - without[gate]).norm() / without[gate].norm()) > 0.01
    assert worst_error(off, without) <= 1e-12
    assert list(terms) == ["loss"]


ASKS = {**MIXTRAL, "output_router_logits": True}


@pytest.mark.parametrize(
    ("model", "asked", "coefficient"),
    [(MIXTRAL, "auto", None), (ASKS, "auto", COEFFICIENT), (ASKS, "off", None), (ASKS, 0.25, 0.25), (MIXTRAL, 2, 2.0)],
)
def test_the_config_asks_for_it_or_the_recipe(
    tmp_path: Path, model: dict[str, Any], asked: object, coefficient: float | None
) -> None:
    config = config_of(tmp_path, model={"config": model, "dtype": "float32"}, router_loss=asked)
    base = build(config, ALONE, SILENT, None, None).base
    assert router_coefficient(config, base, losses.next_token) == coefficient
    (said,) = router_words(config, base, coefficient)
    assert said.startswith("no router loss, although" if coefficient is None else f"router loss: {coefficient:g} ")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no experts": ({"model": {"config": FAMILIES["llama"]}}, "the model has no experts; leave it out"),
    "another loss": ({"loss": {"function": "megabatch.losses:classification"}}, "has the terms that it returns"),
    "one row": ({"update": {"one_row": True}}, "update.one_row is true, with which it is not computed; leave one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_it_is_refused(tmp_path: Path, name: str) -> None:
    keys, said = REFUSED[name]
    config = Config.model_validate(
        {
            "model": {"config": MIXTRAL},
            "run": {"folder": str(tmp_path)},
            **keys,
            "loss": {"router_loss": COEFFICIENT, **keys.get("loss", {})},
            "update": {"global_batch_size": 4, **keys.get("update", {})},
        }
    )
    base = build(config.model_copy(update={"update": recipe().update}), ALONE, SILENT, None, None).base
    loss_fn = losses.classification if "loss" in keys else losses.next_token
    with pytest.raises(MegabatchError, match=r"^loss\.router_loss is 0\.5 and ") as refusal:
        router_coefficient(config, base, loss_fn)
    assert said in str(refusal.value)


def test_the_shipped_recipe_of_mixtral_has_it() -> None:
    config = load_config(Path(__file__).parents[2] / "recipes" / "mixtral-8x7b.toml", [])
    assert config.loss.router_loss == 0.02


@pytest.mark.slow
def test_a_plan_has_it(tmp_path: Path) -> None:
    path = tmp_path / "mixtral.toml"
    text = LLAMA.replace('"llama"', '"mixtral"').replace("[data]", "num_local_experts = 4\n\n[data]")
    path.write_text('[model]\ndtype = "bfloat16"\n' + text)  # fake experts have no other
    with_it = {"loss__router_loss": COEFFICIENT}
    assert subject(path, 2, **with_it).router == COEFFICIENT
    assert subject(path, 2).router is None
    assert any(
        row.by == SIMULATION and row.fits == "yes" for row in planned(path, 2, parallel__wrapper="fsdp2", **with_it)
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_has_the_router_loss_beside_the_next_token(bench: Bench, ranks: int) -> None:
    """Its rows have both terms; its evaluation the cross-entropy alone."""
    keys = {**MIXTRAL, "max_position_embeddings": 256}
    model: dict[str, Any] = {
        "model__dtype": "float32",
        **{f"model__config__{key}": value for key, value in keys.items()},
    }
    text = bench.recipe.read_text()
    bench.recipe.write_text(text[: text.index("[model.config]")] + text[text.index("[data]") :])
    rows: dict[object, list[dict[str, Any]]] = {}
    for asked in ("auto", 0.0, COEFFICIENT):
        folder = bench.path / str(asked)
        said = bench.train(ranks=ranks, run__folder=folder, loss__router_loss=asked, run__max_steps=2, **model)
        assert ("no router loss, although the model has experts; loss.router_loss = 0.5 adds" in said) == (
            asked == "auto"
        )
        rows[asked] = bench.rows(folder)
    first = {asked: next(row for row in found if "loss" in row) for asked, found in rows.items()}
    evaluated = {asked: next(row for row in found if "eval_loss" in row) for asked, found in rows.items()}
    assert first[0.0]["loss"] == pytest.approx(first["auto"]["loss"], rel=1e-6)
    assert first[0.0]["grad_norm"] == pytest.approx(first["auto"]["grad_norm"], rel=1e-6)
    one = first[COEFFICIENT]
    assert one["loss_next_token"] == pytest.approx(first["auto"]["loss"], rel=1e-6)
    assert one["loss"] == pytest.approx(one["loss_next_token"] + one["loss_balance"], rel=1e-9)
    assert one["loss_balance"] >= COEFFICIENT * TOP_K * 0.5
    assert abs(one["grad_norm"] / first[0.0]["grad_norm"] - 1) > 1e-3
    assert evaluated[COEFFICIENT]["eval_loss"] == pytest.approx(evaluated["auto"]["eval_loss"], rel=1e-6)
    assert {"eval_perplexity", "eval_accuracy"} <= evaluated[COEFFICIENT].keys()

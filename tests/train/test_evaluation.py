"""Losses of whole sets: as a plain count over the samples, however they are cut and wherever they run; and no trace."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import losses
from megabatch.core.right_padding import pad_right
from megabatch.train.callbacks.evaluation import (
    MOST_LOGITS,
    Terms,
    build_terms,
    evaluate,
    evaluate_set,
    most_tokens,
    next_token_terms,
    row_of,
    split_set,
)
from megabatch.train.config import EvalConfig, UpdateConfig
from megabatch.train.runtime.plugins import Event
from tests.exact.launch import Run, launch, launch_all, values
from tests.train.contexts import ALONE, SILENT
from tests.train.jobs import CPU, CUTS, SETS, Tiny, lay, squares
from tests.unit.failures.table import line_of

UPDATE = UpdateConfig(global_batch_size=4, micro_batch_size=3)
NEXT_TOKEN = build_terms(EvalConfig(), losses.next_token)


def plain_count(samples: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Loss, accuracy and the metric of the jobs, a sample and a token at a time, in plain Python and torch."""
    model = Tiny()
    total, num_found, num_targets, num_learned = 0.0, 0, 0, 0
    for sample in samples:
        with torch.no_grad():
            logits = model(sample["input_ids"][None])[0]  # [T, V]
        num_learned += sum(int(label) != -100 for label in sample["labels"])
        for position, label in enumerate(sample["labels"].tolist()[1:]):
            if label != -100:
                scores = logits[position].tolist()
                total += math.log(sum(math.exp(score) for score in scores)) - scores[label]
                num_found += scores[label] == max(scores)
                num_targets += 1
    return {
        "eval_loss": total / num_targets if num_targets else None,
        "eval_perplexity": math.exp(total / num_targets) if num_targets else None,
        "num_target_tokens": num_targets,
        "eval_accuracy": num_found / num_targets if num_targets else None,
        "eval_learned": num_learned / len(samples) if samples else None,
    }


def plain_squares(samples: list[dict[str, Tensor]]) -> dict[str, Any]:
    model = Tiny()
    square, first, largest, num_learned = 0.0, 0.0, 0.0, 0
    for sample in samples:
        with torch.no_grad():
            logits = model(sample["input_ids"][None])[0]  # [T, V]
        first += abs(float(logits[0, 0]))
        for position, label in enumerate(sample["labels"].tolist()):
            if label != -100:
                norm = sum(score**2 for score in logits[position].tolist())
                square, largest, num_learned = square + norm, largest + math.sqrt(norm), num_learned + 1
    return {
        "eval_loss": square / num_learned + first / len(samples),
        "eval_square": square / num_learned,
        "eval_first": first / len(samples),
        "eval_largest": largest / num_learned,
    }


def close(expected: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: pytest.approx(value, abs=1e-12) if isinstance(value, float) else value for key, value in expected.items()
    }


def expected_row(name: str) -> dict[str, Any]:
    """Check the findings of a job, and that it leaves no trace."""
    loss, _, samples, _ = name.split()
    numbers = plain_count(SETS[samples]) if loss == "next_token" else plain_squares(SETS[samples])
    if samples == "empty":
        numbers = {key: numbers[key] for key in ("eval_loss", "eval_perplexity", "num_target_tokens")}
    return close({"set": samples, **numbers, "as before": True})


@pytest.mark.slow
def test_any_cut_on_any_ranks_is_the_plain_count(tmp_path: Path) -> None:
    names = [f"next_token {wrapper} many {cut}" for wrapper in ("plain", "ddp", "fsdp2") for cut in CUTS]
    names += [f"next_token fsdp2 {samples} three" for samples in ("two", "untold", "empty")]
    names += [f"squares {wrapper} {samples} tokens" for wrapper in ("plain", "fsdp2") for samples in ("many", "two")]
    runs = [Run(world, names, tmp_path / str(world)) for world in (1, 2, 3)]
    for world, found in zip((1, 2, 3), launch_all("tests.train.jobs:evaluation_job", runs, tmp_path), strict=True):
        for name, ranks in found.items():
            rows = [rank.get("value", rank) for rank in ranks]
            assert rows == [expected_row(name)] * world, f"{name} on {world}"
            assert all(row == rows[0] for row in rows), "the same bits on every rank"


def test_a_rank_that_has_fewer_samples_counts_no_dummy(tmp_path: Path) -> None:
    """11 samples, one by one, on two ranks."""
    names = ["next_token plain many one", "squares plain many one"]
    for name, ranks in launch(2, "tests.train.jobs:evaluation_job", names, tmp_path).items():
        assert list(values(ranks)) == [expected_row(name)] * 2


def row(terms: Any, samples: str = "many", model: nn.Module | None = None, cut: str = "three") -> dict[str, Any]:
    update = UpdateConfig(global_batch_size=4, **CUTS[cut])
    return evaluate_set(model or Tiny(), terms, SETS[samples], update, ALONE, SILENT, name=samples)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("samples", SETS)
def test_one_process_counts_as_plain_python_does(samples: str, cut: str) -> None:
    expected = close({"set": samples} | plain_count(SETS[samples]))
    del expected["eval_learned"]
    if samples == "empty":
        del expected["eval_accuracy"]
    assert row(NEXT_TOKEN, samples, cut=cut) == expected


@pytest.mark.parametrize("chosen_tokens", [None, 1, 7])
def test_a_sample_longer_than_a_chosen_bound_goes_alone(chosen_tokens: int | None) -> None:
    update = UpdateConfig(global_batch_size=4, max_microbatch_tokens="auto")
    assert max(len(sample["input_ids"]) for sample in SETS["many"]) > 7
    found = evaluate_set(
        Tiny(), NEXT_TOKEN, SETS["many"], update, ALONE, SILENT, name="many", chosen_tokens=chosen_tokens
    )
    expected = close({"set": "many"} | plain_count(SETS["many"]))
    del expected["eval_learned"]
    assert found == expected


def test_loss_and_accuracy_are_of_one_forward_and_the_loss_is_trainings_bit_for_bit() -> None:
    model, microbatch, calls = Tiny(), pad_right(SETS["many"]), []
    model.register_forward_hook(lambda *_: calls.append(1))
    terms = next_token_terms(model, microbatch)
    assert len(calls) == 1
    assert torch.equal(terms["loss"].total, losses.next_token(model, microbatch).total)


def pair(model: nn.Module, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = model(microbatch["input_ids"])
    return logits.abs().sum(), logits.shape[0] * 10


def drawing(model: nn.Module, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = model(microbatch["input_ids"])
    return (logits * torch.rand(logits.shape)).sum(), len(logits)


def two_losses(model: nn.Module, microbatch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    return {"a": pair(model, microbatch), "b": squares(model, microbatch)["first"]}


def test_a_pair_is_the_loss_and_terms_have_their_names() -> None:
    assert set(row(pair)) == {"set", "eval_loss"}
    found = row(two_losses)
    assert found["eval_loss"] == found["eval_a"] + found["eval_b"]
    assert found["eval_a"] == row(pair)["eval_loss"]
    assert row(squares) == close({"set": "many"} | plain_squares(SETS["many"]))


def test_two_evaluations_draw_the_same_and_leave_the_random_numbers_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one = row(drawing)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert row(drawing) == one
    assert row(drawing, samples="two") != one


def test_every_module_is_in_its_own_mode_again_even_after_an_error() -> None:
    def failing(model: nn.Module, _: Any) -> Any:
        modes.append(model.training)
        raise KeyError

    model, modes = Tiny(), []
    model.norm.eval()
    with pytest.raises(KeyError):
        row(failing, model=model)
    assert modes == [False]
    assert [module.training for module in model.modules()] == [True, True, False, True, True]
    assert torch.is_grad_enabled()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("terms", [NEXT_TOKEN, squares])
def test_shards_are_shards_again_and_training_goes_on_with_what_they_hold(terms: Any) -> None:
    model = lay(Tiny(), "fsdp2")
    row(terms, model=model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    tokens = torch.arange(5)[None]
    model(tokens).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert row(terms, model=model)["eval_loss"] == pytest.approx(math.log(11) if terms is NEXT_TOKEN else 0.0)


def test_a_loss_that_is_no_number_is_told_as_it_is() -> None:
    model = Tiny()
    with torch.no_grad():
        model.head.weight.fill_(torch.inf)
    found = row(NEXT_TOKEN, model=model)
    assert math.isnan(found["eval_loss"])
    assert found["eval_perplexity"] is None
    assert found["num_target_tokens"] == plain_count(SETS["many"])["num_target_tokens"]


def test_a_perplexity_too_large_for_a_number_is_none() -> None:
    terms = Terms(losses.next_token, of_tokens=True)
    numbers = {2.0: math.exp(2.0), 709.0: math.exp(709.0), 710.0: None, math.inf: None, math.nan: None}
    for loss, expected in numbers.items():
        assert row_of("a", terms, {"loss": (loss, 1.0)}, set())["eval_perplexity"] == expected
    assert row_of("a", terms, {"loss": (0.0, 0.0)}, set())["eval_perplexity"] is None


def own(event: Event) -> dict[str, Any]:
    assert not event.model.training
    assert not torch.is_grad_enabled()
    torch.rand(3)
    return {"weight": event.model.norm.weight.sum(), "step": event.step, "num_sets": len(event.sets)}


def fails(event: Event) -> dict[str, float]:
    return {"x": [1.0][event.step]}


def event_of(model: nn.Module) -> Event:
    return Event(7, model, CPU, Path("nowhere"), True, {}, {"many": SETS["many"], "two": SETS["two"]}, None)


def rows(own: Any, terms: Any = NEXT_TOKEN) -> list[dict[str, Any]]:
    return evaluate(event_of(Tiny()), terms, own, UPDATE, ALONE, SILENT)


def test_all_sets_have_a_row_and_ones_own_evaluation_too() -> None:
    before = torch.get_rng_state()
    many, two, last = rows(own)
    assert many == {"step": 7, **row(NEXT_TOKEN)}
    assert two == {"step": 7, **row(NEXT_TOKEN, "two")}
    assert last == {"step": 7, "set": "own", "eval_weight": 6.0, "eval_step": 7.0, "eval_num_sets": 2.0}
    assert torch.equal(torch.get_rng_state(), before)
    assert len(rows(None)) == 2


OWN_CASES: list[tuple[Any, str]] = [
    (fails, f"eval.function 'fails' raised IndexError: list index out of range ({__file__}, line "),
    (lambda _: 3.0, "eval.function '<lambda>' returned a float; return a mapping of names to numbers"),
    (lambda _: {"x": "y"}, "eval.function '<lambda>' returned 'x': a str; return a mapping of names to numbers"),
    (lambda _: {"x": torch.ones(2)}, "eval.function '<lambda>' returned 'x': a Tensor; return a mapping of names to"),
    (lambda _: {1: 2.0}, "eval.function '<lambda>' returned 1: a float; return a mapping of names to numbers"),
]


@pytest.mark.parametrize(("function", "line"), OWN_CASES)
def test_a_mistake_in_ones_own_evaluation_is_one_line(function: Any, line: str) -> None:
    assert line_of(rows, function).startswith(line)


def mean(model: nn.Module, microbatch: dict[str, Tensor]) -> dict[str, Any]:
    return {"mean": model(microbatch["input_ids"]).mean()}


def collides(model: nn.Module, microbatch: dict[str, Tensor]) -> dict[str, Any]:
    return {"accuracy": (torch.ones(()), 1)}


def raises(model: nn.Module, microbatch: dict[str, Tensor]) -> dict[str, Any]:
    return {"x": (microbatch["scores"].sum(), 1)}


METRIC_CASES = [
    ("mean", f"eval.metrics '{__name__}:mean': term 'mean' of what it returns is a tensor of shape ()"),
    ("collides", f"eval.metrics '{__name__}:collides' returns 'accuracy', which is there already; give it another"),
    ("raises", f"eval.metrics '{__name__}:raises' raised KeyError: 'scores' ({__file__}, line "),
]


@pytest.mark.parametrize(("name", "line"), METRIC_CASES)
def test_a_mistake_in_ones_own_metrics_is_one_line(name: str, line: str) -> None:
    assert line_of(lambda: row(build_terms(EvalConfig(metrics=f"{__name__}:{name}"), losses.next_token))).startswith(
        line
    )


@pytest.mark.parametrize(
    ("update", "chosen", "most", "expected"),
    [
        ({"micro_batch_size": 3}, None, None, [3, 3]),
        ({"micro_batch_size": 3}, None, 20, [2, 2, 2]),
        ({"micro_batch_size": 3}, None, 5, [1] * 6),  # a sample that is longer goes alone
        ({"max_microbatch_tokens": 40}, None, None, [4, 2]),
        ({"max_microbatch_tokens": 40}, None, 20, [2, 2, 2]),
        ({"max_microbatch_tokens": 40}, None, 100, [4, 2]),
        ({"max_microbatch_tokens": "auto"}, 40, 20, [2, 2, 2]),
        ({"max_microbatch_tokens": "auto"}, 40, 5, [1] * 6),
    ],
)
def test_where_all_logits_are_made_fewer_tokens_are_taken_at_once(
    update: dict[str, Any], chosen: int | None, most: int | None, expected: list[int]
) -> None:
    samples = [{"input_ids": torch.arange(10)}] * 6
    found = split_set(samples, UpdateConfig(global_batch_size=4, **update), ALONE, chosen, most)
    assert sorted(map(len, found.microbatches), reverse=True) == expected


def test_the_most_tokens_are_those_of_so_many_logits() -> None:
    config = LlamaConfig(
        vocab_size=2**16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with torch.device("meta"):
        assert most_tokens(nn.Sequential(LlamaForCausalLM(config))) == MOST_LOGITS // 2**16 == 4096
    assert most_tokens(Tiny()) is None

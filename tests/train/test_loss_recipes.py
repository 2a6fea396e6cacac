"""Recipes of losses other than a language model's: each trains, is exact under every cut, and is plain torch's."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megabatch import GradientAccumulator, losses
from megabatch.train.runtime.plugins import load_file
from tests.train.processes import Run, overrides

ROOT = Path(__file__).parents[2]
BERT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES: dict[str, dict[str, Any]] = {
    "classification": {**BERT, "initializer_range": 0.1, "max_position_embeddings": 512},
    "masked": {**BERT, "max_position_embeddings": 512},
    "seq2seq": {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2},
    "dpo": BERT,
}
MAKERS = {"dpo": "Pairs"}
DATA: dict[str, dict[str, Any]] = {
    "classification": {"max_tokens": 96, "per_package": 12},
    "masked": {"max_tokens": 96, "num_draws": 1},
    "seq2seq": {"max_tokens": 96, "files": "[a-c]*.py"},
    "dpo": {"max_tokens": 96, "files": "[a-c]*.py"},
}
QUICK = {
    "update.global_batch_size": 16,
    "update.max_microbatch_tokens": 1024,
    "run.max_steps": 40,
    "eval.num_samples": 8,
}
FALLS_BY = {"classification": 0.1, "masked": 0.5, "seq2seq": 0.5, "dpo": 0.02}
LR = {"classification": 0.01, "masked": 0.01, "seq2seq": 0.01, "dpo": 0.002}
CHOICES = {"classification": 8, "masked": 259, "seq2seq": 259, "dpo": 2}


def part(name: str, of: str) -> Any:
    return getattr(load_file(ROOT / "examples" / f"{name}.py"), of)


def loss_of(name: str) -> Callable[..., Any]:
    return part(name, "loss") if name == "dpo" else losses.classification


def small(name: str) -> dict[str, Any]:
    model = {f"model.options.{key}": value for key, value in SIZES[name].items()}
    return model | {f"data.options.{key}": value for key, value in DATA[name].items()}


@pytest.fixture(scope="module")
def batches() -> dict[str, list[dict[str, Tensor]]]:
    """Samples of unequal length, of each recipe's own data."""
    return {name: some(part(name, "data")(**DATA[name])) for name in SIZES}


def some(samples: Any) -> list[dict[str, Tensor]]:
    return [samples[index * (len(samples) // 7)] for index in range(7)]


def model_of(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = part(name, MAKERS.get(name, "model"))(**SIZES[name]).double().train()
    if name == "dpo":  # its reference is another model by now
        with torch.no_grad():
            for parameter in model.policy.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def own_loss(model: Any, sample: dict[str, Tensor]) -> Tensor:
    """The mean that transformers computes for a sample alone, times what it is a mean over."""
    inputs = {name: value[None] for name, value in sample.items() if name != "decoder_input_ids"}
    return model(**inputs).loss * (sample["labels"] != -100).sum()


def dpo_loss(model: Any, sample: dict[str, Tensor]) -> Tensor:
    """-log sigmoid of beta times the difference of log ratios, a token after the other."""
    ratios = []
    for tokens in (sample["chosen"], sample["rejected"]):
        both = [each(tokens[None]).logits[0].log_softmax(-1) for each in (model.policy, model.reference)]
        places = range(int(sample["prompt_tokens"]), len(tokens))
        ratios.append(sum(both[0][t - 1, tokens[t]] - both[1][t - 1, tokens[t]].detach() for t in places))
    return -logsigmoid(0.1 * (ratios[0] - ratios[1]))


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", SIZES)
def test_the_gradient_is_that_of_plain_torch(name: str, rows: int, batches: dict[str, list[dict[str, Tensor]]]) -> None:
    model, batch = model_of(name), batches[name]
    each = dpo_loss if name == "dpo" else own_loss
    weight = len(batch) if name == "dpo" else sum(int((sample["labels"] != -100).sum()) for sample in batch)
    (sum(each(model, sample) for sample in batch) / weight).backward()
    expected = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    model.zero_grad(set_to_none=True)
    gradient = GradientAccumulator(model, micro_batch_size=rows)
    gradient.forward_backward(batch, loss_of(name))
    gradient.finalize()
    size = torch.stack([value.norm() for value in expected.values()]).norm()
    for key, value in expected.items():
        found = dict(model.named_parameters())[key].grad
        assert float((found - value).norm()) <= 1e-12 * float(max(value.norm(), 1e-3 * size)), key


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "constant"])
def test_a_policy_is_exact_with_each_aggregation(aggregation: str) -> None:
    """In two calls of two terms, under a cut: as plain torch has it, an answer after the other."""
    grpo = load_file(ROOT / "examples" / "grpo.py")
    torch.manual_seed(0)
    model = grpo.new_model().double()
    samples, terms = [], {"policy": [], "kl": []}
    for row in range(8):
        ids, num_answered = torch.randint(1, 127, (4 + row,)), 1 + row % 4
        is_answer = torch.arange(len(ids)) >= len(ids) - num_answered
        log_p = model(ids[None]).logits[0].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        old, reference = (log_p.detach() + 0.3 * torch.randn_like(log_p) for _ in range(2))
        advantage = torch.randn(())
        samples.append(
            {"input_ids": ids, "is_answer": is_answer, "advantage": advantage, "old": old, "reference": reference}
        )
        ratio, back = (log_p - old).exp()[-num_answered:], (reference - log_p)[-num_answered:]
        gains = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        terms["policy"].append(-gains.mean() if aggregation == "sequence-mean" else -gains.sum())
        terms["kl"].append(grpo.KL * (back.exp() - back - 1).sum())
    num_tokens = sum(int(each["is_answer"].sum()) for each in samples)
    weight = {"token-mean": num_tokens, "sequence-mean": 8, "constant": 8 * grpo.LONGEST}[aggregation]
    plain = torch.stack(terms["policy"]).sum() / weight + torch.stack(terms["kl"]).sum() / num_tokens
    expected = torch.autograd.grad(plain, list(model.parameters()))
    gradient = GradientAccumulator(model, micro_batch_size=3)
    told = grpo.weights_of(aggregation, samples)
    assert told == {"policy": weight, "kl": num_tokens}
    gradient.open(weights=told)
    for rows in (slice(0, 3), slice(3, 8)):  # as rollouts come
        gradient.forward_backward(samples[rows], partial(grpo.grpo_loss, aggregation))
    gradient.finalize()
    size = torch.stack([value.norm() for value in expected]).norm()
    for parameter, value in zip(model.parameters(), expected, strict=True):
        assert float((parameter.grad - value).norm()) <= 1e-12 * float(max(value.norm(), 1e-3 * size))


def test_masks_belong_to_samples() -> None:
    masked = part("masked", "data")(max_tokens=96, num_draws=2)
    half = len(masked) // 2
    assert all(torch.equal(masked[5][name], masked[5][name]) for name in masked[5])
    assert not torch.equal(masked[5]["labels"], masked[5 + half]["labels"])
    share = sum(float((masked[index]["labels"] != -100).float().mean()) for index in range(200)) / 200
    assert share == pytest.approx(0.15, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_recipe_learns_and_is_verified(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe, values = str(ROOT / "recipes" / f"{name}.toml"), QUICK | small(name)
    if name == "dpo":
        del values["update.max_microbatch_tokens"]
    values |= {"optim.lr": LR[name], "optim.warmup_steps": 0, "run.max_epochs": 100}
    runs = [
        Run(["train", recipe, *overrides(values | {"run.folder": tmp_path / "run"})], tmp_path / "train", ranks=1),
        Run(["verify", recipe, *overrides(values)], tmp_path / "verify", ranks=1),
    ]
    trained, verified = (run.wait()[0] for run in runs)
    assert trained.status == 0, trained.err
    assert verified.status == 0, verified.err
    assert "exact: worst relative error of a gradient" in verified.out
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [row["loss"] for row in rows if "loss" in row]
    assert found[0] == pytest.approx(math.log(CHOICES[name]), rel=0.2)  # a guess among so many
    assert sum(found[-5:]) / 5 < found[0] - FALLS_BY[name]

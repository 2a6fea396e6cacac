"""A model whose matrices are cut over ranks has the plain model's gradient, weights, losses and checkpoints."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from megabatch import MegabatchError
from megabatch.train.model.tensor_parallel import check_divisible, plan_of, style_of
from tests.exact.launch import launch
from tests.train.conftest import NO_DROPOUT, Bench
from tests.train.tensor_jobs import GPT2, MODELS, SIZES, VOCABULARY, samples

GRADIENTS = {  # ranks → "family wrapper stream logits dtype sync"
    2: [
        "llama plain whole whole float64 auto",
        "llama plain sequence cut float64 auto",
        "llama plain sequence cut float32 auto",
        "tied plain sequence whole float64 auto",
        "qwen2 plain sequence cut float64 auto",
        "qwen3 plain whole whole float64 auto",
        "qwen3 plain sequence cut float64 auto",
        "gpt2 plain whole whole float64 auto",
        "gpt2 plain sequence cut float64 auto",
        "dropout plain whole whole float64 auto",
    ],
    4: [
        "llama fsdp2 sequence cut float64 auto",
        "llama plain sequence whole float64 auto",
        "tied replicate sequence whole float64 auto",
        "qwen3 fsdp2 sequence cut float64 last",
        "gpt2 fsdp2 whole whole float64 last",
        "gpt2 fsdp2 sequence cut float32 auto",
    ],
}
SLOPES = {2: ["dropout", "gpt2"]}
WEIGHTS = {  # ranks → "family wrapper dp_replicate dp_shard tp"
    2: [f"{family} plain 1 1 2" for family in ("llama", "gpt2", "qwen2")],
    4: [
        *(f"{family} fsdp2 1 2 2" for family in ("tied llama", "gpt2")),
        "gpt2 replicate 2 1 2",
        "gpt2 fsdp2 2 2 1",
    ],
}
CELLS = {"gradient": GRADIENTS, "slope": SLOPES, "weights": WEIGHTS}
JOBS = [f"{kind} {name}" for kind, cells in CELLS.items() for names in cells.values() for name in names]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks in (2, 4):
        jobs = [f"{kind} {name}" for kind, cells in CELLS.items() for name in cells.get(ranks, [])]
        found |= launch(ranks, "tests.train.tensor_jobs:run_job", jobs, tmp_path_factory.mktemp(f"tensor{ranks}"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_the_cut_model_is_the_plain_one(results: dict[str, list[dict[str, Any]]], job: str) -> None:
    kind, _, name = job.partition(" ")
    for result in results[job]:
        assert "error" not in result, result["error"]
        value = result["value"]
        if kind == "slope":
            assert value < 1e-6  # of differences
        elif kind == "weights":
            assert value == []
        else:
            bound = 1e-12 if "float64" in name else 1e-6
            assert value["error"] < bound, value["parameter"]
            assert value["norm"] < bound
            assert value["placed"]


def test_the_samples_have_what_could_go_wrong() -> None:
    """The padding token among the inputs, a vocabulary and lengths that two ranks do not divide."""
    tokens = {int(token) for call in (0, 1) for sample in samples(call) for token in sample["input_ids"]}
    assert MODELS["tied"][1]["pad_token_id"] in tokens
    assert VOCABULARY % 2 == 1
    assert max(len(sample["input_ids"]) for sample in samples(0)) % 2 == 1


def model_of(kind: str, **keys: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **keys))


@pytest.mark.parametrize(
    ("kind", "keys", "line"),
    [
        ("llama", {**SIZES, "num_attention_heads": 6, "hidden_size": 24}, "num_attention_heads = 6"),
        ("llama", SIZES, "num_key_value_heads = 2"),
        ("qwen3", {**SIZES, "num_key_value_heads": 4, "intermediate_size": 26}, "intermediate_size = 26"),
        ("gpt2", {**GPT2, "n_head": 2}, "n_head = 2"),
        ("gpt2", {**GPT2, "n_inner": 30}, "n_inner = 30"),
    ],
)
def test_what_the_ranks_do_not_divide_is_named(kind: str, keys: dict[str, Any], line: str) -> None:
    with pytest.raises(MegabatchError, match=f"^parallel.tp is 4, which does not divide model.config.{line}; set"):
        check_divisible(model_of(kind, **keys), 4)


def test_a_model_without_a_plan_is_refused() -> None:
    for model, kind in (
        (nn.Linear(2, 2), "Linear"),
        (model_of("mixtral", **SIZES), "model of type mixtral"),
    ):
        with pytest.raises(MegabatchError, match=f"^parallel.tp is above 1 and no plan for a {kind} is known"):
            plan_of(model)


def test_an_unknown_entry_of_a_plan_is_refused() -> None:
    with pytest.raises(MegabatchError, match=r"^the tensor-parallel plan .* has the entry 'packed_colwise', which"):
        style_of("packed_colwise", nn.Linear(2, 2), torch.distributed.tensor.Replicate(), False)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks and keys
    "tp": (2, {"parallel__tp": 2}),
    "fsdp2 x tp": (
        4,
        {
            "parallel__tp": 2,
            "parallel__wrapper": "fsdp2",
            "parallel__sequence_parallel": True,
            "parallel__loss_parallel": True,
        },
    ),
    "hsdp": (4, {"parallel__dp_replicate": 2, "parallel__dp_shard": 2}),
    "cp x tp": (4, {"parallel__cp": 2, "parallel__tp": 2}),
}


@pytest.mark.slow
def test_a_run_prints_the_same_losses_in_every_layout(bench: Bench) -> None:
    reference = losses_of(bench, "plain", 1, {})
    assert len(reference) == 2 * (3 + 3)  # updates, and evaluations at 0, 2 and 3
    assert reference[-2] < reference[0] - 0.5
    for name, (ranks, keys) in LAYOUTS.items():
        assert losses_of(bench, name, ranks, keys) == pytest.approx(reference, rel=1e-10), name


def losses_of(bench: Bench, name: str, ranks: int, keys: dict[str, Any]) -> list[float]:
    folder = bench.path / name
    bench.train(ranks=ranks, run__folder=folder, run__max_steps=3, **NO_DROPOUT, **keys)
    return [row[key] for row in bench.rows(folder) for key in ("loss", "eval_loss", "num_target_tokens") if key in row]


@pytest.mark.slow
def test_a_checkpoint_of_shards_of_cut_matrices_goes_on_on_one_process(bench: Bench) -> None:
    keys = {"optim__decay_steps": 6, "optim__ema_decay": 0.5, **NO_DROPOUT}
    bench.train(run__folder=bench.path / "whole", **keys)
    cut = {"parallel__tp": 2, "parallel__wrapper": "fsdp2", "run__max_steps": 3}
    bench.train(ranks=4, **cut, **keys)
    assert "tensor parallel over 2 ranks" in (bench.folder / "plan.txt").read_text()
    bench.train(run__resume=True, **keys)
    assert bench.losses() == pytest.approx(bench.losses(bench.path / "whole"), rel=1e-10)

"""Adapters: their gradient is plain torch's, their runs go on to the bit, peft reads what is exported."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from megabatch import GradientAccumulator, MegabatchError, losses
from megabatch.errors import install_command
from megabatch.train.checkpoints.export import export
from megabatch.train.model.adapters import stir
from megabatch.train.model.build import build
from tests.train.adapter_jobs import GPT2, LAYOUTS, LORA, OF_GPT2, SAMPLES, SGD_LR, all_layouts, lora_recipe, saved_base
from tests.train.conftest import Bench, timeless
from tests.train.contexts import ALONE, SILENT
from tests.train.model_recipes import FAMILIES, recipe
from tests.train.on_ranks import on_ranks
from tests.train.test_export import train
from tests.unit.failures.table import line_of, names

REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # [model.lora] -> what the error names
    "a key that peft does not have": ({"rank": 4}, "unknown key model.lora.rank; it takes r, lora_alpha"),
    "a misspelt key": ({"target_module": ["q_proj"]}, "model.lora.target_module; the nearest key is target_modules"),
    "a target that is not there": ({"target_modules": ["q_proj", "query"]}, "'query' … embed_tokens, q_proj"),
    "a target that is no layer": ({"target_modules": ["mlp"]}, "peft refuses model.lora (ValueError: Target module"),
    "a pattern that matches nothing": ({"target_modules": "x.*"}, "peft refuses model.lora (NoMatching"),
    "a rank of none": ({"target_modules": ["q_proj"], "rank_pattern": {"k_proj": 2}}, "'k_proj' … those are q_proj"),
    "a whole module that is not there": (
        {"target_modules": ["q_proj"], "modules_to_save": ["score"]}, "modules_to_save has 'score' … embed_tokens",
    ),
    "a whole module with an adapter": (
        {"target_modules": ["q_proj"], "modules_to_save": ["self_attn"]}, "'model.layers.0.self_attn' … leave it out",
    ),
    "no rank": ({"r": 0}, "peft refuses model.lora (ValueError: `r` should be a positive"),
    "a beginning that changes the base": ({"init_lora_weights": "pissa"}, "model.lora.init_lora_weights is 'pissa'"),
}  # fmt: skip


def loss_of(model: Any) -> torch.Tensor:
    """Plain torch, uncut: the mean over every target, each sample alone so that there is no padding."""
    logits = [model(input_ids=ids[None]).logits[0, :-1] for ids in SAMPLES]
    return cross_entropy(torch.cat(logits), torch.cat([ids[1:] for ids in SAMPLES]))


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss_of(model), list(named.values())), strict=True))


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= 1e-12 * float(value.norm()), name


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("family", ["llama", "gpt2", "tied llama"])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_gradient_of_adapters_is_that_of_plain_torch(family: str, rows: int) -> None:
    targets = ["c_attn", "wte"] if family == "gpt2" else LORA["target_modules"]
    lora = {**LORA, "target_modules": targets, "bias": "all"}
    config = lora_recipe(lora=lora, config=GPT2 if family == "gpt2" else FAMILIES[family])
    model = build(config, ALONE, SILENT, None, None).base
    stir(model, seed=1)
    expected = gradients_of(model)
    assert all(value.any() for value in expected.values())
    gradient = GradientAccumulator(model, micro_batch_size=rows)
    gradient.forward_backward([{"input_ids": ids, "labels": ids} for ids in SAMPLES], losses.next_token)
    gradient.finalize()
    assert_close({name: each.grad for name, each in model.named_parameters() if each.grad is not None}, expected)


def test_the_base_is_the_model_without_adapters_and_adapters_begin_with_nothing() -> None:
    for dtype in ("float32", "bfloat16"):
        bare = build(recipe({"dtype": dtype}), ALONE, SILENT, None, None).base
        model = build(lora_recipe(dtype=dtype), ALONE, SILENT, None, None).base
        expected = bare.state_dict()
        found = {name.replace(".base_layer", ""): each for name, each in model.state_dict().items()}
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert torch.equal(model(SAMPLES[1][None]).logits, bare(SAMPLES[1][None]).logits)
        assert {each.dtype for name, each in model.named_parameters() if ".lora_" in name} == {torch.float32}


@pytest.mark.slow
def test_on_two_ranks_it_is_the_same_and_only_adapters_are_sent(tmp_path: Path) -> None:
    model = build(lora_recipe(None, OF_GPT2, config=GPT2), ALONE, SILENT, None, None)
    named = {name: each for name, each in model.base.named_parameters() if each.requires_grad}
    first = {name: each.detach().clone() for name, each in named.items()}
    for _ in range(2):
        for name, value in gradients_of(model.base).items():
            named[name].data -= SGD_LR * value
    gradients, size = gradients_of(model.base), sum(each.nbytes for each in named.values())
    for found in on_ranks(2, tmp_path, all_layouts):
        for layout, rank in found.items():
            assert all(torch.equal(rank["first"][name], value) for name, value in first.items()), layout
            assert rank["identity"] == model.identity, layout
            assert_close(rank["weights"], {name: each.detach() for name, each in named.items()})
            assert_close(rank["gradients"], gradients)
            assert not rank["frozen have a gradient"]
        sent = {layout: found[layout]["collectives"] for layout in LAYOUTS}
        assert sent["ddp"]["all_reduce_bytes"] == size
        assert sent["fsdp2"]["reduce_scatter_bytes"] == 3 * size  # shards take in every microbatch
        assert sent["fsdp2"]["all_gather_bytes"] > 10 * size  # of the base


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_adapted_gets_its_line(name: str) -> None:
    lora, seen = REFUSED[name]
    said = line_of(lambda: build(lora_recipe(lora=lora), ALONE, SILENT, None, None))
    assert names(said, seen), said


def test_what_is_tied_is_not_trained_whole() -> None:
    with pytest.raises(
        MegabatchError, match=r"has 'lm_head', which is tied \(model\.embed_tokens\.weight, lm_head\.weig"
    ):
        build(lora_recipe(lora={**LORA, "modules_to_save": ["lm_head"]}, config=FAMILIES["tied llama"]), ALONE, SILENT,
              None, None)  # fmt: skip


def test_without_peft_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    assert (
        line_of(lambda: build(lora_recipe(), ALONE, SILENT, None, None))
        == f"model.lora is set and peft is not installed; {install_command('peft')}"
    )


RUN = {"model__lora__r": 4, "model__lora__target_modules": ["c_attn", "c_proj"], "model__lora__lora_dropout": 0.1}
BESIDE = {"model__lora__modules_to_save": ["wpe"]}  # trained whole
UNTIL_THREE = {"run__max_steps": 3}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return saved_base({**GPT2, "n_positions": 256}, tmp_path / "base")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_a_run_goes_on_to_the_bit_and_is_exported(
    bench: Bench, refuse: Callable[..., str], base: Path, tmp_path: Path
) -> None:
    values = {
        **RUN,
        **BESIDE,
        "model__name": base,
        "model__tokenizer": "bytes",
        "optim__lr": 0.02,
        "run__max_epochs": 3,
    }
    whole = tmp_path / "whole"
    bench.train(run__folder=whole, **values)
    bench.train(**values, **UNTIL_THREE)
    bench.train(run__resume=True, **values)
    assert timeless(bench.rows()) == timeless(bench.rows(whole))
    rows = [row["eval_loss"] for row in bench.rows() if "eval_loss" in row]
    assert rows[-1] < rows[0] - 0.2
    last = bench.folder / "checkpoints" / "step-18"
    meta = json.loads((last / "meta.json").read_text())
    assert "transformer.wte.weight" in meta["parameters"]
    assert b"transformer.wte.weight" not in (last / ".metadata").read_bytes()
    assert b"transformer.wpe.weight" in (last / ".metadata").read_bytes()
    said = export(bench.folder, tmp_path / "adapters", step=None)
    assert said.endswith(f"`megabatch export {bench.folder} --merged --to FOLDER`")
    export(bench.folder, tmp_path / "merged", step=None, merged=True)
    in_float64 = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    loaded = PeftModel.from_pretrained(in_float64, tmp_path / "adapters")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    one, other = (model.eval()(SAMPLES[1][None]).logits for model in (loaded, merged))
    assert float((one - other).detach().abs().max()) < 1e-12
    assert merged.config.use_cache
    with loaded.disable_adapter():
        assert float((loaded(SAMPLES[1][None]).logits - one).detach().abs().max()) > 1e-3
    another = AutoModelForCausalLM.from_pretrained(base)
    another.transformer.h[0].mlp.c_fc.weight.data[0, 0] += 1
    another.save_pretrained(base)
    line = "the parameter transformer.h.0.mlp.c_fc.weight is ['float64', 16, 64, '"
    assert f"{last} is of another model: {line}" in refuse(run__resume=True, **values)
    with pytest.raises(MegabatchError, match=r"step-18 was trained on another base: the parameter transformer\.h\.0\."):
        export(bench.folder, tmp_path / "none", step=None, merged=True)


@pytest.mark.slow
def test_a_run_on_shards_goes_on_elsewhere(bench: Bench, base: Path, tmp_path: Path) -> None:
    """Each rank reads its shard of the base from its file, where its matrices have other names."""
    values = {**RUN, "model__lora__lora_dropout": 0.0, "model__name": base, "model__tokenizer": "bytes"}
    bench.train(run__folder=tmp_path / "whole", **values)
    bench.train(ranks=2, parallel__wrapper="fsdp2", **values, **UNTIL_THREE)
    bench.train(run__resume=True, **values)
    assert bench.losses() == pytest.approx(bench.losses(tmp_path / "whole"), rel=1e-10)


def test_nothing_to_merge_is_said(tmp_path: Path) -> None:
    train(ALONE, recipe(), tmp_path / "run")
    with pytest.raises(MegabatchError, match=r"^--merged is given and the run has no model\.lora, so nothing to merge"):
        export(tmp_path / "run", tmp_path / "out", step=None, merged=True)

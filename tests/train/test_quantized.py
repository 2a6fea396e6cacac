"""A base in four bits: the gradient of its adapters is plain torch's on the numbers that the bits stand for."""

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from megabatch import GradientAccumulator, MegabatchError, losses, verify
from megabatch.errors import install_command
from megabatch.train.checkpoints.export import export
from megabatch.train.config import Config, ModelConfig
from megabatch.train.config.parallel_layout import layout_of
from megabatch.train.model.adapters import left_out, stir
from megabatch.train.model.architecture import architecture_of
from megabatch.train.model.build import build
from megabatch.train.model.frozen import check_same_bits, dequantize, four_bits, stored
from megabatch.train.runtime.ranks import Ranks
from tests.comm.counting import Collectives
from tests.train.adapter_jobs import GPT2, LORA, OF_GPT2, SAMPLES, lora_recipe, saved_base
from tests.train.conftest import Bench, timeless
from tests.train.contexts import ALONE, SILENT
from tests.train.model_recipes import FAMILIES, LLAMA
from tests.train.on_ranks import on_ranks
from tests.train.test_adapters import gradients_of
from tests.unit.failures.table import line_of

WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 96}  # blocks of numbers end within its rows, and at them


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights of a Llama."""
    return saved_base(WIDE, tmp_path_factory.mktemp("base"))


def four_bit_recipe(base: Path, layout: str | None = None, **model: Any) -> Config:
    keys = {"name": str(base), "tokenizer": "bytes", "quantize": "nf4", "dtype": "float32", **model}
    return lora_recipe(layout, **keys)


def on_ddp(ranks: Ranks, base: Path) -> dict[str, Any]:
    """The gradient of an update, its collectives, and what was said of the model."""
    config = four_bit_recipe(base, "ddp")
    parallel_model = build(config, replace(ranks, layout=layout_of(config.parallel, ranks.size)), SILENT, None, None)
    stir(parallel_model.base, seed=1)
    gradient = GradientAccumulator(parallel_model.model, micro_batch_size=1)
    own = [{"input_ids": ids, "labels": ids} for ids in SAMPLES[ranks.dp_rank :: ranks.size]]
    counted = Collectives()
    with counted:
        gradient.forward_backward(own, losses.next_token)
        gradient.finalize()
    named = dict(parallel_model.base.named_parameters())
    frozen = {name: each.detach() for name, each in named.items() if not each.requires_grad}
    return {
        "of other scales": said_of_other_scales(parallel_model.base, ranks),
        "gradients": {name: each.grad.clone() for name, each in named.items() if each.grad is not None},
        "trained": named.keys() - frozen.keys(),
        "collectives": counted.table(),
        "identity": parallel_model.identity,
        "bits": {name: each.as_subclass(torch.Tensor).clone() for name, each in frozen.items()},
    }


def said_of_other_scales(model: nn.Module, ranks: Ranks) -> str | None:
    """The error of a rank that has another scale."""
    check_same_bits(model, ranks)
    _, layer = next(four_bits(model))
    cast(Any, layer.weight).quant_state.state2.absmax[0] += ranks.rank
    try:
        check_same_bits(model, ranks)
    except MegabatchError as error:
        return str(error)
    return None


KINDS = {
    "nf4": {"quantize": "nf4"},
    "nf4, plain scales": {"quantize": "nf4", "double_quantization": False},
    "fp4": {"quantize": "fp4"},
}
BATCH = [{"input_ids": ids, "labels": ids} for ids in SAMPLES]


def built(base: Path, **model: Any) -> Any:
    """The recipe's model, its adapters stirred."""
    adapted = build(four_bit_recipe(base, **model), ALONE, SILENT, None, None).base
    stir(adapted, seed=1)
    return adapted


def plain(model: nn.Module) -> nn.Module:
    """Return a copy with torch's own linear layers, of the numbers that the bits stand for."""
    twin = copy.deepcopy(model)
    dequantize(twin, next(each.dtype for each in model.parameters() if each.is_floating_point()))
    assert not list(four_bits(twin))
    return twin


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], *, rtol: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= rtol * float(value.norm()), name


@pytest.mark.parametrize(
    ("kind", "family"), [("nf4", "llama"), ("nf4", "odd"), ("nf4, plain scales", "tied llama"), ("fp4", "gpt_neox")]
)
def test_the_gradient_is_the_uncut_one_of_the_same_layers(kind: str, family: str, tmp_path: Path) -> None:
    """It is that of torch's layers of the numbers that the bits stand for; a cut changes the rounding alone."""
    config = {"llama": WIDE, "odd": {**WIDE, "intermediate_size": 95}, **FAMILIES}[family]
    targets = ["query_key_value", "dense"] if family == "gpt_neox" else LORA["target_modules"]
    lora = {**LORA, "target_modules": targets, "bias": "all"}
    model = built(saved_base(config, tmp_path / "base"), **KINDS[kind], lora=lora)
    expected = gradients_of(model)
    assert all(value.any() for value in expected.values())
    assert_near(gradients_of(plain(model)), expected, rtol=1e-6)
    for rows in (1, 4):
        gradient = GradientAccumulator(model, micro_batch_size=rows)
        gradient.forward_backward(BATCH, losses.next_token)
        gradient.finalize()
        assert_near({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, expected)
        model.zero_grad()


def test_verify_proves_it_on_the_numbers_that_the_bits_stand_for(base: Path) -> None:
    found = verify(plain(built(base, dtype="bfloat16")), losses.next_token, BATCH)
    assert found.ok, str(found)
    assert found.worst <= 1e-12
    assert len(found.errors) == 12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_recomputed_it_is_the_same_and_in_autocast_it_is_near(base: Path, dtype: str) -> None:
    model = built(base, dtype=dtype)
    expected = gradients_of(model)
    recomputed = gradients_of(built(base, dtype=dtype, activation_checkpointing=True))
    assert all(torch.equal(recomputed[name], value) for name, value in expected.items())
    if dtype == "float32":
        mixed = built(base, dtype=dtype, compute_dtype="bfloat16")
        with torch.autocast("cpu", torch.bfloat16):
            assert_near(gradients_of(mixed), expected, rtol=0.1)


def test_what_was_evaluated_is_trained_on_as_before(base: Path) -> None:
    """bitsandbytes' own layer packs its weights in eval() on some processors, and then has no backward."""
    for dtype in ("float32", "bfloat16"):
        model = built(base, dtype=dtype)
        before = gradients_of(model)
        with torch.no_grad():
            model.eval()(SAMPLES[1][None])
        after = gradients_of(model.train())
        assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(("kind", "most"), [("nf4", 0.26), ("nf4, plain scales", 0.29), ("fp4", 0.26)])
def test_the_base_is_a_quarter_of_bfloat16(base: Path, kind: str, most: float) -> None:
    model = built(base, dtype="bfloat16", **KINDS[kind])
    layers = [each for _, each in four_bits(model)]
    assert len(layers) == 14  # all but the head
    num_bytes = sum(part.untyped_storage().nbytes() for layer in layers for part in stored(layer.weight))
    assert num_bytes <= most * sum(2 * layer.in_features * layer.out_features for layer in layers)


def test_all_linear_layers_take_adapters_as_unquantized_ones_do(base: Path) -> None:
    lora = {**LORA, "target_modules": "all-linear"}
    adapted = [
        {
            name: (each.shape, each.dtype)
            for name, each in built(base, **model, lora=lora).named_parameters()
            if ".lora_" in name
        }
        for model in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantize": None})
    ]
    assert len(adapted[0]) == 28
    assert adapted[0] == adapted[1]
    assert {dtype for _, dtype in adapted[0].values()} == {torch.float32}


def test_the_base_is_told_apart_by_every_bit_of_it(base: Path) -> None:
    seen: list[Any] = []
    for model in (*KINDS.values(), {"quantize": None}):
        parallel_model = build(four_bit_recipe(base, **model), ALONE, SILENT, None, None)
        seen.append(parallel_model.identity["parameters"]["model.layers.0.self_attn.k_proj.weight"])
        assert "model.layers.0.self_attn.k_proj.weight" in left_out(
            parallel_model.base, four_bit_recipe(base, **model).model
        )
    assert [each[0] for each in seen] == ["nf4, scales in 8 bits", "nf4", "fp4, scales in 8 bits", "float32"]
    assert len({each[-1] for each in seen}) == len(seen)
    assert all(each[1:3] == [64, 64] for each in seen)


@pytest.mark.slow
def test_on_two_ranks_it_is_the_same_and_only_adapters_are_sent(base: Path, tmp_path: Path) -> None:
    parallel_model = build(four_bit_recipe(base), ALONE, SILENT, None, None)
    stir(parallel_model.base, seed=1)
    expected = gradients_of(parallel_model.base)
    for found in on_ranks(2, tmp_path, on_ddp, base):
        assert found["identity"] == parallel_model.identity
        assert_near(found["gradients"], expected)
        assert found["of other scales"].startswith(
            "model.quantize is set and model.layers.0.self_attn.q_proj.base_layer.w"
        )
        assert found["trained"] == expected.keys()
        assert found["collectives"]["all_reduce_bytes"] == sum(each.nbytes for each in expected.values())
        bits = {name: each for name, each in parallel_model.base.named_parameters() if not each.requires_grad}
        assert all(torch.equal(each, bits[name]) for name, each in found["bits"].items())


def test_other_layers_are_refused(tmp_path: Path) -> None:
    config = four_bit_recipe(saved_base(GPT2, tmp_path / "base"), lora=OF_GPT2)
    assert line_of(build, config, ALONE, SILENT, None, None) == (
        "model.quantize is 'nf4' and the layers of a GPT2LMHeadModel are not torch's linear ones; leave quantize out"
    )


def test_a_module_in_four_bits_is_not_trained_whole(base: Path) -> None:
    config = four_bit_recipe(base, lora={**LORA, "modules_to_save": ["up_proj"]})
    assert line_of(build, config, ALONE, SILENT, None, None) == (
        "model.lora.modules_to_save has 'model.layers.0.mlp.up_proj', which is in four bits; leave it out there"
    )


def test_a_layer_whose_weights_were_not_saved_is_refused(tmp_path: Path) -> None:
    base = saved_base(WIDE, tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    del weights["model.layers.0.mlp.down_proj.weight"]
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    assert line_of(build, four_bit_recipe(base), ALONE, SILENT, None, None) == (
        f"model.quantize is 'nf4' and the files of model.name = '{base}' have no model.layers.0.mlp.down_proj.weight "
        "to quantize; leave quantize out, or name another model"
    )


def test_fresh_weights_are_refused() -> None:
    assert line_of(build, lora_recipe(dtype="float32", quantize="nf4"), ALONE, SILENT, None, None) == (
        "model.quantize is 'nf4' and model.config gives fresh weights, which are not quantized; name a model in "
        "model.name, or leave quantize out"
    )


@pytest.mark.parametrize(("layout", "wrapper"), [("fsdp2", "fsdp2"), ("cp", "replicate")])
def test_shards_are_refused(base: Path, layout: str, wrapper: str) -> None:
    config = four_bit_recipe(base, layout)
    assert line_of(
        lambda: build(config, replace(ALONE, size=2, layout=layout_of(config.parallel, 2)), SILENT, None, None)
    ) == (
        f"model.quantize is 'nf4' and the wrapper {wrapper} (asked for), which cannot cut weights of four bits; set "
        'parallel.wrapper to "ddp", or leave quantize out'
    )


def test_without_bitsandbytes_a_line_says_what_to_install(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    line = f"model.quantize is set and bitsandbytes is not installed; {install_command('qlora')}"
    assert line_of(lambda: build(four_bit_recipe(base), ALONE, SILENT, None, None)) == line


def test_a_base_that_is_saved_quantized_is_refused(tmp_path: Path) -> None:
    base = saved_base(WIDE, tmp_path / "base")
    saved = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**saved, "quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(
        MegabatchError, match=r"^model\.name is '.*/base', whose weights are saved quantized; name the m"
    ):
        architecture_of(ModelConfig(name=str(base)))


def logits_of(model: nn.Module) -> Tensor:
    """In train(), since bitsandbytes' own layers compute more coarsely in eval() on some processors."""
    with torch.no_grad():
        return model.train()(SAMPLES[1][None]).logits


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_a_run_goes_on_to_the_bit_and_is_exported(bench: Bench, refuse: Callable[..., str], tmp_path: Path) -> None:
    base = saved_base({**WIDE, "max_position_embeddings": 256}, tmp_path / "base")
    values = {
        "model__name": base, "model__tokenizer": "bytes", "model__dtype": "float32", "model__quantize": "nf4",
        "model__lora__r": 4, "model__lora__target_modules": ["q_proj", "down_proj"], "model__lora__lora_dropout": 0.1,
        "optim__lr": 0.02, "run__max_epochs": 2,
    }  # fmt: skip
    whole = tmp_path / "whole"
    said = bench.train(run__folder=whole, **values)
    assert "; linear layers in nf4, scales in 8 bits" in said
    bench.train(**values, run__max_steps=3)
    bench.train(run__resume=True, **values)
    assert timeless(bench.rows()) == timeless(bench.rows(whole))
    rows = [row["eval_loss"] for row in bench.rows() if "eval_loss" in row]
    assert rows[-1] < rows[0] - 0.2
    last = bench.folder / "checkpoints" / "step-12"
    saved = (last / ".metadata").read_bytes()
    assert b"lora_A" in saved
    assert b"base_layer" not in saved
    assert b"embed_tokens" not in saved
    meta = json.loads((last / "meta.json").read_text())
    assert meta["parameters"]["model.layers.0.mlp.down_proj.base_layer.weight"][:3] == ["nf4, scales in 8 bits", 64, 96]

    said = export(bench.folder, tmp_path / "adapters", step=None)
    assert f"adapters without their base, {base} in nf4, scales in 8 bits; load them with peft's " in said
    export(bench.folder, tmp_path / "merged", step=None, merged=True)
    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    four_bit = AutoModelForCausalLM.from_pretrained(base, quantization_config=asked, dtype=torch.float32)
    bare = logits_of(four_bit)
    loaded = PeftModel.from_pretrained(four_bit, tmp_path / "adapters").requires_grad_(False)
    for each in loaded.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    one, other = logits_of(loaded), logits_of(merged)
    assert float((one - other).abs().max()) < 1e-5
    assert float((one - bare).abs().max()) > 1e-2

    line = refuse(run__resume=True, **values, model__double_quantization=False)
    assert line.startswith(f"{last} is of another model: model.config")
    assert "bnb_4bit_use_double_quant is True there and False here" in line

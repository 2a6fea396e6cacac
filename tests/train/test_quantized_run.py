"""A run on a base in four bits: trained, resumed, and exported for peft and for transformers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from megabatch.train.checkpoints.export import export
from tests.train.adapter_jobs import SAMPLES, saved_base
from tests.train.conftest import Bench
from tests.train.quantized_jobs import WIDE
from tests.train.test_quantized import with_bitsandbytes
from tests.train.test_resume import timeless


def logits_of(model: nn.Module) -> Tensor:
    """In train(), since bitsandbytes' own layers compute more coarsely in eval() on some processors."""
    with torch.no_grad():
        return model.train()(SAMPLES[1][None]).logits


@with_bitsandbytes
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
    assert "14 linear layers in nf4, scales in 8 bits: " in said
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
    assert line.startswith(f"{last} is of another model: the parameter model.layers.0.")
    assert " and ['nf4', 64, 64, '" in line

"""Weights of a folder or of the hub: read as transformers reads them, or refused in one line."""

from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from transformers import AutoModelForCausalLM

from megabatch import MegabatchError
from megabatch.train.model.architecture import architecture_of
from megabatch.train.model.weights import saved_weights
from tests.train.model_recipes import recipe
from tests.train.test_model import TOKENS, laid, refused


def test_a_folder_is_loaded_as_transformers_does(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(architecture_of(recipe(family="qwen2").model)).save_pretrained(tmp_path)
    made = laid({"name": str(tmp_path)})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(made.base(input_ids=TOKENS).logits, reference(input_ids=TOKENS).logits)
    assert made.words[0] == f"Qwen2ForCausalLM, weights of {tmp_path}"
    assert made.base.config.use_cache is False


def test_weights_that_a_folder_lacks_are_named(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(architecture_of(recipe().model))
    model.model.save_pretrained(tmp_path)
    one, same = (laid({"name": str(tmp_path)}) for _ in range(2))
    assert "1 of its tensors is not there and fresh: lm_head.weight" in one.words[0]
    assert torch.equal(one.base(input_ids=TOKENS).logits, same.base(input_ids=TOKENS).logits)


def test_a_folder_that_is_no_model_gets_its_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen = f"model.name is {str(tmp_path)!r}, a folder without "
    assert refused({"name": str(tmp_path)}).startswith(f"{seen}config.json (it is empty); name a folder that")
    (tmp_path / "notes.txt").write_text("")
    assert refused({"name": str(tmp_path)}).startswith(f"{seen}config.json (it has notes.txt); name a folder that")
    architecture_of(recipe().model).save_pretrained(tmp_path)
    expected = f"{seen}weights, model.safetensors say (it has config.json, notes.txt); name one that has them"
    assert refused({"name": str(tmp_path)}).startswith(expected)
    (tmp_path / "model.safetensors").write_text("nonsense")
    expected = f"cannot read the weights of model.name = {str(tmp_path)!r} (SafetensorError: "
    assert refused({"name": str(tmp_path)}).startswith(expected)
    (tmp_path / "config.json").write_text("{")
    assert refused({"name": str(tmp_path)}).startswith(f"cannot read the config of model.name = {str(tmp_path)!r} (")
    (tmp_path / "checkpoints").mkdir()
    assert "a run of megabatch's; write its model into a folder with `megabatch export" in refused(
        {"name": str(tmp_path)}
    )
    assert refused({"name": "./nowhere"}).startswith("model.name is './nowhere' and there is no such folder;")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors", "a shard"])
def test_weights_that_are_read_by_the_shard_get_their_line(tmp_path: Path, name: str) -> None:
    model = AutoModelForCausalLM.from_config(architecture_of(recipe().model))
    model.save_pretrained(tmp_path, max_shard_size="20KB" if name != "model.safetensors" else "1GB")
    saved = saved_weights(str(tmp_path))
    assert saved is not None
    assert saved.fits(model)
    if name == "a shard":
        path = sorted(tmp_path.glob("model-*.safetensors"))[1]
        path.unlink()
        line = f"model.name is '{tmp_path}', whose model.safetensors.index.json lists {path.name}, which is not there;"
    else:
        path = tmp_path / name
        path.write_text("{}")
        line = f"cannot read {'' if name.endswith('json') else 'the weights in '}{path} ("
    with pytest.raises(MegabatchError) as caught:
        saved_weights(str(tmp_path))
    assert str(caught.value).startswith(line)
    assert str(caught.value).endswith("; copy or download it again")


def test_weights_that_are_not_finite_get_their_line(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(architecture_of(recipe().model))
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    model.save_pretrained(tmp_path)
    line = (
        f"the model of model.name = {str(tmp_path)!r} gives logits that are not finite; choose weights that are whole"
    )
    assert refused({"name": str(tmp_path)}) == line


def test_weights_of_another_size_get_their_line(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(architecture_of(recipe().model)).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"vocab_size": 385', '"vocab_size": 400'))
    assert refused({"name": str(tmp_path)}).startswith(f"cannot read the weights of model.name = {str(tmp_path)!r} (")


def test_the_hub_out_of_reach_gets_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert refused({"name": "nobody/nothing"}).startswith(
        "cannot read the config of model.name = 'nobody/nothing' (OSE"
    )

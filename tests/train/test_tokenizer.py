"""Which tokenizer a recipe gets, and the line it gets where there is none."""

from pathlib import Path

import huggingface_hub.constants
import pytest
from transformers import ByT5Tokenizer

from megabatch import MegabatchError
from megabatch.train.config import ModelConfig
from megabatch.train.model.architecture import load_tokenizer
from tests.train.tokenizers_for_tests import chat_tokenizer

CONFIG: dict[str, object] = {"model_type": "llama"}


def test_bytes_are_what_a_fresh_model_reads() -> None:
    for config in (ModelConfig(config=CONFIG), ModelConfig(name="unread", tokenizer="bytes")):
        tokenizer = load_tokenizer(config)
        assert isinstance(tokenizer, ByT5Tokenizer)
        assert tokenizer("ab")["input_ids"] == [100, 101, 1]


def test_a_function_has_no_tokenizer_but_the_one_it_names() -> None:
    assert load_tokenizer(ModelConfig(function="a:b")) is None
    assert isinstance(load_tokenizer(ModelConfig(function="a:b", tokenizer="bytes")), ByT5Tokenizer)


def test_a_folder_has_its_own(tmp_path: Path) -> None:
    folder = str(chat_tokenizer(tmp_path / "chat", generation_markers=False))
    for config in (ModelConfig(name=folder), ModelConfig(config=CONFIG, tokenizer=folder)):
        tokenizer = load_tokenizer(config)
        assert len(tokenizer) == 512
        assert tokenizer.decode(tokenizer("def f(x): return x")["input_ids"]) == "def f(x): return x"


def refused(config: ModelConfig, capfd: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(MegabatchError) as caught:
        load_tokenizer(config)
    assert capfd.readouterr() == ("", "")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_without_one_gets_its_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    line = (
        f"model.name is {str(tmp_path)!r}, a folder without tokenizer files (tokenizer.json, say); set model.tokenizer"
    )
    assert refused(ModelConfig(name=str(tmp_path)), capfd).startswith(line)
    line = f"model.tokenizer is {str(tmp_path)!r}, a folder without"
    assert refused(ModelConfig(config=CONFIG, tokenizer=str(tmp_path)), capfd).startswith(line)


def test_a_damaged_one_gets_its_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    assert refused(ModelConfig(name=str(tmp_path)), capfd).startswith(
        f"no tokenizer for model.name = {str(tmp_path)!r} ("
    )


def test_the_hub_out_of_reach_gets_its_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    line = refused(ModelConfig(config=CONFIG, tokenizer="nobody/nothing"), capfd)
    assert line.startswith("no tokenizer for model.tokenizer = 'nobody/nothing' (OSError: ")
    assert line.endswith('or to "bytes"')

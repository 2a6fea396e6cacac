"""`megabatch show` prints what training sees, and `megabatch chat` what the trained model writes."""

import io
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megabatch.train.checkpoints.export import export
from megabatch.train.cli import commands
from megabatch.train.config import ModelConfig
from megabatch.train.config.keys import known_keys
from megabatch.train.model.architecture import load_tokenizer
from megabatch.train.preview.show import COLORS, show_own_sample
from megabatch.train.runtime.console import printable
from tests.train.test_mistakes import RECIPE

CHAT = [{"role": "user", "content": "häh"}, {"role": "assistant", "content": "so"}]
GREEDY = ("--temperature", "0", "--tokens", "12")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [{"messages": [*CHAT, {"role": "user", "content": str(number)}, CHAT[1]]} for number in range(40)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "pairs.jsonl").write_text(
        '{"prompt": "1 + 1", "response": "= 2"}\nno\n' + json.dumps({"prompt": "a", "response": "b" * 300}) + "\n"
    )
    (tmp_path / "words.csv").write_text("text\n" + "wordy\n" * 9 + "x" * 50)
    (tmp_path / "recipe.toml").write_text(RECIPE.replace('path = "chats.csv"', 'path = "chats.jsonl"'))
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def samples():\n"
        "    ids = torch.tensor([100, 101])\n"
        "    return [{'input_ids': ids, 'labels': torch.tensor([-100, 101]), 'image': torch.zeros(2, 3)}] * 20\n"
        "def classes():\n"
        "    return [{'input_ids': torch.tensor([100, 101]), 'labels': torch.tensor(1)}] * 20\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the output of a command that ends well."""
    status = commands.run([*arguments])
    out, err = capsys.readouterr()
    assert status == 0, err
    return out


def test_show_marks_what_is_learned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "show", "recipe.toml")
    assert (
        "chats.jsonl:1: 49 tokens, 6 of them learned\nuser: häh\nassistant: «so</s>»\nuser: 0\nassistant: «so</s>»\n"
        in out
    )
    assert "chats.jsonl:4" not in out
    assert not (folder / "cache").exists(), "nothing is cached"
    broken = ["--data.path=pairs.jsonl", "--data.max_sample_tokens=99", "--data.broken_rows=skip"]
    out = printed(capsys, "show", "recipe.toml", *broken)
    assert "pairs.jsonl:1: 9 tokens, 4 of them learned\n1 + 1«= 2</s>»\n" in out
    assert "data: left out 1 broken rows, first pairs.jsonl:2 is not JSON" in out
    assert "data: left out 1 samples longer than data.max_sample_tokens" in out
    out = printed(capsys, "show", "recipe.toml", "--data.path=words.csv", "--data.pack_tokens=16")
    assert "words.csv:2: 6 tokens, 5 of them learned\nw«ordy</s>»\n" in out, "nothing predicts the first token"
    assert "data: 1 sample longer than data.pack_tokens = 16, which are cut into rows" in out


def test_the_help_of_train_begins_with_ten_keys(capsys: pytest.CaptureFixture[str]) -> None:
    first = printed(capsys, "train", "--help").partition("All options and keys:")[0]
    keys = [line.split("=")[0].strip(" -") for line in first.splitlines() if line.startswith("  --")]
    assert len(keys) == 10
    assert {*keys} <= {*known_keys()}


def test_show_colors_on_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    out = printed(capsys, "show", "recipe.toml")
    assert f"assistant: {COLORS[0]}so</s>{COLORS[1]}\nuser: 0" in out


def test_show_names_the_class_of_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    sample = {"input_ids": torch.tensor([101, 102]), "labels": torch.tensor(1)}
    show_own_sample("one", sample, None, ("", ""), ["billing", "login"])
    assert "  labels: 1 (login)\n" in capsys.readouterr().out
    for label in (-100, -1, 2):
        show_own_sample("one", {"labels": torch.tensor(label)}, None, ("", ""), ["billing", "login"])
        assert f"  labels: {label}\n" in capsys.readouterr().out


def test_show_explains_no_marks_where_a_text_has_one_label(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "own.toml").write_text(RECIPE.replace('path = "chats.csv"', ""))
    own = ["--data.function=own.py:classes", "--model.tokenizer=bytes", "--trust"]
    assert "learned tokens" not in printed(capsys, "show", "own.toml", *own)


def test_show_prints_own_samples_and_stops_where_training_does(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "own.toml").write_text(RECIPE.replace('path = "chats.csv"', ""))
    own = ["--data.function=own.py:samples", "--model.tokenizer=bytes", "--trust"]
    out = printed(capsys, "show", "own.toml", *own)
    assert "own.py:samples: 20 samples\n\nsample 0: 2 tokens, 1 of them learned\na«b»\n  image: [2, 3] float32\n" in out
    assert out.startswith("learned tokens are between « and »\n")
    assert commands.run(["show", "recipe.toml", "--data.path=pairs.jsonl"]) == 2
    assert "pairs.jsonl:2 is not JSON" in capsys.readouterr().err


@pytest.fixture
def trained(folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    keys = ("--run.max_steps=2", "--eval.num_samples=0", "--run.folder=run", "--data.messages_field=messages")
    printed(capsys, "train", "recipe.toml", *keys)
    return Path("run")


def greedy(folder: Path, text: str) -> str:
    """The likeliest tokens one by one, by plain forwards of the export, without a cache of keys and values."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = load_tokenizer(ModelConfig(config={"model_type": "llama"}))
    tokens = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    start = tokens.shape[1]
    for _ in range(12):
        scores = model(tokens).logits[0, -1, : len(tokenizer)]
        tokens = torch.cat([tokens, scores.argmax()[None, None]], dim=1)
        if tokens[0, -1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(tokens[0, start:], skip_special_tokens=True)


def test_chat_writes_what_the_model_does(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    export(trained, Path("model"), step=None)
    expected = greedy(Path("model"), "user: ho\nassistant: ")
    for folder in ("run", "model"):
        assert printed(capsys, "chat", folder, "--prompt", "ho", *GREEDY) == printable(f"{expected}\n"), folder
    as_text = greedy(Path("model"), "ho")
    assert printed(capsys, "chat", "run", "--prompt", "ho", "--mode", "text", *GREEDY) == printable(f"{as_text}\n")
    assert as_text != expected
    monkeypatch.setattr("sys.stdin", io.StringIO("ho\n\nhi\n/new\nho\n"))
    second = greedy(Path("model"), f"user: ho\nassistant: {expected}</s>\nuser: hi\nassistant: ")
    assert printed(capsys, "chat", "model", *GREEDY) == printable(f"{expected}\n{second}\n{expected}\n")


def test_chat_refuses_what_it_cannot_answer(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    Path("broken").mkdir()
    Path("broken/config.json").write_text("{}")
    refused = {
        "empty": "has no config.toml, so it is no run of megabatch's; give the folder of a run",
        "broken": "is 'broken', a folder without tokenizer files",
    }
    for folder, said in refused.items():
        assert commands.run(["chat", folder, "--prompt", "a"]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1, err
    assert commands.run(["chat", "run", "--prompt", "a", "--tokens", "0"]) == 2
    assert "--tokens is 0 and --temperature 0.8; give at least 1 token" in capsys.readouterr().err
    assert commands.run(["chat", "run", "--prompt", "a" * 300]) == 2
    assert "the prompt has 318 tokens and the model 256 positions; shorten it" in capsys.readouterr().err

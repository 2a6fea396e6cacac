"""`megabatch init`: the recipe it writes runs as it stands, nothing is overwritten, and a bad answer is one line."""

import gzip
import json
import os
import tomllib
from pathlib import Path

import pytest
from transformers import AutoConfig

from megabatch.errors import MegabatchError
from megabatch.simulate.devices import device_named
from megabatch.train.cli.arguments import Init, read_arguments
from megabatch.train.cli.init import DEVICES, Hardware, look, read_hardware, seen_hardware, write_recipe
from megabatch.train.config.recipe import load_config
from tests.train.processes import Run
from tests.unit.failures.table import names

ROOT = Path(__file__).parents[2]
PAIR, CHAT = {"question": "1 + 1?", "answer": "2"}, {"role": "user", "content": "hello"}
ROWS = {
    "prompt.jsonl": {"prompt": "a", "response": "b"},
    "questions.jsonl.gz": PAIR | {"id": 3},
    "list.json": PAIR,
    "chat.jsonl": {"messages": [CHAT, CHAT | {"role": "assistant"}]},
    "text.jsonl": {"content": "a b c", "url": "x"},
    "lines.txt": "a line\n",
    "page.md": "# A page\n",
    "table.csv": "instruction,output\nsay,said\n",
}
SEEN = {
    "prompt.jsonl": ({"prompt_field": "prompt", "response_field": "response"}, []),
    "questions.jsonl.gz": ({"prompt_field": "question", "response_field": "answer"}, ["id"]),
    "list.json": ({"prompt_field": "question", "response_field": "answer"}, []),
    "chat.jsonl": ({"messages_field": "messages"}, []),
    "text.jsonl": ({"text_field": "content"}, ["url"]),
    "lines.txt": ({"text_field": "text"}, []),
    "page.md": ({"text_field": "text"}, []),
    "table.csv": ({"prompt_field": "instruction", "response_field": "output"}, []),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a person stands, with data of each kind and a model's folder."""
    for name, row in ROWS.items():
        text = row if isinstance(row, str) else json.dumps([row] if name.endswith(".json") else row)
        (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    AutoConfig.for_model("gpt2", n_positions=256).save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments: str) -> dict[str, object]:
    """The tables of the recipe that is written, which loads."""
    write_recipe(read_arguments(Init, arguments))
    path = Path(arguments[0])
    load_config(path, [])
    return tomllib.loads(path.read_text())


@pytest.mark.parametrize("name", SEEN)
def test_the_first_row_says_what_is_learned(folder: Path, name: str) -> None:
    fields, unread = SEEN[name]
    assert look(name) == ({"path": name} | fields, unread)


def test_a_recipe_has_what_was_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = init("mine.toml", "--model=tiny", "--data", "chat.jsonl", "--hardware", "2 nodes of 8 h100")
    assert tables["model"] == {"name": "tiny", "compute_dtype": "bfloat16", "activation_checkpointing": True}
    assert tables["data"] == {"path": "chat.jsonl", "messages_field": "messages", "max_sample_tokens": 4096}
    assert "max_microbatch_tokens" not in tables["update"]
    out = capsys.readouterr().out
    assert out.startswith("wrote mine.toml; next:\n")
    for line in (
        "torchrun --nproc-per-node 8 -m megabatch doctor ",
        "megabatch plan mine.toml --world 16 --device h100 ",
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id megabatch -m "
        "megabatch train mine.toml",
    ):
        assert line in out


@pytest.mark.parametrize("model", ["small", "tiny", "Qwen/Qwen3-0.6B"])
@pytest.mark.parametrize("data", ["stdlib", "lines.txt", "list.json", "openai/gsm8k", "*.jsonl.gz"])
@pytest.mark.parametrize("hardware", ["cpu", "8 gpus"])
def test_every_recipe_loads(folder: Path, model: str, data: str, hardware: str) -> None:
    tables = init("recipe.toml", "--model", model, "--data", data, "--hardware", hardware)
    assert ("max_microbatch_tokens" in tables["update"]) == (hardware == "cpu")


REFUSED = {  # arguments -> what the error names
    "--model small --data stdlib --hardware abacus": "--hardware is 'abacus'; write … devices are",
    "--model small --data none.jsonl --hardware cpu": "'none.jsonl' … (odd.jsonl comes nearest); set",
    "--model a:b --data stdlib --hardware cpu": "--model is 'a:b'; write small",
    "--model empty --data stdlib --hardware cpu": "'empty' … config.json; name one of save_pretrained",
    "--model small --data chat.jsonl --hardware cpu": "chat.jsonl has chats … name a model",
    "--model small --data odd.jsonl --hardware cpu": "odd.jsonl:1 has the fields 'a', 'b' … rename them",
    "--model small --data broken.jsonl --hardware cpu": "broken.jsonl has no row that can be read; name data",
    "--model ~nobody-here/x --data stdlib --hardware cpu": "--model is '~nobody-here/x' … write the whole path",
    "--model small --data ~x.jsonl --hardware cpu": "data.path is '~x.jsonl' … write the whole path",
    "--modle small": "Unrecognized options: --modle, small; see megabatch init --help",
    "--model small --model": "'--model' … see megabatch init --help",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_bad_argument_is_one_line_and_nothing_is_written(folder: Path, words: str) -> None:
    (folder / "odd.jsonl").write_text('{"a": 1, "b": "x"}\n')
    (folder / "broken.jsonl").write_text("{\n[]\n")
    (folder / "empty").mkdir()
    before = sorted(folder.iterdir())
    with pytest.raises(MegabatchError) as raised:
        write_recipe(read_arguments(Init, ["recipe.toml", *words.split()]))
    assert names(str(raised.value), REFUSED[words]), str(raised.value)
    assert "\n" not in str(raised.value)
    assert sorted(folder.iterdir()) == before


def test_a_folder_of_the_users_is_written_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    tables = init("mine.toml", "--model", "~/tiny", "--data", "stdlib", "--hardware", "cpu")
    assert tables["model"]["name"] == str(folder / "tiny")


def test_nothing_is_overwritten(folder: Path) -> None:
    (folder / "recipe.toml").write_text("mine")
    with pytest.raises(MegabatchError, match=r"^recipe\.toml is there already, and nothing is overwritten; give"):
        write_recipe(Init())
    assert (folder / "recipe.toml").read_text() == "mine"
    with pytest.raises(MegabatchError, match=r"^cannot write none/recipe\.toml \(No such file or directory\)"):
        write_recipe(Init(Path("none/recipe.toml")))


def test_hardware_is_read_as_it_is_said() -> None:
    assert read_hardware("cpu") == Hardware("cpu")
    assert read_hardware("4 CPUs") == Hardware("cpu", 4)
    assert read_hardware("1 gpu") == Hardware("gpu")
    assert read_hardware(" 8 h100s ") == read_hardware("8 H100") == Hardware("h100", 8)
    assert read_hardware("2 x 8 gpus") == read_hardware("2 nodes of 8 gpus") == Hardware("gpu", 8, 2)
    assert {device_named(name).name for name in DEVICES} <= {device_named(name).name for name in ("cpu", *DEVICES)}
    for text in ("", "0 gpus", "8", "eight gpus", "-1 gpu"):
        with pytest.raises(MegabatchError):
            read_hardware(text)


@pytest.mark.parametrize(
    ("said", "status", "seen"),
    [
        ("GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)\n", 0, "2 h100"),
        ("GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1)\n", 0, "1 rtx4090"),
        ("GPU 0: NVIDIA T4 (UUID: GPU-a100b200)\n", 0, "1 gpu"),
        ("GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)\n", 0, "1 a100-40g"),
        ("GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-1)\n", 0, "1 a100"),
        ("GPU 0: NVIDIA GH200 480GB (UUID: GPU-1)\n", 0, "1 gpu"),
        ("No devices were found\n", 6, "cpu"),
    ],
)
def test_this_machine_is_what_nvidia_smi_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, status: int, seen: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '%s' '{said}'\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert seen_hardware() == seen
    read_hardware(seen)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["stdlib", "many.txt", "many.jsonl"])
def test_what_it_has_written_trains(folder: Path, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "many.txt").write_text("".join(f"line {number} of text to learn from\n" * 40 for number in range(100)))
    (folder / "many.jsonl").write_text("".join(json.dumps(PAIR | {"id": number}) + "\n" for number in range(100)))
    init("recipe.toml", "--model", "small", "--data", data, "--hardware", "cpu")
    places = [f"--run.folder={folder / 'run'}", f"--data.cache={folder / 'cache'}", *absolute(folder, data)]
    short = ["--run.max_steps=2", "--data.max_samples=500", "--update.global_batch_size=4"]
    limits = [] if data == "many.jsonl" else short
    monkeypatch.chdir(ROOT)  # where the server of processes is started
    (done,) = Run(["train", str(folder / "recipe.toml"), *places, *limits], folder / "logs", ranks=1).wait()
    assert done.status == 0, done.err
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) == (3 if data == "many.jsonl" else 2)


def absolute(folder: Path, data: str) -> list[str]:
    """Ranks are started elsewhere."""
    return [] if data == "stdlib" else [f"--data.path={folder / data}"]

"""`megabatch init`: the recipe it writes runs as it stands, nothing is overwritten, and a bad answer is one line."""

import gzip
import json
import os
import tomllib
from array import array
from pathlib import Path

import pytest
from transformers import AutoConfig

from megabatch.errors import MegabatchError
from megabatch.simulate.devices import device_named
from megabatch.train.cli.arguments import Init, read_arguments
from megabatch.train.config import DataConfig, ModelConfig, SourceConfig
from megabatch.train.config.recipe import load_config
from megabatch.train.data.encode import Skipped, samples_of
from megabatch.train.data.sources import rows_of
from megabatch.train.init.data_survey import Survey, size_of
from megabatch.train.init.hardware import DEVICES, Hardware, read_hardware, seen_hardware
from megabatch.train.init.recipe_text import look, write_recipe
from megabatch.train.model.architecture import load_tokenizer
from megabatch.train.runtime.plugins import load_function
from tests.train.processes import Run
from tests.unit.failures.table import line_of, names

ROOT = Path(__file__).parents[2]
FIELDS = ("prompt_field", "response_field")
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
    "alpaca.json": {"instruction": "Translate", "input": "Hello", "output": "Bonjour"},
    "dolly.jsonl": {"instruction": "Who?", "context": "A poem.", "response": "A poet"},
    "pretty.jsonl": '[\n  {"prompt": "a",\n "response": "b"}\n]\n',
}
SEEN = {
    "prompt.jsonl": ({"prompt_field": "prompt", "response_field": "response"}, []),
    "questions.jsonl.gz": ({"prompt_field": "question", "response_field": "answer"}, ["id"]),
    "list.json": ({"prompt_field": "question", "response_field": "answer"}, []),
    "chat.jsonl": ({"messages_field": "messages"}, []),
    "text.jsonl": ({"text_field": "content"}, ["url"]),
    "lines.txt": ({"text_field": "text"}, []),
    "page.md": ({"source": "text", "text_field": "text"}, []),
    "table.csv": ({"prompt_field": "instruction", "response_field": "output"}, []),
    "alpaca.json": ({"prompt_field": ["instruction", "input"], "response_field": "output"}, []),
    "dolly.jsonl": ({"prompt_field": ["instruction", "context"], "response_field": "response"}, []),
    "pretty.jsonl": ({"prompt_field": "prompt", "response_field": "response"}, []),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, with data of each kind and a model's folder."""
    for name, row in ROWS.items():
        text = row if isinstance(row, str) else json.dumps([row] if name.endswith(".json") else row)
        (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    AutoConfig.for_model("gpt2", n_positions=256).save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments: str) -> dict[str, object]:
    """The tables of the recipe that is written, which loads."""
    write_recipe(**vars(read_arguments(Init, arguments)))
    path = Path(arguments[0])
    load_config(path, [])
    return tomllib.loads(path.read_text())


@pytest.mark.parametrize("name", SEEN)
def test_the_first_row_says_what_is_learned(folder: Path, name: str) -> None:
    fields, unread = SEEN[name]
    found = look(name, None)
    assert (found.keys, found.unread, len(found.lengths)) == ({"path": name} | fields, unread, 1)


def test_a_folder_of_many_texts_has_a_document_a_file(folder: Path) -> None:
    (folder / "few").mkdir()
    (folder / "many" / "deep").mkdir(parents=True)
    (folder / "few" / "a.txt").write_text("one\ntwo\n")
    for number in range(40):
        (folder / "many" / "deep" / f"{number}.txt").write_text("one\ntwo\n")
    assert look("few", None).keys == {"path": "few", "text_field": "text"}
    assert len(look("few", None).lengths) == 2
    assert look("many", None).keys == {"path": "many", "source": "documents", "text_field": "text"}
    assert list(look("many", None).lengths) == [9] * 40
    for name in ("few", "many"):
        init(f"{name}.toml", "--data", name, "--hardware", "cpu")


def test_labels_make_a_classifier(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"line {number},{'yes' if number % 3 else 'no'}\n" for number in range(50))
    (folder / "labels.csv").write_text(f"text,label\n{rows},no\n")
    tables = init("mine.toml", "--data", "labels.csv", "--hardware", "cpu")
    out = capsys.readouterr().out
    assert "labels: yes (33), no (17)\n" in out
    assert "left out: 1 row, first labels.csv:52 has nothing in one of the fields" in out
    assert tables["model"]["options"]["labels"] == tables["data"]["options"]["labels"] == ["no", "yes"]
    samples = load_function(tables["data"]["function"], "data.function")(**tables["data"]["options"])
    assert [sample["labels"].item() for sample in samples] == [bool(number % 3) for number in range(50)]
    model = load_function(tables["model"]["function"], "model.function")(**tables["model"]["options"])
    assert model(input_ids=samples[0]["input_ids"][None]).logits.shape == (1, 2)
    assert model.config.id2label == {0: "no", 1: "yes"}
    del tables["data"]["options"]["broken_rows"]
    with pytest.raises(MegabatchError, match=r"labels.csv:52: the field 'text' is empty, .* mend it, or leave such"):
        load_function(tables["data"]["function"], "data.function")(**tables["data"]["options"])
    text = init("text.toml", "--data", "labels.csv", "--task", "language", "--hardware", "cpu")
    assert (text["data"]["text_field"], "function" in text["data"]) == ("text", False)


def test_alpaca_learns_the_output_after_instruction_and_input(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("Translate", "Hello", "Bonjour"), ("Say hi", "", "hi")]
    texts = [json.dumps(dict(zip(("instruction", "input", "output"), row, strict=True))) for row in rows]
    (folder / "al.jsonl").write_text("\n".join([*texts, '{"instruction": "Say no", "output": "no"}', ""]))
    tables = init("mine.toml", "--data", "al.jsonl", "--hardware", "cpu")
    assert "read: prompt_field = instruction + input, response_field = output\n" in capsys.readouterr().out
    source = SourceConfig.model_validate({key: tables["data"][key] for key in ("path", *FIELDS)})
    tokenizer = load_tokenizer(ModelConfig(config={"model_type": "llama"}))
    samples = [sample for _, sample in samples_of(source, "data", DataConfig(), tokenizer, Skipped())]
    texts = [tokenizer.decode(sample["input_ids"]) for sample in samples]
    assert texts == ["Translate\nHelloBonjour</s>", "Say hihi</s>", "Say nono</s>"]
    learned = [tokenizer.decode(sample["labels"][sample["labels"] != -100]) for sample in samples]
    assert learned == ["Bonjour</s>", "hi</s>", "no</s>"]
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert [*look("al.jsonl", None).lengths] == [length - has for length, has in zip(lengths, (1, 0, 0), strict=True)]


TICKETS = "id,customer_text,queue\n" + "".join(
    f"{number},the parcel number {number} has not come yet,{'yes' if number % 3 else 'no'}\n" for number in range(60)
)
STATED = {  # options → the keys that the recipe gets
    "--text-field customer_text": {"text_field": "customer_text"},
    "--label-field queue --text-field customer_text": {"text_field": "customer_text", "label_field": "queue"},
    "--prompt-field customer_text --response-field queue": {
        "prompt_field": "customer_text", "response_field": "queue"
    },
    "--prompt-field id,customer_text": {"prompt_field": ["id", "customer_text"], "response_field": "queue"},
}  # fmt: skip


@pytest.mark.parametrize("options", STATED)
def test_stated_fields_are_read(folder: Path, options: str) -> None:
    (folder / "tickets.csv").write_text(TICKETS)
    tables = init("mine.toml", "--data", "tickets.csv", "--hardware", "cpu", *options.split())
    data = tables["data"].get("options", tables["data"])
    assert {key: value for key, value in data.items() if key.endswith("_field")} == STATED[options]
    if "label_field" in STATED[options]:
        assert tables["model"]["options"]["labels"] == ["no", "yes"]


def test_fields_without_a_usual_name_are_guessed_and_the_guess_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "tickets.csv").write_text(TICKETS)
    tables = init("mine.toml", "--data", "tickets.csv", "--task", "classification", "--hardware", "cpu")
    options = tables["data"]["options"]
    assert (options["text_field"], options["label_field"]) == ("customer_text", "queue")
    said = capsys.readouterr().out
    assert "read: text_field = customer_text, label_field = queue\n" in said
    assert "text_field = customer_text is guessed: it has the longest texts; label_field = queue is guessed" in said
    text = init("text.toml", "--data", "tickets.csv", "--hardware", "cpu")
    assert text["data"]["text_field"] == "customer_text"
    assert "--text-field, --label-field, --prompt-field and --response-field name others" in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf16_is_read_by_its_mark(folder: Path, encoding: str) -> None:
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (folder / "wide.csv").write_bytes((mark + "text,label\ncafé,1\n").encode(encoding))
    (folder / "wide.jsonl").write_bytes((mark + '{"text": "café \U0001f600"}\n').encode(encoding))
    assert [row.fields for row in rows_of(SourceConfig(path="wide.csv"), "data")] == [{"text": "café", "label": "1"}]
    assert [row.fields for row in rows_of(SourceConfig(path="wide.jsonl"), "data")] == [{"text": "café \U0001f600"}]
    (folder / "half.csv").write_bytes((mark + "text\nab\n").encode(encoding)[:-1])
    with pytest.raises(MegabatchError, match=r"^cannot read half.csv as csv \('utf-16.*truncated data\); mend it"):
        list(rows_of(SourceConfig(path="half.csv"), "data"))


def test_many_labels_are_no_classes(folder: Path) -> None:
    (folder / "ids.csv").write_text("text,label\n" + "".join(f"a,{number}\n" for number in range(50)))
    found = look("ids.csv", None)
    assert (found.keys, found.unread) == ({"path": "ids.csv", "text_field": "text"}, ["label"])
    (folder / "ids.csv").write_text("text,label\n" + "".join(f"a,{number % 150}\n" for number in range(300)))
    assert len(look("ids.csv", "classification").labels) == 150, "who asks for classes gets all"


@pytest.mark.parametrize("num_rows", [1, 3, 12, 90, 500, 7473, 300_000])
@pytest.mark.parametrize("length", [5, 300, 3000, 20_000])
@pytest.mark.parametrize("field", ["text_field", "response_field"])
def test_a_first_run_makes_a_hundred_updates(num_rows: int, length: int, field: str) -> None:
    size = size_of(Survey({"path": "x", field: "x"}, lengths=array("q", [length] * num_rows)), on_cpu=True)
    assert size.num_updates is not None
    assert 100 <= size.num_updates <= 2000
    num_units = num_rows - min(64, num_rows // 10)
    if size.pack_tokens is not None:
        num_units = max(1, num_units * (length + 1) // size.pack_tokens)
    assert size.num_updates <= num_units * size.max_epochs // size.global_batch_size + 1
    assert size.global_batch_size <= 4 or num_units * 4 >= 100 * size.global_batch_size
    assert size.share(10, 5, 100) * 5 < size.num_updates  # of the warmup
    assert size.num_long == (num_rows if length > 4096 and field != "text_field" else 0)


def test_a_chat_has_a_template_in_bytes(folder: Path) -> None:
    turns = [{"role": "user", "content": "häh"}, {"role": "assistant", "content": "so"}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": [*turns, *turns]}) + "\n")
    tokenizer = load_tokenizer(ModelConfig(config={"model_type": "llama"}))
    source = SourceConfig(path="chats.jsonl", messages_field="messages")
    ((_, sample),) = samples_of(source, "data", DataConfig(), tokenizer, Skipped())
    learned = sample["labels"][sample["labels"] != -100]
    assert tokenizer.decode(sample["input_ids"]) == "user: häh\nassistant: so</s>\n" * 2
    assert tokenizer.decode(learned) == "so</s>so</s>"


def test_a_recipe_has_what_was_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = init("mine.toml", "--model=tiny", "--data", "chat.jsonl", "--hardware", "2 nodes of 8 h100")
    assert tables["model"] == {"name": "tiny", "compute_dtype": "bfloat16", "activation_checkpointing": True}
    assert tables["data"] == {"path": "chat.jsonl", "messages_field": "messages", "max_sample_tokens": 4096}
    assert "max_microbatch_tokens" not in tables["update"]
    out = capsys.readouterr().out
    assert out.startswith("1 samples of ")
    assert "\nwrote mine.toml; next:\n" in out
    for line in (
        "torchrun --nproc-per-node 8 -m megabatch verify mine.toml ",
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
    "--model smal --data stdlib --hardware cpu": "--model is 'smal' … write small",
    "--model empty --data stdlib --hardware cpu": "'empty' … config.json; name one of save_pretrained",
    "--model small --data odd.jsonl --hardware cpu": "odd.jsonl:1 has the fields 'a', 'b', 'c' … name them",
    "--model small --data broken.jsonl --hardware cpu": "broken.jsonl has no row that can be read (first: … name data",
    "--model ~nobody-here/x --data stdlib --hardware cpu": "--model is '~nobody-here/x' … write the whole path",
    "--model small --data ~x.jsonl --hardware cpu": "data.path is '~x.jsonl' … write the whole path",
    "--data two.csv --text-field c": "--text-field is 'c', and two.csv:2 has the fields 'a', 'b'; name one of them",
    "--data two.csv --prompt-field a --text-field b": "--text-field and --prompt-field are given … of one",
    "--data two.csv --prompt-field a --task classification": "--prompt-field … give --text-field and --label-field",
    "--data three.csv --prompt-field a": "--prompt-field is 'a' … 'a', 'b', 'c'; give --response-field too",
    "--data stdlib --text-field a": "--text-field is given, and --data is stdlib … leave it out",
    "--data openai/gsm8k --label-field a": "the labels of 'openai/gsm8k' are not known … save it with",
    "--modle small": "Unrecognized options: --modle, small; see megabatch init --help",
    "--model small --model": "'--model' … see megabatch init --help",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_bad_argument_is_one_line_and_nothing_is_written(folder: Path, words: str) -> None:
    (folder / "odd.jsonl").write_text('{"a": 1, "b": "x", "c": "y"}\n')
    (folder / "broken.jsonl").write_text("{\n[]\n")
    (folder / "two.csv").write_text("a,b\nx,y\n")
    (folder / "three.csv").write_text("a,b,c\nx,y,z\n")
    (folder / "empty").mkdir()
    before = sorted(folder.iterdir())
    said = line_of(lambda: write_recipe(**vars(read_arguments(Init, ["recipe.toml", *words.split()]))))
    assert names(said, REFUSED[words]), said
    assert sorted(folder.iterdir()) == before


def test_a_folder_of_the_users_is_written_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    tables = init("mine.toml", "--model", "~/tiny", "--data", "stdlib", "--hardware", "cpu")
    assert tables["model"]["name"] == str(folder / "tiny")


def test_nothing_is_overwritten(folder: Path) -> None:
    (folder / "recipe.toml").write_text("mine")
    with pytest.raises(MegabatchError, match=r"^recipe\.toml is there already, and nothing is overwritten; give"):
        write_recipe(**vars(Init()))
    assert (folder / "recipe.toml").read_text() == "mine"
    with pytest.raises(MegabatchError, match=r"^cannot write none/recipe\.toml \(No such file or directory\)"):
        write_recipe(**vars(Init(Path("none/recipe.toml"))))


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
    monkeypatch.chdir(ROOT)  # where the server of processes is started
    (done,) = Run(["train", str(folder / "recipe.toml"), *places, *short], folder / "logs", ranks=1).wait()
    assert done.status == 0, done.err
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) == 2


def absolute(folder: Path, data: str) -> list[str]:
    """Ranks are started elsewhere."""
    return [] if data == "stdlib" else [f"--data.path={folder / data}"]

"""Mistakes of the first hour: each gets one line with what was seen, what was expected and what to change.

The table is read by people, too: the mistake, and the words that it gets. Status 2, no traceback, nothing written.
"""

import json
from pathlib import Path

import pytest

from megabatch.train.cli import commands, front
from tests.unit.failures.table import names

RECIPE = """
[model.config]
model_type = "llama"
vocab_size = 384
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 256
[data]
path = "chats.csv"
cache = "cache"
[update]
global_batch_size = 4
max_microbatch_tokens = 256
[run]
tensorboard = false
"""
CLASSIFIER = """
[model]
function = "megabatch.train.classification:model"
[model.options]
labels = ["yes", "no"]
[data]
function = "megabatch.train.classification:data"
[data.options]
path = "labels.csv"
labels = ["yes", "no"]
[loss]
function = "megabatch.losses:classification"
[update]
global_batch_size = 4
"""
FILES = {
    "recipe.toml": RECIPE,
    "classifier.toml": CLASSIFIER,
    "broken.toml": "[model\n",
    "chats.csv": "text,other\n" + "hello,1\n" * 20,
    "labels.csv": "text,label\nhello,yes\nhello,maybe\n",
    "empty.csv": "",
    "header.csv": "text\n",
    "long.csv": "text\n" + ("x" * 300 + "\n") * 9,
    "latin.csv": b"text\ncaf\xe9\n",
    "ragged.csv": "text,label\na,b\nc\n",
    "numbers.jsonl": '{"text": 3}\n',
    "broken.jsonl": '{"text": "a"}\n{"text": \n',
    "chat.jsonl": json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n",
    "odd.jsonl": '{"a": "x", "b": "y"}\n',
    "sharegpt.jsonl": '{"conversations": [{"from": "human", "value": "a"}]}\n',
    "utf16.csv": "text\nab".encode("utf-16")[:-1],
    "table.xlsx": "x",
    "data.bin": "x",
    "runs/done/checkpoints/latest": "step-1",
    "runs/done/metrics.jsonl": "",
    "nothing/readme.html": "x",
}
MISTAKES = {  # command -> what it gets
    # the recipe
    "trane recipe.toml": "unknown command 'trane' (train comes nearest); the commands are init, show, train",
    "train": "no recipe; give the path of a TOML file first",
    "train recip.toml": "no recipe recip.toml (recipe.toml comes nearest); give the path",
    "train broken.toml": "broken.toml is not TOML … mend that line",
    "train chats.csv": "chats.csv is data, not a recipe; write a recipe for it: megabatch init --data chats.csv",
    "train nothing": "nothing is a folder without config.toml, so no run to resume; give",
    # keys and values
    "train recipe.toml --optim.learningrate=1": "unknown key optim.learningrate … [optim] has name, function",
    "watch runs/done": "watch is removed; open report.html in the run's folder",
    "doctor": "doctor is removed; run `megabatch verify RECIPE`, under torchrun on all ranks",
    "verify recipe.toml --step": "--step is removed; `megabatch verify RECIPE` compares gradients alone",
    "plan --measure": "--measure has no value; write --measure VALUE",
    "plan --measure here.toml recipe.toml": "--measure measures this machine, and 'recipe.toml' is given too; leave",
    "plan --measure here.txt": "--measure is 'here.txt'; name a .toml file in a folder that is there",
    "report --compare --same runs/done nothing": "--same is removed; compare run_hash, losses and norms in the rows",
    "train recipe.toml --run.manifest=true": "unknown key run.manifest … run_hash in each row of metrics.jsonl",
    "plan --published": "--published is removed; run `python -m benchmarks.published` in the repository",
    "plan recipe.toml --chart memory.png": "--chart is removed; the table and --json have the memory of each choice",
    "train recipe.toml --optim.weight_deca=1": "the nearest key is optim.weight_decay",
    "train recipe.toml --optimizer.lr=1": "unknown key optimizer.lr on the command line; the nearest key is optim.lr",
    "train recipe.toml --batch_size=8": "batch_size … here it is update.global_batch_size",
    "train recipe.toml --epochs=8": "epochs … here it is run.max_epochs",
    "train recipe.toml --gradient_accumulation_steps=8": "it is derived, never set: set update.global_batch_size",
    "train recipe.toml --optim.lr": "--optim.lr has no value; write --optim.lr=VALUE",
    "train recipe.toml --optim.lr=high": "optim.lr is 'high'; it must be a valid number: change it on the command",
    "train recipe.toml --update.global_batch_size=0": "update.global_batch_size is 0; it must be at least 1",
    "train recipe.toml lr=3": "cannot read the argument 'lr=3'; write --section.key=value",
    "train recipe.toml --optim.name=adamm": "optim.name is 'adamm' … the nearest name is",
    "train recipe.toml --sweep optim.lr": "--sweep is 'optim.lr'; write section.key=value,value",
    "train recipe.toml --sweep optim.lr=1e-3,fast": "optim.lr is 'fast'; it must be a valid number",
    # data
    "train recipe.toml --data.path=chat.csv": "'chat.csv', and there is no such file (chats.csv comes nearest); set",
    "train recipe.toml --data.path=table.xlsx": "table.xlsx, which is not read; save it as .csv",
    "train recipe.toml --data.path=data.bin": "data.bin, whose ending says nothing of what it is; set data.source to",
    "train recipe.toml --data.path=nothing": "'nothing', a folder without files that end in .jsonl … name another",
    "train recipe.toml --data.path=empty.csv": "the first line of empty.csv must name its fields … add it",
    "train recipe.toml --data.path=header.csv": "data.path names a source without rows; give at least one sample",
    "train recipe.toml --data.text_field=body": "has no field 'body', only 'text', 'other'; set data.text_field",
    "train recipe.toml --data.path=odd.jsonl": "has the fields 'a', 'b'; say which to learn: set data.prompt_field",
    "train recipe.toml --data.path=latin.csv": "is not text in UTF-8 (byte 0xe9), so save the file as UTF-8; mend it",
    "train recipe.toml --data.path=ragged.csv": "ragged.csv:3 has 1 values, and the first line names 2 fields; mend it",
    "train recipe.toml --data.path=numbers.jsonl": "a value of type int in the field 'text', where text is expected",
    "train recipe.toml --data.path=broken.jsonl": "broken.jsonl:2 is not JSON … mend it, or leave such rows out",
    "train recipe.toml --data.path=chat.jsonl": 'chat.jsonl:1 has no message of the role "assistant"',
    "train recipe.toml --data.path=long.csv": "long.csv:2 has 301 tokens … raise it to 301 or leave such samples out",
    "train recipe.toml --data.path=long.csv --update.max_microbatch_tokens=999": "model 256 positions; raise",
    "train recipe.toml --update.global_batch_size=99": "make no update of … raise run.max_epochs",
    "train recipe.toml --data.mixture.a.path=chats.csv --data.pack_tokens=1": "data.pack_tokens is 1 … at least 2",
    "train classifier.toml": "labels.csv:3 has the label 'maybe', and data.options.labels has yes, no; add it there",
    # the model, the run, extras
    "train recipe.toml --model.name=./gpt": "model.name is './gpt' and there is no such folder; name one that is",
    "train recipe.toml --model.name=runs/done": "'runs/done', a run of megabatch's; begin with its weights by",
    "train recipe.toml --model.config=none --model.name=gpt2": "write --model.name=NAME alone, which replaces it",
    "train recipe.toml --model.config.model_type=lama": "which transformers does not know; the nearest type is llama",
    "train recipe.toml --model.config.hidden_sizee=3": "model.config.hidden_sizee … the nearest key is hidden_size",
    "train recipe.toml --model.config.vocab_size=100": "384 tokens and the model a vocabulary of 100; set model.config",
    "train recipe.toml --model.config.num_attention_heads=3": "transformers refuses model.config … change it there",
    "train recipe.toml --loss.function=mine.py:loss": "'mine.py:loss', and there is no file mine.py; mend its name",
    "train recipe.toml --loss.function=megabatch.losses:x": "megabatch.losses has no such name; name a function",
    "train recipe.toml --run.folder=runs/done": "runs/done already holds a run; resume it with --run.resume=true, or",
    "train recipe.toml --run.init_from=runs/dome": "'runs/dome', which holds no checkpoint (runs/done comes nearest)",
    "train recipe.toml --run.device=cuda": "cuda",
    "train recipe.toml --tracking.trackers=mlflow": "which is not installed; pip install",
    "plan recipe.toml --layout": "unknown option --layout; the nearest one is --layouts",
    "plan recipe.toml --worlds=2": "unknown option --worlds; the nearest one is --world",
    "train recipe.toml -trust": "unknown option -trust; the nearest one is --trust",
    "plan recipe.toml --max_length=512": "unknown key max_length … data.max_sample_tokens",
    "plan recipe.toml --data.path=no.csv": "no such file … or give --length N, the tokens of the longest sample, or",
    "plan recipe.toml --world many": "--world is 'many'; it must be a whole number of at least 1",
    # the other commands
    "init new.toml --data chat.csv": "'chat.csv', and there is no such file (chats.csv comes nearest)",
    "init new.toml --data header.csv": "header.csv has no row that can be read; name data with at least one",
    "init new.toml --data odd.jsonl": "odd.jsonl:1 has the fields 'a', 'b', of which none is known as text",
    "init new.toml --data odd.jsonl --task classification": "known as a text and its label; name them: --text-field",
    "init new.toml --data odd.jsonl --text-field body": "--text-field is 'body', and odd.jsonl:1 has the fields 'a'",
    "init new.toml --dta x": "Unrecognized options: --dta … see megabatch init --help",
    "init new.toml --data sharegpt.jsonl": "sharegpt.jsonl:1 has nothing in one of the fields conversations",
    "train recipe.toml --data.path=utf16.csv": "cannot read utf16.csv as csv ('utf-16 … truncated data); mend it",
    "init recipe.toml --data chats.csv": "recipe.toml is there already, and nothing is overwritten; give another FILE",
    "report runs": "runs holds runs and is none; give one of them, or print a table of all by megabatch runs runs",
    "export runs/none --to model": "runs/none is no folder; give the folder of a run",
}

TAKEN = {  # what was a mistake once → what is said of it. The data of others are read as they are
    "init new.toml --data shared.jsonl": "read: messages_field = conversations",
    "init new.toml --data alpaca.jsonl": "read: prompt_field = instruction + input, response_field = output",
    "init new.toml --data tickets.csv --text-field customer_text --label-field category": (
        "read: text_field = customer_text, label_field = category"
    ),
    "init new.toml --data excel.csv": "read: text_field = text",
    "init new.toml --data list.jsonl": "read: text_field = text",
    "train recipe.toml --optim.warmup_steps=1000 --run.max_steps=1": "the warmup of 1000 updates is longer than",
}
READABLE = {
    "shared.jsonl": '{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}\n' * 20,
    "alpaca.jsonl": '{"instruction": "Translate", "input": "oui", "output": "yes"}\n' * 20,
    "tickets.csv": "id,customer_text,category\n" + "".join(f"{n},it broke {n},{n % 2}x\n" for n in range(20)),
    "excel.csv": ("text\n" + "hello\n" * 20).encode("utf-16"),
    "list.jsonl": json.dumps([{"text": "hello"}] * 20),
}


LONG, MANY = "a" * 5000, "9" * 5000
MISTAKES[f"train recipe.toml --data.text_field={LONG}"] = "only 'text', 'other'; set data.text_field"
MISTAKES |= {
    f"train recipe.toml --{key}=/{'x' * 300}": "File name too long"
    for key in ("data.path", "model.name", "model.tokenizer")
}
MISTAKES[f"plan recipe.toml --world={MANY}"] = "--world is '9999 … it must be a whole number of at least 1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", MISTAKES, ids=lambda words: words.replace(LONG, "LONG").replace(MANY, "MANY"))
def test_a_mistake_gets_one_line(folder: Path, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = words.split()
    status = front.run(arguments)
    status = commands.run(arguments) if status is None else status
    err = capfd.readouterr().err
    assert status == 2, err
    assert err.startswith("megabatch: ")
    assert names(err, MISTAKES[words]), err
    assert err.count("\n") == 1
    assert len(err) < 1500
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {path for path in written - {*FILES} if not path.startswith("cache/")} == set()


@pytest.mark.parametrize("words", TAKEN)
def test_a_mistake_of_once_is_read_or_warned_of(folder: Path, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    for name, content in READABLE.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    arguments = words.split()
    status = front.run(arguments)
    status = commands.run(arguments) if status is None else status
    said = "".join(capfd.readouterr())
    assert status == 0, said
    assert TAKEN[words] in said

"""The text of a recipe with a comment at every choice, written from a model, data and hardware."""

import json
import shlex
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

import tomli_w

from megabatch.errors import MegabatchError
from megabatch.train.config import SourceConfig
from megabatch.train.data.sources import HUB_ID, expanded, find_files
from megabatch.train.init.data_survey import MAX_SAMPLE_TOKENS, NUM_HELD_OUT, Size, Survey, option_of, size_of, survey
from megabatch.train.init.hardware import Hardware, read_hardware, seen_hardware
from megabatch.train.runtime.console import Console, print_line
from megabatch.train.runtime.files import write_new

RECIPE = """\
# {title}
# {launch}
# Every key: megabatch train {file} --help

{model}
[data]
{data}
[update]
global_batch_size = {batch} # {unit}, over all processes: it alone decides what an update learns from
{limit}

[optim]
lr = {lr}
warmup_steps = {warmup} # updates
{decay}
[eval]
every = {every} # updates
num_samples = {held_out} # held out, at most a tenth of the data
{metrics}
[run] # written to runs/ and this file's name
max_epochs = {epochs}{updates}
{steps}save_every = {save} # updates
keep_last = 2
"""
CLASSIFIER = """\
[model]
function = "megabatch.train.classification:model"
tokenizer = "{tokenizer}"

[model.options] # a head for the labels on {base}
labels = {labels}
{sizes}
"""
SMALL_CLASSIFIER = """\
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 4
max_position_embeddings = 512"""
SMALL_MODEL = """\
[model.config] # fresh weights; in its place: name = "Qwen/Qwen3-0.6B" below [model], of the hub or a folder
model_type = "llama"
vocab_size = 384 # bytes, and ByT5's few others
hidden_size = 128
intermediate_size = 384
num_hidden_layers = 2
num_attention_heads = 4
max_position_embeddings = 4096
"""
GPU_KEYS = """\
compute_dtype = "bfloat16" # parameters stay in float32
activation_checkpointing = true # less memory, a third more time; megabatch plan says what fits without
"""
PARALLEL = """
# [parallel]
# wrapper = "fsdp2" # shards; with nothing said: copies below 1e9 parameters, shards from there on
"""


def write_recipe(
    file: Path, model: str, data: str, task: str | None, hardware: str | None, **fields: str | None
) -> None:
    """Write a recipe for what `megabatch init` was asked for, and print what to do with it.

    Args:
        file: The file to write.
        model: "small", a name of the hub or a folder.
        data: "stdlib", files, a folder or a name of the hub.
        task: "language", "classification", or None: by the fields.
        hardware: As `read_hardware` reads it; None: what this machine has.
        fields: Fields that the user names, by the recipe's keys for them.

    Raises `MegabatchError`, with nothing written, for a bad argument and for a file that exists.
    """
    if file.exists():
        raise MegabatchError(f"{file} is there already, and nothing is overwritten; give another FILE")
    machine = read_hardware(hardware or seen_hardware())
    stated = {key: name for key, name in fields.items() if name is not None}
    name, findings = read_model(model), look(data, task, stated)
    size = Size()
    if findings.lengths:
        size = size_of(findings, on_cpu=machine.device == "cpu", bytes_per_token=1 if name is None else 4)
    text = recipe_text(str(file), name, findings, size, machine)
    try:
        write_new(file, text)
    except OSError as error:
        raise MegabatchError(f"cannot write {file} ({error.strerror or error}); give another FILE") from None
    except UnicodeError:
        raise MegabatchError(f"an answer has bytes that are no text, which {file} cannot hold; rename it") from None
    for line in (*found_lines(findings, size), next_commands(str(file), machine)):
        print_line(line)


def read_model(text: str) -> str | None:
    """Return the name of a model of the hub or of a folder; None for "small"."""
    if text == "small":
        return None
    folder = expanded(text, "--model")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise MegabatchError(f"--model is the folder {text!r}, without a config.json; name one of save_pretrained")
        # A recipe's name is no shell's: it has no ~.
        return str(folder)
    if "/" not in text and get_close_matches(text.lower(), ["small"], cutoff=0.7):
        raise MegabatchError(f"--model is {text!r}, which is neither a folder nor small; write small, or name a folder")
    if not HUB_ID.fullmatch(text):
        raise MegabatchError(
            f"--model is {text!r}; write small, a name of the hub (Qwen/Qwen3-0.6B), or a folder that "
            "save_pretrained has written"
        )
    return text


def look(data: str, task: str | None, stated: Mapping[str, str] | None = None) -> Survey:
    """Read the data where they are here; of the hub and of the standard library only the name is known."""
    stated = stated or {}
    if data == "stdlib":
        if stated:
            raise MegabatchError(
                f"{' and '.join(map(option_of, stated))} is given, and --data is stdlib, whose fields are known; leave "
                "it out, or name your data"
            )
        return Survey({"source": data})
    if find_files(SourceConfig(path=data), "data").kind == "hub":
        if "label_field" in stated:
            raise MegabatchError(
                f"--label-field is given, and the labels of {data!r} are not known before it is read; save it with "
                "save_to_disk, and name that folder"
            )
        return Survey({"path": data, **stated})
    with Console(enabled=True, loss_digits=4).progress(f"reading {data}", None, "rows") as advance:
        return survey(data, task, advance, stated)


def found_lines(findings: Survey, size: Size) -> list[str]:
    """Return what was found in the data, and what the recipe makes of it."""
    if not findings.lengths:
        return []
    count, lengths = len(findings.lengths), findings.lengths
    lines = [f"{count:,} samples of {sum(lengths) / count:,.0f} bytes on average, {max(lengths):,} at most"]
    fields = {key: value for key, value in findings.keys.items() if key.endswith("_field")}
    read = [f"{key} = {value if isinstance(value, str) else ' + '.join(value)}" for key, value in fields.items()]
    lines.append(f"read: {', '.join(read)}")
    if findings.guesses:
        options = "--text-field, --label-field, --prompt-field and --response-field"
        lines.append(f"{'; '.join(findings.guesses)}; {options} name others")
    if "label_field" in findings.keys:
        commonest = [f"{label} ({number:,})" for label, number in findings.labels.most_common(12)]
        lines.append(f"labels: {', '.join(commonest)}")
    if findings.unread:
        advice = f" ({len(findings.labels)} values in {_count(count, 'row')}; --task classification trains on them)"
        # Labels that are not read have too few rows of each, or too many values.
        is_label = bool(findings.labels) and "label_field" not in findings.keys
        lines.append(f"not read: {', '.join(findings.unread)}{advice if is_label else ''}")
    if findings.num_broken:
        lines.append(f"left out: {_count(findings.num_broken, 'row')}, first {findings.first_broken}")
    if size.num_long:
        lines.append(f"left out: {_count(size.num_long, 'sample')} of more than {MAX_SAMPLE_TOKENS:,} tokens")
    if count < 10:
        lines.append("no sample is held out of fewer than ten, so that nothing says how well others are predicted")
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def recipe_text(file: str, model: str | None, findings: Survey, size: Size, hardware: Hardware) -> str:
    is_cpu, is_classifier = hardware.device == "cpu", "label_field" in findings.keys
    subject = "A small model, from nothing," if model is None else f"{model}, fine-tuned"
    limit = "# max_microbatch_tokens = 16384 # else the most that fits is measured before the first update"
    if is_cpu:
        tokens = 16384 if model is None else 4096
        limit = f"max_microbatch_tokens = {tokens} # lower it if memory is short: the gradient stays the same"
    updates = "" if size.num_updates is None else f" # {size.num_updates:,} updates"
    steps = decay = ""
    if size.max_steps is not None:
        updates = ""
        note = "a first look: leave it and optim.decay_steps out to see all of the data"
        steps = f"max_steps = {size.max_steps} # {note}\n"
        decay = f"decay_steps = {size.max_steps}\n"
    model_lines = SMALL_MODEL
    if is_classifier:
        model_lines = CLASSIFIER.format(
            tokenizer=model or "bytes",
            base="a small ModernBERT on bytes, from nothing" if model is None else model,
            labels=json.dumps(sorted(findings.labels), ensure_ascii=False),
            sizes=SMALL_CLASSIFIER if model is None else tomli_w.dumps({"name": model}).rstrip(),
        )
    elif model is not None:
        model_lines = f"[model]\n{tomli_w.dumps({'name': model})}{'' if is_cpu else GPU_KEYS}"
    text = RECIPE.format(
        title=" ".join(f"{subject} on {findings.keys.get('path', 'stdlib')}.".split()),
        launch=launch_command(file, hardware),
        file=shlex.quote(file),
        model=model_lines,
        data=labeled_text(model, findings) if is_classifier else data_text(model, findings, size),
        batch=size.global_batch_size,
        unit="samples" if size.pack_tokens is None else f"rows of {size.pack_tokens} tokens",
        limit=limit,
        lr="2e-3 # of fresh weights; 1e-5 to fine-tune" if model is None else "1e-5",
        warmup=size.share(10, 5, 100),
        decay=decay,
        every=size.share(10, 5, 100),
        held_out=NUM_HELD_OUT,
        metrics='metrics = "megabatch.train.classification:accuracy"\n' if is_classifier else "",
        epochs=size.max_epochs,
        updates=updates,
        steps=steps,
        save=size.share(4, 20, 500) if size.num_updates else 100,
    )
    return text + (PARALLEL if hardware.per_node * hardware.num_nodes > 1 else "")


def data_text(model: str | None, findings: Survey, size: Size) -> str:
    lines: list[str] = []
    for key, value in findings.keys.items():
        if isinstance(value, str):
            lines += tomli_w.dumps({key: value}).splitlines()
        else:
            names = json.dumps(value, ensure_ascii=False)
            lines.append(f"{key} = {names} # joined by newlines, without those that are empty")
    if "source" in findings.keys and "path" in findings.keys:
        kinds = {"text": "a line is a document; documents: a file", "documents": "a file is a document; text: a line"}
        lines[1] += f" # {kinds[findings.keys['source']]}"
    if findings.unread:
        lines.append(f"# not read: {', '.join(' '.join(name.split()) for name in findings.unread[:12])}")
    if [*findings.keys] == ["path"]:
        lines.append("# set text_field, or prompt_field and response_field, or messages_field, where names are unusual")
    if findings.num_broken:
        lines.append(f'broken_rows = "skip" # {findings.num_broken:,} rows cannot be read')
    if size.pack_tokens is not None:
        lines.append(f"pack_tokens = {size.pack_tokens} # documents share rows of so many tokens")
    elif size.num_long or model is not None or not findings.lengths:
        share = f": {size.num_long:,} of {len(findings.lengths):,}" if size.num_long else ""
        lines.append(f"max_sample_tokens = {MAX_SAMPLE_TOKENS} # longer samples are left out, and counted{share}")
    return "\n".join(lines) + "\n"


def labeled_text(model: str | None, findings: Survey) -> str:
    options = {**findings.keys, "tokenizer": model or "bytes", "max_tokens": 512}
    lines = ['function = "megabatch.train.classification:data"', "", "[data.options]"]
    lines += tomli_w.dumps(options).splitlines()
    lines[-1] += " # longer texts are cut"
    lines.append(f"labels = {json.dumps(sorted(findings.labels), ensure_ascii=False)}")
    if findings.num_broken:
        lines.append(f'broken_rows = "skip" # {findings.num_broken:,} rows cannot be read')
    lines += ["", "[loss]", 'function = "megabatch.losses:classification" # a sum over samples, and their number']
    return "\n".join(lines) + "\n"


def launch_command(file: str, hardware: Hardware) -> str:
    words = f"megabatch train {shlex.quote(file)}"
    if hardware.per_node * hardware.num_nodes == 1:
        return words
    nodes = f"--nnodes {hardware.num_nodes} " if hardware.num_nodes > 1 else ""
    meeting = " --rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id megabatch" if nodes else ""
    return f"torchrun {nodes}--nproc-per-node {hardware.per_node}{meeting} -m {words}"


def next_commands(file: str, hardware: Hardware) -> str:
    """Return what to do with the recipe, line by line."""
    on_all = f"torchrun --nproc-per-node {hardware.per_node} -m " if hardware.per_node > 1 else ""
    device = "" if hardware.device == "gpu" else f" --device {hardware.device}"
    lines = {
        f"megabatch show {shlex.quote(file)}": "the first samples as text, what is learned of them, what is left out",
        launch_command(file, hardware): "train",
        f"{on_all}megabatch verify {shlex.quote(file)}": "the gradient of microbatches against that of the whole batch",
        f"megabatch plan {shlex.quote(file)} --world {hardware.per_node * hardware.num_nodes}{device}": "what fits",
    }
    width = min(60, max(map(len, lines)))
    return "\n".join([f"wrote {file}; next:", *(f"  {line:{width}}  # {why}" for line, why in lines.items())])

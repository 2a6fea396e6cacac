"""Init: `megabatch init`, a recipe with a comment at every choice, written from a model, data and hardware."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import tomli_w

from megabatch.errors import MegabatchError
from megabatch.train.cli.arguments import Device, Init
from megabatch.train.config import SourceConfig
from megabatch.train.data.sources import HUB_ID, expanded, place_of
from megabatch.train.runtime.files import write_new

DEVICES = get_args(Device)[1:]  # the GPUs that plan knows
HARDWARE = re.compile(r"(?:(\d+) *(?:nodes? +of|x) +)?(?:(\d+) +)?([a-z][\w-]*)", re.IGNORECASE)
CHATS = ("messages", "conversation", "conversations", "chat")
PAIRS = (
    ("prompt", "response"), ("prompt", "completion"), ("question", "answer"), ("instruction", "output"),
    ("instruction", "response"), ("query", "response"), ("input", "output"),
)  # fmt: skip
TEXTS = ("text", "content", "document", "body")

RECIPE = """\
# {title}
# {launch}
# Every key: megabatch train {file} --help

{model}
[data]
{data}
[update]
global_batch_size = 32 # samples, over all processes: it alone decides what an update learns from
{limit}

[optim]
lr = {lr}
warmup_steps = 20 # updates

[eval]
every = 20 # updates
num_samples = 64 # held out, at most a tenth of the data

[run] # written to runs/ and this file's name
max_epochs = 1
save_every = 100 # updates
keep_last = 2
"""
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


class Hardware(NamedTuple):
    """Processes that train together: so many on each of so many nodes."""

    device: str  # "cpu", "gpu", or one of DEVICES
    per_node: int = 1
    num_nodes: int = 1


def write_recipe(asked: Init) -> None:
    """Write the recipe, and print what to do with it.

    Raises `MegabatchError`, with nothing written, for a bad argument and for a file that exists.
    """
    if asked.file.exists():
        raise MegabatchError(f"{asked.file} is there already, and nothing is overwritten; give another FILE")
    hardware = read_hardware(asked.hardware or seen_hardware())
    text = recipe_text(str(asked.file), read_model(asked.model), asked.data, hardware)
    try:
        write_new(asked.file, text)
    except OSError as error:
        raise MegabatchError(f"cannot write {asked.file} ({error.strerror or error}); give another FILE") from None
    except UnicodeError:
        raise MegabatchError(
            f"an answer has bytes that are no text, which {asked.file} cannot hold; rename it"
        ) from None
    print(next_commands(str(asked.file), hardware))


def read_hardware(text: str) -> Hardware:
    """Read "cpu", "1 gpu", "8 gpus", "8 h100" or "2 nodes of 8 h100"."""
    found = HARDWARE.fullmatch(text.strip())
    word = "" if found is None else found[3].lower()
    device = next((name for name in ("cpu", "gpu", *DEVICES) if word in (name, f"{name}s")), None)
    num_nodes, per_node = (1, 1) if found is None else (int(found[1] or 1), int(found[2] or 1))
    if device is None or not num_nodes or not per_node:
        raise MegabatchError(
            f'--hardware is {text!r}; write "cpu", "1 gpu", "8 gpus", "8 h100" or "2 nodes of 8 h100"; '
            f"devices are {', '.join(DEVICES)}"
        )
    return Hardware(device, per_node, num_nodes)


def seen_hardware() -> str:
    """Return what this machine has, as `read_hardware` reads it; nvidia-smi says it without torch's seconds."""
    program = shutil.which("nvidia-smi")
    try:
        done = program and subprocess.run([program, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        done = None
    names = [line for line in done.stdout.splitlines() if line.startswith("GPU ")] if done else []
    return f"{len(names)} {kind_of(names[0])}" if names else "cpu"


def kind_of(name: str) -> str:
    """Return the device that a line of nvidia-smi names, where plan knows it; "gpu" else."""
    letters = name.partition("(UUID")[0].lower().replace(" ", "")
    if "a100" in letters and "40gb" in letters:
        return "a100-40g"
    found = [device for device in DEVICES if device in letters]
    return found[0] if found and "gh200" not in letters else "gpu"


def read_model(text: str) -> str | None:
    """Return the name of a model of the hub or of a folder; None for "small"."""
    if text == "small":
        return None
    folder = expanded(text, "--model")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise MegabatchError(f"--model is the folder {text!r}, without a config.json; name one of save_pretrained")
        return str(folder)  # a recipe's name is no shell's: it has no ~
    if not HUB_ID.fullmatch(text):
        raise MegabatchError(
            f"--model is {text!r}; write small, a name of the hub (Qwen/Qwen3-0.6B), or a folder that "
            "save_pretrained has written"
        )
    return text


def recipe_text(file: str, model: str | None, data: str, hardware: Hardware) -> str:
    """Return the whole recipe."""
    keys, unread = look(data)
    if "messages_field" in keys and model is None:
        raise MegabatchError(
            f"{data} has chats, for which the small model's bytes have no template; name a model that has one: "
            "--model Qwen/Qwen3-0.6B"
        )
    is_cpu = hardware.device == "cpu"
    what = "A small Llama, from nothing," if model is None else f"{model}, fine-tuned"
    names = SMALL_MODEL if model is None else f"[model]\n{tomli_w.dumps({'name': model})}{'' if is_cpu else GPU_KEYS}"
    limit = "# max_microbatch_tokens = 16384 # else the most that fits is measured before the first update"
    if is_cpu:
        tokens = 16384 if model is None else 4096
        limit = f"max_microbatch_tokens = {tokens} # lower it if memory is short: the gradient stays the same"
    text = RECIPE.format(
        title=" ".join(f"{what} on {data}.".split()),
        launch=launch_command(file, hardware),
        file=shlex.quote(file),
        model=names,
        data=data_text(keys, unread),
        limit=limit,
        lr="2e-3 # of fresh weights; 1e-5 to fine-tune" if model is None else "1e-5",
    )
    return text + (PARALLEL if hardware.per_node * hardware.num_nodes > 1 else "")


def look(data: str) -> tuple[dict[str, str], list[str]]:
    """Return the keys of [data], by the first row's fields where rows are here, and the fields that are not read."""
    if data == "stdlib":
        return {"source": data}, []
    source = SourceConfig(path=data)
    if place_of(source, "data").kind == "hub":
        return {"path": data}, []
    from megabatch.train.data.sources import Row, rows_of  # datasets takes a second

    row = next((each for each in rows_of(source, "data") if isinstance(each, Row)), None)
    if row is None:
        raise MegabatchError(f"{data} has no row that can be read; name data with at least one")
    keys = field_keys(row.fields)
    if not keys:
        names = ", ".join(map(repr, [*row.fields][:12])) or "none"
        raise MegabatchError(
            f"{row.name} has the fields {names}, of which none is known as text, a prompt and its response, or "
            "messages; rename them, or begin with recipes/gsm8k.toml, which names its fields"
        )
    return {"path": data, **keys}, [name for name in row.fields if name not in keys.values()]


def field_keys(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys that name the fields of a chat, a prompt and its response, or text, whichever is found first."""
    for name in CHATS:
        turns = fields.get(name)
        if isinstance(turns, list) and turns and all(isinstance(each, dict) for each in turns):
            return {"messages_field": name}
    for prompt, response in PAIRS:
        if isinstance(fields.get(prompt), str) and isinstance(fields.get(response), str):
            return {"prompt_field": prompt, "response_field": response}
    return next(({"text_field": name} for name in TEXTS if isinstance(fields.get(name), str)), {})


def data_text(keys: Mapping[str, str], unread: list[str]) -> str:
    """Return the lines of [data]."""
    lines = tomli_w.dumps(dict(keys)).splitlines()
    if unread:
        lines.append(f"# not read: {', '.join(' '.join(name.split()) for name in unread[:12])}")
    if [*keys] == ["path"]:
        lines.append("# set text_field, or prompt_field and response_field, or messages_field, where names are unusual")
    if "text_field" in keys:
        lines.append("pack_tokens = 1024 # documents share rows of so many tokens")
    else:
        lines.append("max_sample_tokens = 4096 # longer samples are left out, and counted")
    return "\n".join(lines) + "\n"


def launch_command(file: str, hardware: Hardware) -> str:
    """Return the command that trains."""
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
        f"{on_all}megabatch doctor": "versions, devices, and an update that is proved",
        f"megabatch verify {shlex.quote(file)}": "cut against uncut",
        f"megabatch plan {shlex.quote(file)} --world {hardware.per_node * hardware.num_nodes}{device}": "what fits",
        launch_command(file, hardware): "train",
    }
    width = min(60, max(map(len, lines)))
    return "\n".join([f"wrote {file}; next:", *(f"  {line:{width}}  # {why}" for line, why in lines.items())])

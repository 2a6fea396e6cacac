"""Text: a recipe with a comment at every choice, as one would write it by hand."""

import shlex
from collections.abc import Mapping

import tomli_w

from megabatch.errors import MegabatchError
from megabatch.train.cli.init.hardware import Hardware
from megabatch.train.cli.init.look import STDLIB, Looked
from megabatch.train.cli.init.model import ModelAnswer

SMALL_CONFIG = """\
[model.config] # fresh weights; in its place: name = "Qwen/Qwen3-0.6B" below [model], of the hub or a folder
model_type = "llama"
vocab_size = 384 # bytes, and ByT5's few others
hidden_size = 128
intermediate_size = 384
num_hidden_layers = 2
num_attention_heads = 4
max_position_embeddings = 4096
"""
PACK_TOKENS, SAMPLE_TOKENS = 1024, 4096  # of a row and of a sample, where the model can read as many


def recipe(path: str, model: ModelAnswer, data: Looked, hardware: Hardware) -> str:
    """The whole recipe. Raises `MegabatchError` for a chat and a model whose tokenizer has no template for one."""
    if data.shape == "chat" and model.name is None:
        raise MegabatchError(
            f"{data.name} has chats, for which the small model's bytes have no template; name a model that has one: "
            "--model Qwen/Qwen3-0.6B"
        )
    parts = [
        heading(path, model, data, hardware),
        model_text(model, hardware),
        data_text(model, data),
        update_text(model, data, hardware),
        optim_text(model, data),
        eval_text(),
        run_text(model, data),
    ]
    return "\n".join(parts + ([] if hardware.num_processes == 1 else [parallel_text()]))


def heading(path: str, model: ModelAnswer, data: Looked, hardware: Hardware) -> str:
    """What it is and how it is started."""
    what = "A small Llama, from nothing," if model.name is None else f"{model.name}, fine-tuned"
    lines = [
        f"{what} on {data.name}.",
        launch(path, hardware),
        f"Every key: megabatch train {shlex.quote(path)} --help",
    ]
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def launch(path: str, hardware: Hardware) -> str:
    """The command that trains."""
    path = shlex.quote(path)
    if hardware.num_processes == 1:
        return f"megabatch train {path}"
    if hardware.num_nodes == 1:
        return f"torchrun --nproc-per-node {hardware.per_node} -m megabatch train {path}"
    nodes = f"--nnodes {hardware.num_nodes} --nproc-per-node {hardware.per_node}"
    meeting = "--rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id megabatch"
    return f"torchrun {nodes} {meeting} -m megabatch train {path}"


def model_text(model: ModelAnswer, hardware: Hardware) -> str:
    """[model]: what is computed in bfloat16 keeps its parameters in float32."""
    if model.name is None:
        return SMALL_CONFIG
    lines = ["[model]", key("name", model.name)]
    if not hardware.is_cpu:
        lines += [
            'compute_dtype = "bfloat16" # parameters stay in float32',
            "activation_checkpointing = true # less memory, a third more time; megabatch plan says what fits without",
        ]
    return "\n".join(lines) + "\n"


def data_text(model: ModelAnswer, data: Looked) -> str:
    """[data]: the fields that were seen, and how long a sample may be."""
    comments = {"prompt_field": "read, not learned", "response_field": "learned", "messages_field": MESSAGES}
    lines = [line + (f" # {comments[name]}" if name in comments else "") for name, line in keys(data.keys)]
    if data.unread:
        lines.append(f"# not read: {', '.join(' '.join(name.split()) for name in data.unread[:12])}")
    if data.shape is None:
        lines.append('# subset = "main"')
        lines.append("# set text_field, or prompt_field and response_field, or messages_field, where names are unusual")
    if data.shape == "text":
        lines.append(f"pack_tokens = {at_most(PACK_TOKENS, model)} # documents share rows of so many tokens")
    else:
        lines.append(f"max_sample_tokens = {at_most(SAMPLE_TOKENS, model)} # longer samples are left out, and counted")
    return "\n".join(["[data]", *lines]) + "\n"


def at_most(num_tokens: int, model: ModelAnswer) -> int:
    """So many tokens, or as many as the model can read."""
    return num_tokens if model.context_tokens is None else min(num_tokens, model.context_tokens)


MESSAGES = "the assistant's turns are learned"


def keys(table: Mapping[str, str]) -> list[tuple[str, str]]:
    """Each key, and its line."""
    return [(name, key(name, value)) for name, value in table.items()]


def key(name: str, value: str) -> str:
    """A line of TOML."""
    return tomli_w.dumps({name: value}).rstrip("\n")


def update_text(model: ModelAnswer, data: Looked, hardware: Hardware) -> str:
    """[update]: on a GPU what fits is measured; on a CPU, which others use too, it is said."""
    rows = f"rows of {at_most(PACK_TOKENS, model)} tokens" if data.shape == "text" else "samples"
    lines = [
        "[update]",
        f"global_batch_size = 32 # {rows}, over all processes: it alone decides what an update learns from",
    ]
    if hardware.is_cpu:
        tokens = 16384 if model.name is None else SAMPLE_TOKENS
        lines.append(f"max_microbatch_tokens = {tokens} # lower it if memory is short: the gradient stays the same")
    else:
        lines.append("# max_microbatch_tokens = 16384 # else the most that fits is measured before the first update")
    return "\n".join(lines) + "\n"


def optim_text(model: ModelAnswer, data: Looked) -> str:
    """[optim]: fresh weights learn with larger steps."""
    lr = "lr = 2e-3 # of fresh weights; 1e-5 to fine-tune" if model.name is None else "lr = 1e-5"
    lines = ["[optim]", lr, "warmup_steps = 20 # updates"]
    if is_long(model, data):
        lines.append("decay_steps = 200 # of run.max_steps; without it the schedule ends with the data")
    return "\n".join(lines) + "\n"


def is_long(model: ModelAnswer, data: Looked) -> bool:
    """Whether the data are the standard library's, of which a small model has seen enough before its end."""
    return model.name is None and data.keys.get("source") == STDLIB


def eval_text() -> str:
    """[eval]: samples that are held out."""
    return "[eval]\nevery = 20 # updates\nnum_samples = 64 # held out, at most a tenth of the data\n"


def run_text(model: ModelAnswer, data: Looked) -> str:
    """[run]: how long it lasts, and where it is written."""
    length = "max_steps = 200 # updates" if is_long(model, data) else "max_epochs = 1"
    return f"[run] # written to runs/ and this file's name\n{length}\nsave_every = 100 # updates\nkeep_last = 2\n"


def parallel_text() -> str:
    """[parallel], where there is something to divide."""
    return (
        "# [parallel]\n"
        '# wrapper = "fsdp2" # shards; with nothing said: copies below 1e9 parameters, shards from there on\n'
    )

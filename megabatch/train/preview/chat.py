"""Chat: text that the model of a run, or of a folder that `export` wrote, generates in the terminal."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, TextStreamer

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.checkpoints.export import (
    RECIPE,
    Adapter,
    config_of,
    exported,
    find_checkpoint,
    merged_model,
    read_weights,
)
from megabatch.train.data.encode import Tokens
from megabatch.train.model.architecture import load_tokenizer, read_tokenizer, silence
from megabatch.train.runtime.console import print_line, printable

# Forgets the conversation.
NEW = "/new"
Message = dict[str, str]


@dataclass(frozen=True)
class Sampling:
    """The way in which tokens are drawn."""

    tokens: int  # at most, of an answer
    temperature: float  # 0: the likeliest token each time
    seed: int


class Printer(TextStreamer):
    """Prints text as it is generated, without what a terminal obeys, and keeps it."""

    text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        print(printable(text), end="\n" if stream_end else "", flush=True)


def chat(
    folder: Path, prompt: str | None, sampling: Sampling, *, step: int | str | None, mode: str | None, is_trusted: bool
) -> None:
    """Answer a prompt, or each line of the input until its end.

    Args:
        folder: Of a run, or of an export.
        prompt: A text; None: the lines of the input.
        sampling: The way in which tokens are drawn.
        step: The checkpoint of a run, as of `export`.
        mode: "chat", "text" or None: by the run.
        is_trusted: Run a model.function although the run's folder may be somebody else's.

    Raises:
        MegabatchError: The folder holds no model that writes text.
    """
    if sampling.tokens < 1 or not 0 <= sampling.temperature < math.inf:
        raise MegabatchError(
            f"--tokens is {sampling.tokens} and --temperature {sampling.temperature}; give at least 1 token, and a "
            "temperature of at least 0"
        )
    is_run = (folder / RECIPE).is_file() or not (folder / "config.json").is_file()
    model, tokenizer, is_chat = model_of_run(folder, step, is_trusted) if is_run else model_of_export(folder)
    if tokenizer is None or not callable(getattr(model, "generate", None)) or not model.can_generate():
        raise MegabatchError(
            f"{folder} has a {type(model).__name__}, which writes no text; give the run of a causal "
            "language model (a classifier: megabatch export, then transformers' pipeline)"
        )
    model = model.eval().to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    is_chat = is_chat if mode is None else mode == "chat"
    messages = list[Message]()
    for line in [prompt] if prompt is not None else lines_of_input():
        if line == NEW:
            messages = []
            continue
        messages = [*(messages if is_chat else []), {"role": "user", "content": line}]
        ids = prompt_ids(tokenizer, messages, is_chat=is_chat)
        text = generate(model, tokenizer, ids, sampling)
        messages.append({"role": "assistant", "content": text})


def lines_of_input() -> Iterator[str]:
    """Yield the lines that are typed or piped, without empty ones."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print_line(f"Ctrl-D ends, {NEW} begins anew")
    while True:
        if is_terminal:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def model_of_run(folder: Path, step: int | str | None, is_trusted: bool) -> tuple[Any, Any, bool]:
    """Return the model of a checkpoint, its tokenizer, and True where it was trained on chats."""
    config = config_of(folder, is_trusted=is_trusted)
    checkpoint = find_checkpoint(folder, step)
    for warning in checkpoint.warnings:
        print_line(f"warning: {warning}")
    model = exported(config, read_weights(checkpoint.path), checkpoint.path, merged=False)
    if isinstance(model, Adapter):
        model = merged_model(model, checkpoint.path)
    sources = [config.data, *config.data.mixture.values()]
    has_chats = any(source.messages_field is not None for source in sources)
    return model, load_tokenizer(config.model), has_chats


def model_of_export(folder: Path) -> tuple[Any, Any, bool]:
    """Return the model of a folder, its tokenizer, and True where that has a chat template."""
    tokenizer = read_tokenizer(str(folder), "the folder")
    try:
        with silence():
            model = cast(Any, AutoModelForCausalLM).from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise MegabatchError(
            f"{folder} holds no causal language model ({in_one_line(error)}); give a run, or an export of one"
        ) from None
    return model, tokenizer, getattr(tokenizer, "chat_template", None) is not None


def prompt_ids(tokenizer: Any, messages: list[Message], *, is_chat: bool) -> list[int]:
    """Return the token ids of a conversation by the chat template, or of the last text alone, as in training."""
    tokens = Tokens(tokenizer)
    if not is_chat:
        return [*tokens.front.tolist(), *tokens.ids_of([messages[-1]["content"]])[0].tolist()]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise MegabatchError(f"the chat template refuses the text ({in_one_line(error)}); add --mode text") from None
    return tokens.ids_of([text])[0].tolist()


def generate(model: Any, tokenizer: Any, ids: list[int], sampling: Sampling) -> str:
    """Print what the model writes after the ids, and return it."""
    positions = getattr(model.config, "max_position_embeddings", None)
    room = sampling.tokens if positions is None else min(sampling.tokens, positions - len(ids))
    if room < 1:
        raise MegabatchError(
            f"the prompt has {len(ids):,} tokens and the model {positions:,} positions; shorten it, or begin anew "
            f"with {NEW}"
        )
    torch.manual_seed(sampling.seed)
    printer = Printer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    drawn = {"do_sample": True, "temperature": sampling.temperature} if sampling.temperature else {"do_sample": False}
    with silence(), torch.inference_mode():
        model.generate(
            torch.tensor([ids], device=model.device),
            max_new_tokens=room,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
            suppress_tokens=[*range(len(tokenizer), model.config.get_text_config().vocab_size)] or None,
            streamer=printer,
            use_cache=True,
            **drawn,
        )
    return printer.text

"""Data: pairs of a prompt and a response, as samples of byte tokens.

A sample is ``{"input_ids": [T], "labels": [T]}`` with -100 on the prompt, unpadded. To add a source, write a
generator of `Pair` and name it in `pairs_of`.
"""

import ast
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import ByT5Tokenizer

from megabatch.batch import IGNORED_LABEL
from megabatch.errors import MegabatchError
from megabatch.train.config import Config, DataConfig

Sample = dict[str, Tensor]

MIN_BYTES = 400  # of a function, signature and docstring included
MAX_BYTES = 13_000  # with its end it fits into a microbatch of recipes/stdlib.toml
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Pair:
    """A prompt, which is not trained on, and the response to it."""

    name: str  # where it comes from, for error messages
    prompt: str
    response: str


@dataclass(frozen=True)
class Data:
    """Samples to train on, and samples that are never trained on."""

    train: Sequence[Sample]
    held_out: Sequence[Sample]


def pairs_of(config: DataConfig) -> Iterator[Pair]:
    """Every pair of the source, in an order that does not change."""
    if config.source == "stdlib":
        return stdlib_pairs(Path(sysconfig.get_path("stdlib")))
    return jsonl_pairs(Path(cast(str, config.path)), config.prompt_field, config.response_field)


def stdlib_pairs(root: Path) -> Iterator[Pair]:
    """Functions and methods of Python's standard library: signature and docstring, then the body."""
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(name.parts):
            for pair in functions_of(path.read_text(encoding="utf-8", errors="replace"), name.as_posix()):
                text = pair.prompt + pair.response
                if MIN_BYTES <= len(text.encode()) <= MAX_BYTES and text not in seen:
                    seen.add(text)
                    yield pair


def functions_of(source: str, name: str) -> Iterator[Pair]:
    """The functions of a module that are not inside another one, so that no text is in two samples."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # templates and other languages' fixtures lie among the modules
        return
    lines = lines_of(source)
    for node in outermost_functions(tree):
        first, has_docstring = node.body[0], ast.get_docstring(node, clean=False) is not None
        if len(node.body) > has_docstring and first.lineno > node.lineno:
            split = cast(int, first.end_lineno) if has_docstring else first.lineno - 1
            text = lines_of(textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])))
            head = split - node.lineno + 1
            yield Pair(f"{name}:{node.lineno}", "".join(text[:head]), "".join(text[head:]))


def lines_of(text: str) -> list[str]:
    """The lines as ast and JSON lines count them, ends kept; splitlines() also splits at form feeds and U+2028."""
    *whole, rest = text.split("\n")
    return [line + "\n" for line in whole] + [rest] * bool(rest)


def outermost_functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions below a node, in order, without those inside another function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from outermost_functions(child)


def jsonl_pairs(path: Path, prompt_field: str, response_field: str) -> Iterator[Pair]:
    """A pair a line; blank lines are skipped."""
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")  # JSON strings may hold every other line separator
    except (OSError, UnicodeDecodeError) as error:
        raise MegabatchError(f"cannot read {path} ({reason(error)}); set data.path to a file of JSON lines") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            fields = json_object(line, f"{path}:{number}")
            prompt, response = (text_of(fields, field, f"{path}:{number}") for field in (prompt_field, response_field))
            yield Pair(f"{path}:{number}", prompt, response)


def json_object(line: str, name: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise MegabatchError(f"{name} is not JSON ({error.msg}); write one object a line") from None
    except (ValueError, RecursionError):  # Python's own limits
        raise MegabatchError(
            f"{name} has a number of thousands of digits, or is nested too deeply; write the text in plain fields"
        ) from None
    if not isinstance(fields, dict):
        raise MegabatchError(f"{name} is a JSON {type(fields).__name__}; write one object a line")
    return cast(dict[str, Any], fields)


def text_of(fields: dict[str, Any], field: str, name: str) -> str:
    text = fields.get(field)
    if not isinstance(text, str):
        raise MegabatchError(
            f"{name} has no text in the field {field!r}, only the fields {sorted(fields)}; "
            "set data.prompt_field and data.response_field"
        )
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise MegabatchError(
            f"{name} has half of a surrogate pair in the field {field!r}, which is no text; mend or leave out that line"
        )
    return text


def reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def load_data(config: Config, tokenizer: ByT5Tokenizer) -> Data:
    """The samples of a recipe, checked, and split by the run's seed."""
    named = [(pair.name, sample_of(pair, tokenizer)) for pair in islice(pairs_of(config.data), config.data.max_samples)]
    cap = config.data.max_sample_tokens
    named = [(name, sample) for name, sample in named if cap is None or len(sample["input_ids"]) <= cap]
    names, samples = [name for name, _ in named], [sample for _, sample in named]
    check_samples(samples, names, config)
    order = random.Random(config.run.seed).sample(range(len(samples)), len(samples))
    num_held_out = min(config.eval.num_samples, len(samples) // 10)
    return Data(
        train=[samples[index] for index in sorted(order[num_held_out:])],
        held_out=[samples[index] for index in sorted(order[:num_held_out])],
    )


def lengths_of(samples: Sequence[Sample]) -> list[int]:
    """Tokens of each sample."""
    return [len(sample["input_ids"]) for sample in samples]


def sample_of(pair: Pair, tokenizer: ByT5Tokenizer) -> Sample:
    """One sample: the prompt, the response, and the end, which is learned too if there is a response."""
    prompt = token_ids(pair.prompt, tokenizer)
    response = token_ids(pair.response, tokenizer)
    response += [cast(int, tokenizer.eos_token_id)] if response else []
    if not prompt and not response:
        raise MegabatchError(f"the sample {pair.name} is empty, prompt and response; give it text or leave it out")
    labels = [IGNORED_LABEL] * len(prompt) + response
    return {  # [T], [T]
        "input_ids": torch.tensor(prompt + response, dtype=torch.long),
        "labels": torch.tensor(labels, dtype=torch.long),
    }


def token_ids(text: str, tokenizer: ByT5Tokenizer) -> list[int]:
    return cast(list[int], tokenizer(text, add_special_tokens=False)["input_ids"])


def check_samples(samples: Sequence[Sample], names: Sequence[str], config: Config) -> None:
    """Raise where there is no sample, where no token is a target, or where a sample fits into no microbatch."""
    cap = config.update.max_microbatch_tokens
    if not samples:
        source = config.data.path or config.data.source
        raise MegabatchError(
            f"the data set {source} is empty; give at least one sample (within data.max_sample_tokens)"
        )
    if not any(bool((sample["labels"][1:] != IGNORED_LABEL).any()) for sample in samples):
        raise MegabatchError(
            f"none of the {len(samples)} samples has a token to learn (every response is empty); "
            "set data.response_field to the field that holds the response"
        )
    longest = max(range(len(samples)), key=lambda index: len(samples[index]["input_ids"]))
    length = len(samples[longest]["input_ids"])
    if cap is not None and length > cap:
        raise MegabatchError(
            f"the sample {names[longest]} has {length} tokens, more than update.max_microbatch_tokens={cap}; "
            f"raise it to {length} or leave such samples out with data.max_sample_tokens"
        )

"""A recipe: a TOML file and the overrides of a command line, read, checked and merged into a `Config`.

Layers are plain dictionaries until one validation at the end, so that an override can mend what the file lacks.
Every mistake is a `MegabatchError` of one line.
"""

import contextlib
import difflib
import io
import tomllib
from pathlib import Path
from typing import Any

import tyro
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megabatch.errors import MegabatchError
from megabatch.train.config import Config, Section

Layer = dict[str, Any]

DERIVED = "derived, never set: set update.global_batch_size and update.micro_batch_size"
FOREIGN_KEYS = {
    **dict.fromkeys(
        ("local_batch_size", "per_device_train_batch_size", "batch_size", "train_micro_batch_size_per_gpu", "mbs"),
        "here it is update.micro_batch_size",
    ),
    **dict.fromkeys(
        ("train_batch_size", "total_batch_size", "global_bsz", "gbs"), "here it is update.global_batch_size"
    ),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "num_microbatches", "grad_accum_steps"),
        f"it is {DERIVED}",
    ),
    **dict.fromkeys(("max_grad_norm", "clip_grad", "gradient_clip_val"), "here it is update.max_norm"),
    **dict.fromkeys(("max_tokens_per_gpu", "max_token_len_per_gpu"), "here it is update.max_microbatch_tokens"),
    **dict.fromkeys(("learning_rate",), "here it is optim.lr"),
    **dict.fromkeys(("output_dir", "save_dir"), "here it is run.folder"),
    **dict.fromkeys(("save_steps", "save_interval"), "here it is run.save_every"),
    **dict.fromkeys(("num_train_epochs", "epochs"), "here it is run.max_epochs"),
}
EXPECTED = {  # where pydantic's own words do not say what to write
    "optim.betas": "it must be two numbers of at least 0 and below 1, 0.9,0.95 say",
    "run.folder": "it must name a folder",
}
BOUNDS = ("micro_batch_size", "max_microbatch_tokens")


def known_keys() -> dict[str, Any]:
    """Dotted key → the type of its value."""
    return {
        f"{section}.{key}": field.rebuild_annotation()
        for section, model in sections().items()
        for key, field in model.model_fields.items()
    }


def sections() -> dict[str, type[Section]]:
    """Name of a section → its class."""
    return {name: field.annotation for name, field in Config.model_fields.items()}  # pyright: ignore


def unknown_key(key: str, where: str) -> MegabatchError:
    """The error for a key that is not ours: who it may be instead, by its last part or by its spelling."""
    name = key.rpartition(".")[2]
    if name in FOREIGN_KEYS:
        return MegabatchError(f"unknown key {key} {where}; {FOREIGN_KEYS[name]}")
    known = list(known_keys())
    by_name = {dotted.rpartition(".")[2]: dotted for dotted in known}
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    near = near or [by_name[close] for close in difflib.get_close_matches(name, by_name, n=1, cutoff=0.6)]
    near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return MegabatchError(f"unknown key {key} {where}; the nearest key is {near[0]}")


def read_recipe(path: Path) -> Layer:
    """The recipe's tables; their keys are known, their values unchecked."""
    try:
        layer = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MegabatchError(f"no recipe {path}; give the path of a TOML file, recipes/stdlib.toml say") from None
    except (OSError, UnicodeDecodeError) as error:
        raise MegabatchError(f"cannot read {path} ({error}); give the path of a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise MegabatchError(f"{path} is not TOML: {error}; mend that line") from None
    except (ValueError, RecursionError):  # Python's own limits
        raise MegabatchError(
            f"{path} has a number of thousands of digits, or is nested too deeply; write values that a key can have"
        ) from None
    for section, table in layer.items():
        if section not in sections() and not isinstance(table, dict):
            raise unknown_key(section, f"in {path}")
        if section not in sections():
            raise unknown_section(section, table, f"in {path}")
        if not isinstance(table, dict):
            raise MegabatchError(f"{section} is {table!r} in {path}; it is a table: write [{section}] and keys below")
        for key in table:
            if f"{section}.{key}" not in known_keys():
                raise unknown_key(f"{section}.{key}", f"in {path}")
    return layer


def unknown_section(section: str, table: Layer, where: str) -> MegabatchError:
    """The error for a table that is not ours; a known foreign key in it says more than its own name."""
    for key in table:
        if key in FOREIGN_KEYS:
            return unknown_key(f"{section}.{key}", where)
    near = difflib.get_close_matches(section, sections(), n=1, cutoff=0.0)
    return MegabatchError(f"unknown section [{section}] {where}; the nearest section is [{near[0]}]")


def read_overrides(arguments: list[str]) -> Layer:
    """The layer of `--section.key=value` and `--section.key value` arguments; a bare `--section.key` means true."""
    layer: Layer = {}
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith("--") or argument.startswith("--="):
            raise MegabatchError(f"cannot read the argument {argument!r}; write --section.key=value")
        name, given, text = argument[2:].partition("=")
        if not given:
            text = waiting.pop(0) if waiting and not waiting[0].startswith("--") else "true"
        set_override(layer, name.replace("-", "_"), text)
    return layer


def set_override(layer: Layer, key: str, text: str) -> None:
    """Put one override into the layer; below model.config any key goes, for transformers knows them."""
    section, *path = key.split(".")
    if key.startswith("model.config.") and len(path) == 2:
        layer.setdefault(section, {}).setdefault("config", {})[path[1]] = read_toml_value(text)
        return
    if key == "model.config":
        raise MegabatchError(
            f"model.config is {text!r} on the command line; write --model.config.key=value for its keys"
        )
    if key not in known_keys():
        raise unknown_key(key, "on the command line")
    layer.setdefault(section, {})[path[0]] = read_value(text, known_keys()[key])


def read_value(text: str, annotation: Any) -> object:
    """The text as a value of that type; the text itself where it is none, for the validation to name it."""
    spelled = {"true": "True", "false": "False", "none": "None", "null": "None"}.get(text.lower(), text)
    words = spelled.strip("[]()").replace(",", " ").split() if "tuple" in str(annotation) else [spelled]
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return tyro.cli(annotation, args=words, console_outputs=False)
    except SystemExit:
        return text


def read_toml_value(text: str) -> object:
    """The text as TOML reads it, or as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, or beyond Python's own limits
        return text


def load_config(path: Path, arguments: list[str]) -> Config:
    """The recipe with its overrides, checked: the file, then the command line on top, then one validation."""
    file, overrides = read_recipe(path), read_overrides(arguments)
    for layer, where in ((file, f"in {path}"), (overrides, "on the command line")):
        check_one_bound(layer, where)
    config = check(merge(file, overrides), path, overrides)
    if config.update.micro_batch_size is None and config.update.max_microbatch_tokens is None:
        raise MegabatchError(
            f"neither update.micro_batch_size nor update.max_microbatch_tokens is set in {path}; "
            "give one: samples per forward, or padded tokens per forward"
        )
    if config.data.source == "jsonl" and config.data.path is None:
        raise MegabatchError(f'data.source is "jsonl" and data.path is missing; set it in {path} to the file to read')
    return config


def check_one_bound(layer: Layer, where: str) -> None:
    """Both bounds of a microbatch in one layer contradict each other; over two layers the later one holds."""
    given = [key for key in BOUNDS if layer.get("update", {}).get(key) is not None]
    if len(given) == 2:
        raise MegabatchError(
            f"both update.micro_batch_size and update.max_microbatch_tokens are set {where}; remove one of them"
        )


def merge(file: Layer, overrides: Layer) -> Layer:
    """The file's layer with the overrides on top; an override of one microbatch bound replaces the other one."""
    merged = {section: {**file.get(section, {}), **overrides.get(section, {})} for section in {**file, **overrides}}
    if "config" in overrides.get("model", {}) and isinstance(file.get("model", {}).get("config"), dict):
        merged["model"]["config"] = {**file["model"]["config"], **overrides["model"]["config"]}
    given = overrides.get("update", {})
    for key, other in (BOUNDS, BOUNDS[::-1]):
        if given.get(key) is not None and other not in given:
            merged["update"].pop(other, None)
    return merged


def check(layer: Layer, path: Path, overrides: Layer) -> Config:
    """The validated config; the first thing wrong with it becomes one line."""
    layer.setdefault("run", {}).setdefault("folder", f"runs/{path.stem}")
    for section in ("model", "update"):
        layer.setdefault(section, {})
    try:
        return Config.model_validate(layer)
    except ValidationError as error:
        raise explain(error.errors()[0], path, overrides) from None


def explain(error: ErrorDetails, path: Path, overrides: Layer) -> MegabatchError:
    """One line out of one of pydantic's errors: what was seen, what was expected, what to change."""
    section, key = (str(part) for part in error["loc"][:2])
    if error["type"] == "missing" and len(error["loc"]) == 2:
        return MegabatchError(f"{section}.{key} is missing; set it in {path}, below [{section}]")
    expected = EXPECTED.get(f"{section}.{key}") or (
        error["msg"]
        .replace("Input should be", "it must be")
        .replace("valid integer", "whole number")
        .replace("greater than or equal to", "at least")
    )
    place = "on the command line" if key in overrides.get(section, {}) else f"in {path}"
    return MegabatchError(f"{section}.{key} is {shortened(repr(error['input']))}; {expected}: change it {place}")


def shortened(text: str) -> str:
    """The text, or its beginning where a line has no room for all of it."""
    return text if len(text) <= 200 else f"{text[:200]}..."

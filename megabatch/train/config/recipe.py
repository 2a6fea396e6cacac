"""A recipe: a TOML file and the overrides of a command line, read, checked and merged into a `Config`.

Layers are plain dictionaries until one validation at the end, so that an override can mend what the file lacks.
Every mistake is a `MegabatchError` of one line.
"""

import math
import tomllib
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from megabatch.errors import MegabatchError
from megabatch.train.config import Config
from megabatch.train.config.batch_size import check_batch_size, read_schedule
from megabatch.train.config.byte_sizes import read_bytes
from megabatch.train.config.contradictions import check_config
from megabatch.train.config.keys import (
    is_named_sources,
    is_options,
    known_keys,
    sections,
    type_of,
    unknown_key,
    unknown_section,
)
from megabatch.train.config.recipe_paths import near
from megabatch.train.config.secrets import check_unmasked

Layer = dict[str, Any]

# Expectations that pydantic's own words do not give.
EXPECTED = {
    "optim.betas": "it must be two numbers of at least 0 and below 1, 0.9,0.95 say",
    "run.folder": "it must name a folder",
    "data.path": "it must be a path, or a list of paths",
}
BOUNDS = ("micro_batch_size", "max_microbatch_tokens")
MODELS = ("name", "config", "function")
# Keys of which an override of one replaces the others.
ALTERNATIVES = {
    "update": [{key} for key in BOUNDS],
    "model": [{"name"}, {"config"}, {"function", "options"}],
    "data": [{"path", "source"}, {"mixture"}, {"function", "options"}],
}


def read_recipe(path: Path) -> Layer:
    """Return the recipe's tables; their keys are known, their values unchecked."""
    try:
        layer = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MegabatchError(
            f"no recipe {path}{near(path)}; give the path of a TOML file, or of a run's folder"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise MegabatchError(f"cannot read {path} ({error}); give the path of a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise MegabatchError(f"{path} is not TOML: {error}; mend that line") from None
    except (ValueError, RecursionError):
        raise MegabatchError(
            f"{path} has a number of thousands of digits, or is nested too deeply; write values that a key can have"
        ) from None
    for section, table in layer.items():
        check_section(section, table, path)
    return {section: with_none(section, table) for section, table in layer.items()}


def with_none(section: str, table: Layer) -> Layer:
    """Replace "none" by None, for which TOML has no word, where the key may have no value and is no text."""
    kinds = {key: get_args(type_of(f"{section}.{key}")) for key in table}
    return {
        key: None if value == "none" and NoneType in kinds[key] and str not in kinds[key] else value
        for key, value in table.items()
    }


def check_section(section: str, table: Any, path: Path) -> None:
    if section not in sections():
        where = f"in {path}"
        raise unknown_section(section, table, where) if isinstance(table, dict) else unknown_key(section, where)
    if not isinstance(table, dict):
        raise MegabatchError(f"{section} is {table!r} in {path}; it is a table: write [{section}] and keys below")
    for key, value in cast(Layer, table).items():
        annotation = type_of(f"{section}.{key}")
        if annotation is None:
            raise unknown_key(f"{section}.{key}", f"in {path}")
        if is_named_sources(annotation):
            check_named(f"{section}.{key}", value, path)


def check_named(key: str, sources: Any, path: Path) -> None:
    named = cast(Layer, sources).items() if isinstance(sources, dict) else [("NAME", sources)]
    for name, table in named:
        if not isinstance(table, dict):
            raise MegabatchError(f"{key}.{name} is {table!r} in {path}; it is a table: write [{key}.{name}]")
        for part in cast(Layer, table):
            if type_of(f"{key}.{name}.{part}") is None:
                raise unknown_key(f"{key}.{name}.{part}", f"in {path}")


def read_overrides(arguments: list[str]) -> Layer:
    """Return the layer of `--section.key=value` and `--section.key value`; a bare `--section.key` means true."""
    layer: Layer = {}
    for argument in split_options(arguments, ())[1]:
        if not argument.startswith("--") or argument.startswith("--="):
            raise MegabatchError(f"cannot read the argument {argument!r}; write --section.key=value")
        name, equals, text = argument[2:].partition("=")
        if not equals and type_of(name.replace("-", "_")) not in (None, bool):
            raise MegabatchError(f"{argument} has no value; write {argument}=VALUE")
        # The name of a source may have any characters.
        is_named = is_named_sources(type_of(".".join(name.split(".")[:2])))
        set_override(layer, name if is_named else name.replace("-", "_"), text if equals else "true")
    return layer


def split_options(
    arguments: Sequence[str], options: Collection[str], flags: Collection[str] = ()
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return a command's own options with their values, flags with none, and overrides of keys as `--key=value`."""
    values, overrides, remaining = list[tuple[str, str]](), list[str](), list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, text = argument.removeprefix("--").partition("=")
        name = name.replace("_", "-") if name.replace("_", "-") in options else name
        follows = not equals and bool(remaining) and not remaining[0].startswith("--")
        if argument.startswith("--") and name in flags:
            if equals:
                raise MegabatchError(f"{argument}: --{name} takes no value; write --{name}")
            values.append((name, ""))
        elif argument.startswith("--") and name in options:
            if not equals and not follows:
                raise MegabatchError(f"--{name} has no value; write --{name} VALUE")
            values.append((name, text if equals else remaining.pop(0)))
        else:
            overrides.append(f"{argument}={remaining.pop(0)}" if argument.startswith("--") and follows else argument)
    return values, overrides


def set_override(layer: Layer, key: str, text: str) -> None:
    annotation = type_of(key)
    if annotation is None:
        raise unknown_key(key, "on the command line")
    if key == "model.config" and text.lower() in ("none", "null"):
        raise MegabatchError(f"{key} is {text!r} on the command line; write --model.name=NAME alone, which replaces it")
    if is_options(annotation) or is_named_sources(annotation):
        raise MegabatchError(f"{key} is {text!r} on the command line; write --{key}.key=value for its keys")
    *tables, last = key.split(".")
    for table in tables:
        layer = layer.setdefault(table, {})
    layer[last] = read_toml_value(text) if annotation is object else read_value(text, annotation)


def read_value(text: str, annotation: Any) -> object:
    """Return the first reading of the text that the key takes, or one of its kind, whose fault the validation names."""
    adapter = TypeAdapter[object](annotation, config=ConfigDict(strict=True))
    words = [word for word in text.split(",") if word]
    numbers = [read_number(word) for word in text.strip("[]()").replace(",", " ").split()]
    number = read_number(text.lower() if text.lower() in ("true", "false") else text)
    readings = [None] if text.lower() in ("none", "null") else []
    for reading in (*readings, number, text, words, numbers):
        with suppress(ValidationError):
            adapter.validate_python(reading)
            return reading
    return numbers if get_origin(annotation) is list else number


def read_number(text: str) -> object:
    """Return the text as TOML reads it, or as Python reads a number: TOML has no "007", no ".5" and no "5."."""
    value = read_toml_value(text)
    if not isinstance(value, str):
        return value
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    return value


def read_toml_value(text: str) -> object:
    """Return the text as TOML reads it, or as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def load_config(path: Path, arguments: list[str], *, may_be_masked: bool = False) -> Config:
    """Return the recipe with its overrides, checked: the file, the command line on top, then one validation."""
    file, overrides = read_recipe(path), read_overrides(arguments)
    for layer, where in ((file, f"in {path}"), (overrides, "on the command line")):
        if all(layer.get("update", {}).get(key) is not None for key in BOUNDS):
            raise MegabatchError(
                f"both update.micro_batch_size and update.max_microbatch_tokens are set {where}; remove one of them"
            )
    merged = merge(file, overrides)
    if not may_be_masked:
        check_unmasked(merged, str(path))
    config = check(merged, path, overrides)
    if all(getattr(config.update, key) is None for key in BOUNDS):
        update = config.update.model_copy(update={"max_microbatch_tokens": "auto"})
        config = config.model_copy(update={"update": update})
    if config.update.memory is not None:
        read_bytes("update.memory", config.update.memory)
    check_batch_size(config)
    check_config(config)
    stated = [key for key in MODELS if getattr(config.model, key) is not None]
    if len(stated) != 1:
        raise MegabatchError(
            f"{' and '.join(f'model.{key}' for key in stated) or 'no model'} set in {path}; give one of model.name "
            "(weights), model.config (fresh ones) and model.function (your own)"
        )
    return config


def merge(file: Layer, overrides: Layer) -> Layer:
    """Return the file's layer with the overrides on top; an alternative replaces the file's other ones."""
    merged = merged_tables(file, overrides)
    for section, alternatives in ALTERNATIVES.items():
        above = {key for key, value in overrides.get(section, {}).items() if value is not None}
        chosen = set[str]().union(*(keys for keys in alternatives if keys & above))
        for key in set[str]().union(*alternatives) - chosen if chosen else ():
            merged[section].pop(key, None)
    return merged


def merged_tables(below: Layer, above: Layer) -> Layer:
    """Return one table on top of another, tables within them too."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merged_tables(merged[key], cast(Layer, value)) if both else value
    return merged


def check(layer: Layer, path: Path, overrides: Layer) -> Config:
    """Return the validated config; the first error becomes one line."""
    layer.setdefault("run", {}).setdefault("folder", f"runs/{path.stem}")
    for section in ("model", "update"):
        layer.setdefault(section, {})
    if isinstance(sizes := layer["update"].get("global_batch_size"), list):
        read_schedule(cast(list[Any], sizes))
    try:
        return Config.model_validate(layer)
    except ValidationError as error:
        raise explain(error.errors()[0], path, overrides) from None


def explain(error: ErrorDetails, path: Path, overrides: Layer) -> MegabatchError:
    """Return one line for one of pydantic's errors: the value, the expected one, the change."""
    parts = [str(part) for part in error["loc"]]
    nested = is_named_sources(known_keys().get(".".join(parts[:2])))
    section, *subkeys = parts[: 4 if nested else 2]
    key = ".".join([section, *subkeys])
    if error["type"] == "missing" and len(error["loc"]) == 2:
        return MegabatchError(f"{key} is missing; set it in {path}, below [{section}]")
    if error["type"] == "string_pattern_mismatch":
        expected = 'it must be "module:function" or "file.py:function"'
    else:
        expected = EXPECTED.get(f"{'data' if nested else section}.{subkeys[-1]}") or expected_text(error)
    place = "on the command line" if subkeys[0] in overrides.get(section, {}) else f"in {path}"
    value = repr(error["input"])
    value = value if len(value) <= 200 else f"{value[:200]}..."
    return MegabatchError(f"{key} is {value}; {expected}: change it {place}")


def expected_text(error: ErrorDetails) -> str:
    """Return the value that pydantic expects, in the words of a recipe."""
    return (
        error["msg"]
        .partition(" or instance of")[0]
        .replace("Input should be", "it must be")
        .replace("valid integer", "whole number")
        .replace("a valid boolean", "true or false")
        .replace("valid dictionary", "table")
        .replace("greater than or equal to", "at least")
        .replace("less than or equal to", "at most")
    )

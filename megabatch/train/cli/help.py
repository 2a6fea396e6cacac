"""Help: every key of a recipe with its type, its value and what it does."""

import textwrap
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from megabatch.train.config import Config, ModelConfig, RunConfig, Section, SourceConfig, UpdateConfig
from megabatch.train.config.keys import is_named_sources, sections

WIDTH = 120
ENDING = """On the command line: --section.key=value; none is no value, a,b,c a list, ["a", "b"] a list of paths."""
TYPE_WORDS = {int: "whole number", float: "number", bool: "true | false", str: "text", dict: "table", list: "list"}

EXAMPLE = Config(
    model=ModelConfig(config={"model_type": "llama"}),
    update=UpdateConfig(global_batch_size=32, max_microbatch_tokens=8192),
    run=RunConfig(folder="runs/RECIPE"),
)

PLAN_OPTIONS = {
    "--world N": "processes, as torchrun would start them (1)",
    "--device NAME": "a100-40g, a100-80g, h100, h200, b200, l40s, rtx4090, cpu (a100-80g)",
    "--memory 80GiB": "memory of a rank (the device's)",
    "--bandwidth 235GB/s": "what a rank can send inside a node, and at most between nodes (the device's)",
    "--length TOKENS": "the longest sample (data.pack_tokens, data.max_sample_tokens, or the data are read)",
    "--json": "every choice, as a list of objects",
    "--chart FILE": "memory over one update of the best choice, as .png, .svg or .pdf",
}


def plan_help_text(config: Config) -> str:
    """The options of `megabatch plan`, and the recipe's keys; a key on the command line is not chosen any more."""
    options = [f"  {option:22}{text}" for option, text in PLAN_OPTIONS.items()]
    return "\n".join(["megabatch plan RECIPE, with", *options, "and any key of the recipe:", "", help_text(config)])


def help_text(config: Config) -> str:
    """Every key with the value that it has in this config, as a recipe and the command line write it."""
    parts = [section_text(name, getattr(config, name)) for name in sections()]
    named = textwrap.fill(
        f"Keys of [data.mixture.NAME] and [eval.sets.NAME]: {', '.join(SourceConfig.model_fields)}.", WIDTH
    )
    return "\n".join([*parts, named, ENDING])


def section_text(name: str, section: Section) -> str:
    """A table of the recipe and its keys."""
    lines = [f"[{name}]  {' '.join((type(section).__doc__ or '').split())}"]
    for key, field in type(section).model_fields.items():
        lines.append(
            f"  {name}.{key} = {value_text(getattr(section, key))}    ({type_text(field.rebuild_annotation())})"
        )
        text = " ".join((field.description or "").split())
        lines.append(textwrap.fill(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(lines) + "\n"


def value_text(value: Any) -> str:
    """The value as TOML has it, as far as it has one."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, dict):
        inner = ", ".join(f"{name} = {value_text(each)}" for name, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    return f"{value.path!r}" if isinstance(value, SourceConfig) else str(value)


def type_text(annotation: Any) -> str:
    """The type of a key's value, in words."""
    if is_named_sources(annotation):
        return "tables of sources, by name"
    if get_origin(annotation) is Literal:
        return " | ".join(f'"{choice}"' for choice in get_args(annotation))
    if hasattr(annotation, "__metadata__"):  # Annotated: its bounds are told by the message that refuses a value
        return type_text(get_args(annotation)[0])
    if get_origin(annotation) is tuple:
        return "two numbers"
    kind = get_origin(annotation) or annotation
    if kind in TYPE_WORDS:
        return TYPE_WORDS[kind]
    members = [type_text(member) for member in get_args(annotation) if member is not NoneType]
    return " or ".join(members) + (", or none" if NoneType in get_args(annotation) else "")

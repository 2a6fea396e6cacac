"""Random recipes of every key, most of them valid."""

import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st

from megabatch.train.config import Options, SourceConfig
from megabatch.train.config.keys import fields_of, known_keys

Recipe = dict[str, dict[str, Any]]  # section → key → value
Strategy = st.SearchStrategy[Any]

WORDS = [
    "a.jsonl",
    "data/*.csv",
    "text",
    "mine.py:part",
    "megabatch.losses:next_token",
    "train",
    "AdamW",
    "20GiB",
    "bytes",
]
COUNTS = [1, 2, 3, 5, 8, 64, 1000]
NUMBERS = [1e-3, 0.1, 0.5, 0.9, 1.0, 2.0]
WRONG: Strategy = st.one_of(
    st.sampled_from(
        [0, -1, 2**63, 2**64, 1.5, float("nan"), float("inf"), "", " ", "none", "auto", "\ud800", "a\nb", "0", "1e3"]
    ),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.text(max_size=6),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text("ab.", max_size=2), st.integers(), max_size=2),
)
OPTIONS: Strategy = st.dictionaries(
    st.sampled_from(["momentum", "fused", "layers"]), st.sampled_from([0.9, True, 2, "x"]), max_size=2
)
ALONE = [
    ("model", "name"),
    ("model", "config"),
    ("model", "function"),
    ("update", "micro_batch_size"),
    ("update", "max_microbatch_tokens"),
    ("data", "function"),
    ("data", "mixture"),
    ("data", "path"),
]


def of(annotation: Any) -> Strategy:
    """Values of a key's type; of one that may have none, not none."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation == Options:
        return OPTIONS
    if origin is Annotated and "pattern" in str(annotation):
        return st.just("mine.py:part")
    if origin is Annotated:
        return of(parts[0])
    if origin is Literal:
        return st.sampled_from(parts)
    if origin in (Union, types.UnionType):
        return st.one_of(*(of(each) for each in parts if each is not type(None)))
    if origin is list:
        return st.lists(of(parts[0]), min_size=1, max_size=2)
    if origin is tuple:
        return st.just([0.9, 0.95])
    if origin is dict:  # named sources
        return st.dictionaries(st.sampled_from(["code", "prose"]), source(), min_size=1, max_size=2)
    return {
        int: st.sampled_from(COUNTS),
        float: st.sampled_from(NUMBERS),
        bool: st.booleans(),
        str: st.sampled_from(WORDS),
    }[annotation]


def source() -> Strategy:
    """A table of a source: its path, and some other keys."""
    keys = {key: of(kind) for key, kind in fields_of(SourceConfig).items()}
    return st.fixed_dictionaries(
        {"path": st.just("a.jsonl")}, optional={key: keys[key] for key in keys if key != "path"}
    )


KEYS: dict[str, Strategy] = {key: of(kind) for key, kind in known_keys().items()}
FREE = [
    key
    for key in KEYS
    if tuple(key.split(".")) not in ALONE
    and key not in ("update.global_batch_size", "update.memory", "optim.lr_follows_batch")
]


@st.composite
def recipes(draw: st.DrawFn) -> tuple[Recipe, list[str]]:
    """A recipe's tables, and overrides of the command line; one in four has something wrong in it."""
    model, bound = (
        draw(st.sampled_from(["name", "config", "function"])),
        draw(st.sampled_from(["micro_batch_size", "max_microbatch_tokens", None])),
    )
    chosen = [
        "update.global_batch_size",
        f"model.{model}",
        *draw(st.lists(st.sampled_from(FREE), max_size=8, unique=True)),
    ]
    chosen += [f"update.{bound}"] if bound else []
    chosen += [f"data.{draw(st.sampled_from(['path', 'path', 'path', 'function', 'mixture']))}"]
    values = {key: draw(KEYS[key]) for key in chosen}
    if draw(st.sampled_from([False, False, False, False, True])):
        name = draw(
            st.one_of(
                st.sampled_from([*KEYS]), st.sampled_from(["update.batch_size", "modle.name", "data", "x.y.z", ""])
            )
        )
        values[name] = draw(WRONG)
    above = draw(st.sets(st.sampled_from(sorted(values)), max_size=3)) - {
        key for key in values if isinstance(values[key], dict)
    }
    return tables({key: value for key, value in values.items() if key not in above}), [
        argument(key, values[key]) for key in sorted(above)
    ]


def tables(values: Mapping[str, Any]) -> Recipe:
    """Values by dotted key as the tables of a recipe."""
    found: Recipe = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        found.setdefault(section, {})[name] = value
    return found


def argument(key: str, value: Any) -> str:
    """A value as the command line writes it."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"--{key}={text}"

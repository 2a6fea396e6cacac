"""Random recipes: of every key, most of them valid; and of small models that can be run."""

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


@st.composite
def some(draw: st.DrawFn, **keys: list[Any]) -> dict[str, Any]:
    """A table with at most two of the keys, each with one of its values."""
    return {key: draw(st.sampled_from(keys[key])) for key in draw(st.sets(st.sampled_from([*keys]), max_size=2))}


GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 384,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
}
RUNNABLE: dict[str, Strategy] = {
    "model": some(
        dtype=["float32", "float64", "bfloat16"],
        compute_dtype=["bfloat16"],
        attention=["eager", "sdpa"],
        activation_checkpointing=[True, False],
        freeze=[["*.mlp.*"], ["*"], ["*attn*", "*mlp*"]],
        tokenizer=["bytes"],
    ),
    "data": some(
        pack_tokens=[8, 64],
        max_sample_tokens=[8, 20, 64],
        broken_rows=["stop", "skip"],
        streaming=[True, False],
        shuffle_window=[1, 5, 100],
        look_ahead=[0, 2],
        max_samples=[1, 2, 20],
        num_workers=[0],
    ),
    "update": some(
        tail=["step", "drop", "carry"],
        max_norm=[0.1, 1.0, "none"],
        on_nonfinite=["raise", "skip_update"],
        sync=["auto", "last", "every", "replica_last"],
    ),
    "optim": some(
        name=["AdamW", "SGD", "Adafactor", "Adagrad"],
        lr=[0.0, 1e-3, 1e30],
        options=[{}, {"foreach": True}],
        betas=[[0.0, 0.0], [0.9, 0.99]],
        weight_decay=[0.0, 0.1],
        warmup_steps=[0, 1, 100],
        schedule=["cosine", "linear", "constant", "wsd"],
        decay_steps=[1, 2, 50],
        final_lr_share=[0.0, 1.0],
        ema_decay=[0.0, 0.9],
    ),
    "eval": some(every=[1, 2, "none"], num_samples=[0, 1, 5, 1000], patience=[1, 2], watch=["held-out"]),
    "run": some(
        max_epochs=[1, 2],
        save_every=[1, 2],
        keep_last=[1, 3],
        keep_best=[True, False],
        seed=[0, 7, 2**62],
        profile_steps=[[1], [2, 1]],
    ),
    "parallel": some(
        wrapper=["ddp", "fsdp2", "replicate"],
        tp=[1],
        cp=[1],
        pp=[1],
        reshard_after_forward=[False],
    ),
}
ODD: dict[str, list[Any]] = {
    "model.attention": ["none such"],
    "model.freeze": [["*nobody*"], []],
    "data.text_field": ["text", "body"],
    "data.split": ["test"],
    "data.weight": [2.0],
    "data.pack_tokens": [1, 100],
    "data.max_sample_tokens": [1],
    "data.path": ["nowhere.jsonl", "broken.jsonl"],
    "update.accumulate_dtype": ["float32"],
    "update.memory": ["20GiB", "1KiB", "much"],
    "update.max_microbatch_tokens": [1, 10],
    "optim.name": ["LBFGS", "Muon", "adamw"],
    "optim.options": [{"momentum": 0.9}, {"lr": 1.0}, {"nothing": 1}],
    "optim.cooldown_steps": [1, 60],
    "eval.watch": ["nobody"],
    "parallel.tp": [2],
    "parallel.pp": [2],
    "parallel.dp_shard": [1, 2],
    "parallel.schedule": ["GPipe"],
    "parallel.sequence_parallel": [True],
    "parallel.loss_parallel": [True],
}


@st.composite
def runnable(draw: st.DrawFn) -> Recipe:
    """A recipe of a tiny model on the data of a folder; where to write is left out. Most can be run."""
    found = {section: draw(strategy) for section, strategy in RUNNABLE.items()}
    found["model"]["config"] = draw(st.sampled_from([GPT2, LLAMA]))
    broken = {"path": "broken.jsonl", "broken_rows": "skip"}
    paths = [*[{"path": "good.jsonl"}] * 3, broken, {"path": "pairs.csv"}, {"path": "*.txt"}]
    found["data"] |= draw(st.sampled_from(paths))
    bounds: list[dict[str, Any]] = [
        {"micro_batch_size": 2},
        {"max_microbatch_tokens": 64},
        {"micro_batch_size": 50},
        {},
    ]
    found["update"] |= {"global_batch_size": draw(st.sampled_from([1, 4, 9])), **draw(st.sampled_from(bounds))}
    if draw(st.sampled_from([False, False, True])):
        section, _, key = (name := draw(st.sampled_from([*ODD]))).partition(".")
        found[section][key] = draw(st.sampled_from(ODD[name]))
    return found

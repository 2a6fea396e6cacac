"""Lines: a choice as the recipe and the command line write it."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import tomli_w

from megabatch.train.config import Config
from megabatch.train.plan.asked import Asked
from megabatch.train.plan.rows import Row

MEETING = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500", "--rdzv-id", "megabatch")  # HOST: one of them
Keys = dict[str, dict[str, Any]]  # section → key → value


def keys_of(row: Row, config: Config) -> Keys:
    """Keys of the recipe that choose the row; a microbatch is bounded as the recipe bounds it."""
    choice, in_tokens = row.choice, config.update.max_microbatch_tokens is not None
    bound = (
        ("max_microbatch_tokens", row.microbatch_tokens) if in_tokens else ("micro_batch_size", choice.micro_batch_size)
    )
    keys: Keys = {
        "update": {bound[0]: bound[1], "sync": choice.sync},
        "model": {"activation_checkpointing": choice.recompute},
    }
    return keys if choice.reshard else {**keys, "parallel": {"reshard_after_forward": False}}


def toml_lines(keys: Keys) -> str:
    """The keys in their tables."""
    return tomli_w.dumps(keys).rstrip()


def command_line(keys: Keys, recipe: Path, asked: Asked) -> str:
    """What runs the choice without another line in the recipe; a key that was asked for otherwise is said once."""
    chosen = overrides(keys)
    names = {word.partition("=")[0] for word in chosen}
    others = [word for word in asked.overrides if word.partition("=")[0] not in names]
    return shlex.join([*launcher(asked), "train", str(recipe), *others, *chosen])


def launcher(asked: Asked) -> Sequence[str]:
    """What starts the processes."""
    if asked.world == 1:
        return ["megabatch"]
    most = min(asked.world, asked.device.ranks_per_node)
    per_node = next(number for number in range(most, 0, -1) if asked.world % number == 0)
    per_host = ["--nproc-per-node", str(per_node)]
    hosts = [] if asked.world == per_node else ["--nnodes", str(asked.world // per_node), *MEETING]
    return ["torchrun", *hosts[:2], *per_host, *hosts[2:], "-m", "megabatch"]


def overrides(keys: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The keys as the command line takes them."""
    found: list[str] = []
    for name, value in keys.items():
        key = f"{prefix}{name}"
        is_table = isinstance(value, dict)
        found += overrides(cast(dict[str, Any], value), f"{key}.") if is_table else [f"--{key}={word(value)}"]
    return found


def word(value: object) -> str:
    """A value in lower case, as TOML has true and false."""
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Small data, and what becomes of it on ranks that are only numbers: nothing here needs a process group."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import ByT5Tokenizer

from megabatch.train.config import Config
from megabatch.train.config.contradictions import check_config
from megabatch.train.data.load import Data, load_data
from megabatch.train.data.updates import Updates
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks

CPU = torch.device("cpu")
Ids = tuple[int, ...]


def texts(number: int, seed: int = 0, longest: int = 40) -> list[str]:
    """Texts of very different lengths, no two the same."""
    draw = random.Random(seed)
    return [f"{seed}:{index} " + "x" * draw.randrange(longest) for index in range(number)]


def write_texts(path: Path, lines: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return str(path)


def recipe(folder: Path, **sections: dict[str, Any]) -> Config:
    """A recipe of eight samples an update; sections are merged into it, and tokenized data lies in the folder."""
    given: dict[str, dict[str, Any]] = {
        "model": {"config": {"model_type": "gpt2"}},
        "data": {"cache": str(folder / "cache")},
        "update": {"global_batch_size": 8, "micro_batch_size": 4, "tail": "step"},
        "eval": {"num_samples": 0},
        "run": {"folder": str(folder / "run")},
    }
    return Config.model_validate({key: given.get(key, {}) | sections.get(key, {}) for key in {**given, **sections}})


def load(config: Config, positions: int | None = None) -> Data:
    check_config(config)
    return load_data(config, ByT5Tokenizer(), Ranks(0, 1, CPU), Console(enabled=False, loss_digits=4), positions)


def updates_of(config: Config, rank: int = 0, num_ranks: int = 1, data: Data | None = None) -> Updates:
    return Updates(load(config) if data is None else data, config, Ranks(rank, num_ranks, CPU))


def ids_of(samples: list[dict[str, Any]]) -> list[Ids]:
    """The ids of samples, which tell them apart."""
    return [tuple(sample["input_ids"].tolist()) for sample in samples]


def whole_updates(config: Config, num_ranks: int = 1, data: Data | None = None) -> list[list[Ids]]:
    """Each update of all ranks together, sorted."""
    data = load(config) if data is None else data
    shares = zip(*(updates_of(config, rank, num_ranks, data) for rank in range(num_ranks)), strict=True)
    return [sorted(ids for share in update for ids in ids_of(share)) for update in shares]

"""What each of two real ranks makes of a recipe's data."""

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import ByT5Tokenizer

from megabatch.errors import MegabatchError
from megabatch.train.data.load import load_data
from megabatch.train.data.updates import Updates
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from tests.train.data_for_tests import CPU, ids_of, recipe


def job(name: str) -> Any:
    """``name``: a folder with data.jsonl and own.py, and what of it is read."""
    folder, kind = Path(name).parent, Path(name).name
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), CPU)
    os.environ["RANK_OF_OWN"] = str(ranks.rank)
    data = {
        "plain": {"path": str(folder / "data.jsonl"), "num_workers": 1},
        "stream": {"path": str(folder / "data.jsonl"), "streaming": True},
        "same": {"function": f"{folder / 'own.py'}:same"},
        "different": {"function": f"{folder / 'own.py'}:different"},
    }[kind]
    config = recipe(folder, data=data)
    try:
        loaded = load_data(config, ByT5Tokenizer(), ranks, Console(enabled=False, loss_digits=4))
    except MegabatchError as error:
        return str(error)
    return [ids_of(update) for update in Updates(loaded, config, ranks)]

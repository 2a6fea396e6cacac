"""Errors of context parallelism."""

from typing import Any

import torch
import torch.distributed as dist

from megabatch import LossContractError
from megabatch.batching.context_parallel import GatheredAttention, stretch
from megabatch.batching.stretch_planner import check_weights_of_stretches
from tests.unit.failures.table import Failure

IDS = torch.zeros(1, 4, dtype=torch.long)
WHOLE = {"input_ids": IDS, "labels": IDS}
ATTENTION = "over 1 context"
SHAPE = "input_ids … (1, 4)"

MICROBATCHES: dict[str, tuple[Any, str]] = {
    "a microbatch without ids": ({"x": IDS}, "['x'] … input_ids … [B, T]"),
    "a microbatch that is a list": ([IDS], "input_ids … [B, T]"),
    "labels of samples": (WHOLE | {"labels": IDS[:, 0]}, SHAPE.format("labels", (1,))),
    "a mask of pairs": (WHOLE | {"attention_mask": IDS[:, None]}, SHAPE.format("attention_mask", (1, 1, 4))),
    "positions that are a list": (WHOLE | {"position_ids": [0, 1, 2, 3]}, SHAPE.format("position_ids", "list")),
    "values that a loss may shift": (WHOLE | {"advantages": torch.ones(1, 4)}, "'advantages'"),
    "targets told twice": (WHOLE | {"shift_labels": IDS}, "shift_labels"),
    "no targets": ({"input_ids": IDS}, "['input_ids'] … input_ids"),
    "documents beside a mask": (
        WHOLE | {"attention_mask": IDS + 1, "position_ids": torch.tensor([[0, 1, 0, 1]])},
        "position_ids … attention_mask",
    ),
}


def attend(num_tokens: int, mask: torch.Tensor | None) -> None:
    states = torch.ones(1, 1, num_tokens, 2)
    GatheredAttention(dist.group.WORLD)(states, states, states, mask)


FAILURES = {
    name: Failure(text, lambda microbatch=microbatch: stretch(microbatch, 0, 2))
    for name, (microbatch, text) in MICROBATCHES.items()
} | {
    "labels of a stretch": Failure("cut over ranks", lambda: stretch(WHOLE, 0, 2)["labels"], LossContractError),
    "a weight of samples": Failure(
        "counts 1 in … and 2 in … their 2 stretches",
        lambda: check_weights_of_stretches(WHOLE, lambda microbatch: len(microbatch["input_ids"]), 2),
        LossContractError,
    ),
}
IN_A_GROUP = {  # that need a process group
    "attention to a whole microbatch": Failure(ATTENTION.format(4, None), lambda: attend(4, None)),
    "a mask of another length": Failure(ATTENTION.format(4, (1, 1, 1, 3)), lambda: attend(4, torch.ones(1, 1, 1, 3))),
    "an odd number of positions": Failure(ATTENTION.format(3, (1, 1, 1, 3)), lambda: attend(3, torch.ones(1, 1, 1, 3))),
}

"""What context parallelism refuses."""

from typing import Any

import torch
import torch.distributed as dist

from megabatch import LossContractError, PlanError
from megabatch.batching.context_parallel import GatheredAttention, stretch
from megabatch.engine.call import check_weights_of_stretches
from tests.unit.failures.table import Failure

IDS = torch.zeros(1, 4, dtype=torch.long)
WHOLE = {"input_ids": IDS, "labels": IDS}
ATTENTION = (
    "attention over 1 context ranks was given {} positions and a mask of shape {}; call the model with what a stretch "
    "of a microbatch holds, its attention_mask included"
)
SHAPE = (
    "{} has the shape {} and input_ids (1, 4); context parallelism cuts both along the sequence: give them one shape"
)

MICROBATCHES: dict[str, tuple[Any, str]] = {
    "a microbatch without ids": (
        {"x": IDS},
        "the microbatch has ['x'], without input_ids [B, T], and context parallelism cuts sequences; give input_ids, "
        "or a mesh without cp",
    ),
    "a microbatch that is a list": (
        [IDS],
        "the microbatch is a list, without input_ids [B, T], and context parallelism cuts sequences; give input_ids, "
        "or a mesh without cp",
    ),
    "labels of samples": (WHOLE | {"labels": IDS[:, 0]}, SHAPE.format("labels", (1,))),
    "a mask of pairs": (WHOLE | {"attention_mask": IDS[:, None]}, SHAPE.format("attention_mask", (1, 1, 4))),
    "positions that are a list": (WHOLE | {"position_ids": [0, 1, 2, 3]}, SHAPE.format("position_ids", "list")),
    "values that a loss may shift": (
        WHOLE | {"advantages": torch.ones(1, 4)},
        "'advantages' runs along the sequence, and a loss that shifts it would lose values where context parallelism "
        "cuts; shift it in the data, its entry t for position t, and name it 'shift_advantages'",
    ),
    "targets told twice": (
        WHOLE | {"shift_labels": IDS},
        "the microbatch has labels and shift_labels, which say the same; give one of them",
    ),
    "no targets": (
        {"input_ids": IDS},
        "the microbatch has ['input_ids'] and no targets, and a loss that shifts input_ids would lose some where "
        "context parallelism cuts; give labels, -100 where there is none",
    ),
    "documents beside a mask": (
        WHOLE | {"attention_mask": IDS + 1, "position_ids": torch.tensor([[0, 1, 0, 1]])},
        "position_ids begin anew within a row that has an attention_mask, with which its documents would attend to "
        "each other; leave attention_mask out: padding on the right needs none",
    ),
}


def attend(num_tokens: int, mask: torch.Tensor | None) -> None:
    states = torch.ones(1, 1, num_tokens, 2)
    GatheredAttention(dist.group.WORLD)(states, states, states, mask)


FAILURES = {
    name: Failure(PlanError, text, lambda microbatch=microbatch: stretch(microbatch, 0, 2))
    for name, (microbatch, text) in MICROBATCHES.items()
} | {
    "labels of a stretch": Failure(
        LossContractError,
        "labels is not in a stretch of a sequence that is cut over ranks; read shift_labels [B, T], whose entry t is "
        "what position t predicts",
        lambda: stretch(WHOLE, 0, 2)["labels"],
    ),
    "a weight of samples": Failure(
        LossContractError,
        "weigh counts 1 in whole sequences and 2 in their 2 stretches; under cp count positions (of shift_labels, "
        "say), not samples, which every rank sees",
        lambda: check_weights_of_stretches(WHOLE, lambda microbatch: len(microbatch["input_ids"]), 2),
    ),
}
IN_A_GROUP = {  # that need a process group
    "attention to a whole microbatch": Failure(PlanError, ATTENTION.format(4, None), lambda: attend(4, None)),
    "a mask of another length": Failure(
        PlanError, ATTENTION.format(4, (1, 1, 1, 3)), lambda: attend(4, torch.ones(1, 1, 1, 3))
    ),
    "an odd number of positions": Failure(
        PlanError, ATTENTION.format(3, (1, 1, 1, 3)), lambda: attend(3, torch.ones(1, 1, 1, 3))
    ),
}

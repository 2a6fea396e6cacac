"""Degrees become a mesh and a share of the samples, or one line that says what to change."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from megabatch import MegabatchError
from megabatch.train.config import ParallelConfig
from megabatch.train.config.parallel_layout import Layout, layout_of
from megabatch.train.parallel.wrap import SHARD_FROM_PARAMETERS, choose_wrapper
from megabatch.train.runtime.ranks import Ranks
from tests.unit.failures.table import line_of, names

CPU = torch.device("cpu")
REFUSED: list[tuple[int, dict[str, Any], str]] = [  # ranks, [parallel], what the error names
    (1, {"tp": 2}, "parallel.tp is 2 and there is 1 process; take a multiple of 2"),
    (8, {"tp": 3}, "parallel.tp is 3 and there are 8 processes; take a multiple of 3"),
    (2, {"tp": 2, "cp": 2}, "parallel.cp x tp is 2 x 2 = 4 and there are 2 processes; take a multiple of 4"),
    (8, {"dp_replicate": 2, "dp_shard": 2}, "dp_replicate x dp_shard is 2 x 2 = 4 and there are 8 processes; take 4"),
    (2, {"dp_replicate": 1, "dp_shard": 1}, "dp_replicate x dp_shard is 1 x 1 = 1 and there are 2"),
    (4, {"pp": 2, "wrapper": "ddp", "schedule": "ZBVZeroBubble"}, '"ddp" … "ZBVZeroBubble" … set the wrapper'),
    (4, {"pp": 2, "stages_per_rank": 3}, 'stages_per_rank is 3 and parallel.schedule "1F1B" has 1 on each … leave'),
    (4, {"pp": 2, "stages_per_rank": 3, "schedule": "DualPipeV"}, 'stages_per_rank is 3 … "DualPipeV" has 2 on each'),
    (4, {"wrapper": "ddp", "dp_shard": 2}, '"ddp" … parallel.dp_shard is'),
    (4, {"wrapper": "replicate", "dp_replicate": 2}, '"replicate", which shards nothing, and'),
    (1, {"ep": 2}, "parallel.ep is 2 and 1 rank has the shards of the model (parallel.dp_shard), which it must divide"),
    (8, {"ep": 4, "dp_replicate": 4}, "parallel.ep is 4 and 2 ranks have the shards of the model (parallel.dp_shard)"),
    (4, {"wrapper": "fsdp2", "dp_replicate": 4}, '"fsdp2" and parallel.dp_replicate 4 leaves'),
]


@pytest.mark.parametrize(("num_ranks", "keys", "seen"), REFUSED)
def test_a_layout_that_cannot_be_is_one_line(num_ranks: int, keys: dict[str, Any], seen: str) -> None:
    said = line_of(lambda: layout_of(ParallelConfig(**keys), num_ranks))
    assert names(said, seen), said


@pytest.mark.parametrize(
    ("num_ranks", "keys", "wrapper", "degrees"),
    [
        (1, {}, "plain", (1, 1)),
        (3, {}, "ddp", (3, 1)),
        (4, {"wrapper": "fsdp2"}, "fsdp2", (1, 4)),
        (4, {"dp_replicate": 2}, "fsdp2", (2, 2)),
        (4, {"dp_shard": 2}, "fsdp2", (2, 2)),
        (4, {"dp_shard": 4}, "fsdp2", (1, 4)),
        (4, {"dp_replicate": 4}, "ddp", (4, 1)),
        (2, {"tp": 2}, "plain", (1, 1)),
        (8, {"tp": 2}, "replicate", (4, 1)),
        (8, {"tp": 2, "dp_shard": 2}, "fsdp2", (2, 2)),
        (8, {"tp": 2, "wrapper": "fsdp2", "dp_replicate": 2}, "fsdp2", (2, 2)),
        (2, {"cp": 2}, "replicate", (1, 1)),
        (2, {"pp": 2}, "plain", (1, 1)),
        (4, {"pp": 2, "tp": 2}, "plain", (1, 1)),
        (4, {"pp": 2}, "replicate", (2, 1)),
        (8, {"pp": 2, "dp_shard": 2}, "fsdp2", (2, 2)),
        (8, {"pp": 2, "tp": 2, "dp_shard": 2}, "fsdp2", (1, 2)),
        (4, {"pp": 2, "wrapper": "ddp"}, "ddp", (2, 1)),
        (4, {"ep": 2}, "fsdp2", (1, 4)),
        (8, {"ep": 2, "dp_replicate": 2}, "fsdp2", (2, 4)),
    ],
)
def test_what_is_left_open_follows(
    num_ranks: int, keys: dict[str, Any], wrapper: str, degrees: tuple[int, int]
) -> None:
    parallel = ParallelConfig(**keys)
    layout = layout_of(parallel, num_ranks)
    chosen = choose_wrapper(parallel.wrapper, num_ranks, nn.Linear(2, 2), layout)
    assert chosen.name == wrapper
    assert layout.data_degrees(chosen.name, num_ranks) == degrees


def test_a_large_model_is_sharded_unless_the_degrees_say_copies() -> None:
    with torch.device("meta"):
        large = nn.Linear(SHARD_FROM_PARAMETERS // 1000, 1000)
    assert choose_wrapper(None, 8, large, Layout(tp=2)).name == "fsdp2"
    assert choose_wrapper(None, 8, large, Layout(dp_replicate=4, tp=2)).name == "replicate"


def test_a_wrapper_of_ones_own_is_held_to_the_degrees_too() -> None:
    with pytest.raises(MegabatchError, match=r"^parallel.wrapper is \"ddp\", which shards nothing"):
        choose_wrapper("ddp", 4, nn.Linear(2, 2), Layout(dp_shard=2))


def at(layout: Layout, num_ranks: int, read: Callable[[Ranks], Any]) -> list[Any]:
    return [read(Ranks(rank, num_ranks, CPU, layout)) for rank in range(num_ranks)]


def test_ranks_along_model_axes_share_their_samples() -> None:
    """The mesh is pp x dp x cp x tp, the last axis innermost: 2 x 2 x 2 x 2 of 16 ranks."""
    layout = Layout(cp=2, tp=2, pp=2)
    places = list(product(range(2), repeat=4))  # (pp, dp, cp, tp) of each rank
    assert at(layout, 16, lambda ranks: ranks.dp_degree) == [2] * 16
    assert at(layout, 16, lambda ranks: ranks.dp_rank) == [dp for _, dp, _, _ in places]
    assert at(layout, 16, lambda ranks: layout.cp_rank(ranks.rank)) == [cp for _, _, cp, _ in places]
    assert at(layout, 16, lambda ranks: ranks.pp_rank) == [pp for pp, *_ in places]
    assert at(layout, 16, lambda ranks: ranks.is_counted) == [pp == tp == 0 for pp, _, _, tp in places]


def test_random_numbers_differ_where_tokens_or_layers_do() -> None:
    layout = Layout(cp=2, tp=2, pp=2)
    seeds = at(layout, 16, lambda ranks: ranks.seed(7, 1))
    own = {place: seeds[2 * index] for index, place in enumerate(product(range(2), repeat=3))}  # (pp, dp, cp)
    assert len(set(own.values())) == 8
    assert seeds == [own[pp, dp, cp] for pp, dp, cp, _ in product(range(2), repeat=4)]


def test_without_degrees_every_rank_sees_samples_of_its_own() -> None:
    alone = at(Layout(), 3, lambda ranks: (ranks.dp_rank, ranks.dp_degree, ranks.is_counted))
    assert alone == [(0, 3, True), (1, 3, True), (2, 3, True)]
    assert at(Layout(), 3, lambda ranks: ranks.seed(5)) == at(Layout(dp_shard=3), 3, lambda ranks: ranks.seed(5))

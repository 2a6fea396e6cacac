"""How a set is cut for its evaluation, where all logits of a microbatch are made at once."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch.train.callbacks.evaluation import MOST_LOGITS, most_tokens, split_set
from megabatch.train.config import UpdateConfig
from megabatch.train.runtime.ranks import Ranks
from tests.train.jobs import CPU, Tiny

ALONE = Ranks(0, 1, CPU)


@pytest.mark.parametrize(
    ("update", "chosen", "most", "expected"),
    [
        ({"micro_batch_size": 3}, None, None, [3, 3]),
        ({"micro_batch_size": 3}, None, 20, [2, 2, 2]),
        ({"micro_batch_size": 3}, None, 5, [1] * 6),  # a sample that is longer goes alone
        ({"max_microbatch_tokens": 40}, None, None, [4, 2]),
        ({"max_microbatch_tokens": 40}, None, 20, [2, 2, 2]),
        ({"max_microbatch_tokens": 40}, None, 100, [4, 2]),
        ({"max_microbatch_tokens": "auto"}, 40, 20, [2, 2, 2]),
        ({"max_microbatch_tokens": "auto"}, 40, 5, [1] * 6),
    ],
)
def test_where_all_logits_are_made_fewer_tokens_are_taken_at_once(
    update: dict[str, Any], chosen: int | None, most: int | None, expected: list[int]
) -> None:
    samples = [{"input_ids": torch.arange(10)}] * 6
    found = split_set(samples, UpdateConfig(global_batch_size=4, **update), ALONE, chosen, most)
    assert sorted(map(len, found.microbatches), reverse=True) == expected


def test_the_most_tokens_are_those_of_so_many_logits() -> None:
    config = LlamaConfig(
        vocab_size=2**16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with torch.device("meta"):
        assert most_tokens(nn.Sequential(LlamaForCausalLM(config))) == MOST_LOGITS // 2**16 == 4096
    assert most_tokens(Tiny()) is None

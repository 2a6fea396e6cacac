"""Utilization: the arithmetic of a model, the peaks of devices, and the memory of the fullest rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from megabatch import Plan
from megabatch.simulate import DEVICES
from megabatch.train.parallel.utilization import Arithmetic, arithmetic_of, known_device, utilization_of
from megabatch.train.records.metrics import Sums, gather_sums, memory_gib
from megabatch.train.runtime.ranks import Ranks
from tests.train.on_ranks import on_ranks

LLAMA = LlamaConfig(
    vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g"), ("NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"), ("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 PCIe", None), ("NVIDIA H200 NVL", None), ("NVIDIA GB200", None), ("a CPU", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)  # fmt: skip
def test_a_device_is_known_by_its_whole_name(name: str, known: str | None) -> None:
    assert known_device(name) == (None if known is None else DEVICES[known])


def test_mfu_counts_as_palm_does() -> None:
    model: Any = AutoModelForCausalLM.from_config(LLAMA)
    utilization = utilization_of(arithmetic_of(model), DEVICES["h100-80g"], torch.bfloat16)
    layer = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16
    computed = 3 * layer + 16 + 50 * 16  # the head, and not the input embedding
    flops = 6 * computed + 12 * 3 * 16 * 128
    assert utilization.mfu(1e9, 128) == pytest.approx(1e9 * flops / 989e12)
    assert utilization.words == "h100-80g's 989 TFLOP/s in bfloat16"
    model.model.requires_grad_(False)  # the head is trained
    frozen = arithmetic_of(model)
    assert isinstance(frozen, Arithmetic)
    assert frozen.flops_per_token(0) == 6 * 50 * 16 + 4 * (3 * layer + 16)


def test_where_there_is_no_mfu_a_line_says_why() -> None:
    model: Any = AutoModelForCausalLM.from_config(LLAMA)
    on_cpu = utilization_of(arithmetic_of(model), torch.device("cpu"), torch.float32)
    assert (on_cpu.mfu(1e9, 9), on_cpu.words) == (None, "no MFU: the peak of a CPU is not known")
    unknown = utilization_of(arithmetic_of(torch.nn.Linear(2, 2)), DEVICES["h200"], torch.bfloat16)
    assert (unknown.mfu(1e9, 9), unknown.words) == (None, "no MFU: a Linear is no model of transformers")
    mixture: Any = AutoModelForCausalLM.from_config(
        MixtralConfig(
            vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2,
        )
    )  # fmt: skip
    words = utilization_of(arithmetic_of(mixture), DEVICES["h200"], torch.float32).words
    assert words == "no MFU: a token computes with some of the experts"


def fullest(ranks: Ranks) -> tuple[list[float], Sums]:
    """Gather what ranks have used, of which rank 1 has used the most, one by one and as sums."""
    used = torch.ones(60_000_000) if ranks.rank == 1 else torch.ones(1)
    memories = ranks.gather(memory_gib(ranks.device))
    plan = Plan(((0,), (1,)), (4, 6))
    del used
    return memories, gather_sums(plan, ranks)


def test_the_memory_of_a_row_is_that_of_the_fullest_rank(tmp_path: Path) -> None:
    for memories, sums in on_ranks(3, tmp_path, fullest):
        assert sums.memory_gib == pytest.approx(max(memories), rel=0.05)
        assert sums.memory_gib > 1.2 * memories[0]
        assert (sums.padded_tokens, sums.num_split) == (30, 0)
        assert len(set(sums.predicted)) == 1

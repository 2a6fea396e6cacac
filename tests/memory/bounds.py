"""Bounds under a cap, against what an update then takes: models of three kinds, in three wrappers.

A job is "model:wrapper:world:". Memory is counted as torch's allocator gives it out, in the real update.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import megabatch
from megabatch import GradientAccumulator, losses
from megabatch.autotune.memory import measure_budget, measure_memory
from megabatch.core.mesh import DataRanks
from megabatch.planners import Auto
from megabatch.planning import limits
from megabatch.planning.limits import TunedLimit
from tests.exact.wrappers import wrap

MIB = 2**20
CPU = torch.device("cpu")
Sample = dict[str, Tensor]


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    samples: Callable[[int, int], list[Sample]]  # of a rank, so many
    loss_fn: Any
    num_samples: int
    spare_bytes: int  # of the cap, beyond what the process has before


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2000, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=1500, n_embd=96, n_layer=3, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0
        )
    )  # fmt: skip


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 32, 3, stride=2, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def texts(rank: int, number: int) -> list[Sample]:
    """Samples of many lengths; the longest of all is on the last rank."""
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(8, 57 + 4 * rank, (number,), generator=generator).tolist()
    ids = [torch.randint(1, 1500, (length,), generator=generator) for length in lengths]
    return [{"input_ids": each, "labels": each} for each in ids]


def images(rank: int, number: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(rank)
    return [{"x": torch.randn(3, 24, 24, generator=generator), "label": torch.tensor(3)} for _ in range(number)]


@megabatch.loss(weigh=lambda microbatch: len(microbatch["label"]))
def image_loss(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
    labels = microbatch["label"]
    return nn.functional.cross_entropy(model(microbatch["x"]), labels, reduction="sum"), len(labels)


CASES = {
    "llama": Case(llama, texts, losses.next_token, 48, 64 * MIB),
    "gpt2": Case(gpt2, texts, losses.next_token, 48, 40 * MIB),
    "convolutions": Case(convolutions, images, image_loss, 160, 32 * MIB),
}


class Run:
    """A model that is trained under a cap, its bound chosen from this rank's uneven share.

    What it takes is seen with samples as long as the longest, whose microbatches come as near to a bound as any.
    """

    def __init__(self, case: Case, wrapper: str) -> None:
        torch.manual_seed(0)
        self.case, self.model = case, wrap(case.model(), wrapper)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = case.samples(dist.get_rank(), case.num_samples - 8 * dist.get_rank())

    def chosen(self) -> TunedLimit:
        cap = measure_budget(CPU, None, DataRanks()).used + self.case.spare_bytes
        gradient = GradientAccumulator(self.model, planner=Auto(memory_bytes=int(cap)))
        gradient.reserve_for(self.optimizer)
        with patch.object(limits, "LEAST_GAIN", -math.inf):  # memory alone is to end the search
            gradient.tune(self.batch, self.case.loss_fn)
        assert gradient.fit is not None
        return gradient.fit

    def taken(self, max_microbatch_tokens: int, longest_tokens: int) -> float:
        """The peak memory of an update: its samples, gradients and microbatches."""
        samples = [max(self.batch, key=length_of)] * len(self.batch)
        if length_of(samples[0]) < longest_tokens:  # that of another rank
            samples = [{name: value.new_ones(longest_tokens) for name, value in samples[0].items()}] * len(samples)
        gradient = GradientAccumulator(self.model, max_microbatch_tokens=max_microbatch_tokens)
        self.optimizer.zero_grad()
        with measure_memory(CPU) as needed:
            gradient.forward_backward(samples, self.case.loss_fn)
        gradient.finalize()
        self.optimizer.step()
        return needed.peak_bytes


def length_of(sample: Sample) -> int:
    return len(next(iter(sample.values())))


def run_job(name: str) -> dict[str, Any]:
    kind, wrapper, *_ = name.split(":")
    run = Run(CASES[kind], wrapper)
    fit = run.chosen()
    bound, longest = fit.max_microbatch_tokens, fit.longest_tokens
    larger = max(int(bound * 1.1), bound + longest)  # the least that holds one sample more
    taken = {tokens: run.taken(tokens, longest) for tokens in (bound, larger)}
    return {
        "bound": bound, "rows": bound // longest, "allowed": fit.allowed_bytes,
        "taken": taken[bound], "taken_by_larger": taken[larger], "measured": [each.rows for each in fit.measured],
    }  # fmt: skip

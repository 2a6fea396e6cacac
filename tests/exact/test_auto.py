"""The bound is chosen once for all ranks, and training goes on as if nothing had been measured: the same bits."""

import ctypes
import gc
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megabatch
from megabatch import GradientAccumulator
from megabatch.autotune.memory import resident_bytes
from megabatch.planners import Auto, Tokens
from tests.exact.launch import of_ranks
from tests.exact.spikes import Spikes
from tests.exact.wrappers import WRAPPERS, Wrapped, mesh_of, wrap
from tests.tiers import some

NUM_UPDATES = 3
VOCABULARY, WIDTH, LONGEST = 64, 48, 40
SPARE_BYTES = 8 * 2**20  # beyond what the process has


class NoisyLM(nn.Module):
    """All that a measured microbatch could move: dropout, batch norm, a counter in a buffer that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)])
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("num_calls", torch.zeros(1))

    def encode(self, input_ids: Tensor) -> Tensor:
        self.num_calls = self.num_calls + 1
        if self.num_calls == 3:
            self.dropout.eval()
        hidden = self.embedding(input_ids)  # [B, T, H]
        hidden = self.blocks[1](torch.relu(self.blocks[0](self.dropout(hidden))))
        return self.norm(hidden.flatten(0, 1)).view_as(hidden)

    def decode(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.decode(self.encode(input_ids))  # [B, T, V]


@megabatch.loss(weigh=lambda microbatch: (microbatch["labels"] != -100).sum())
def loss_fn(model: Any, microbatch: Any) -> tuple[Tensor, Tensor]:
    logits, labels = model(microbatch["input_ids"]), microbatch["labels"]
    random.random()
    np.random.random()
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def update(step: int, rank: int, world: int) -> list[dict[str, Tensor]]:
    """Uneven shares of samples of uneven length; the longest is on the last rank, and the first has none in step 1."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    num_samples = 0 if step == 1 and rank == 0 and world > 1 else 700 + 20 * rank
    lengths = torch.randint(3, LONGEST - 4 + rank, (num_samples,), generator=generator).tolist()
    ids = [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]
    return [{"input_ids": each, "labels": each} for each in ids]


def model_in(wrapper: str) -> Wrapped:
    torch.manual_seed(0)
    return wrap(NoisyLM(), wrapper)


def trained(wrapper: str, sync: str, planner: Auto | Tokens) -> tuple[dict[str, Any], GradientAccumulator]:
    """Train a model for a few updates, with dropout."""
    model = model_in(wrapper)
    models = model if isinstance(model, list) else [model]
    optimizer = torch.optim.SGD([each for one in models for each in one.parameters()], lr=0.1, momentum=0.9)
    rank, world = dist.get_rank(), dist.get_world_size()
    axes = WRAPPERS[wrapper].axes(world)
    dp_rank = rank // axes.get("tp", 1)
    mesh = mesh_of(wrapper, world) if WRAPPERS[wrapper].needs_mesh else None
    gradient = GradientAccumulator(model, sync=sync, mesh=mesh, planner=planner)
    gradient.reserve_for(optimizer)
    torch.manual_seed(dp_rank)
    random.seed(1)
    np.random.seed(1)
    found: dict[str, Any] = {}
    for step in range(NUM_UPDATES):
        gradient.forward_backward(update(step, dp_rank, world // axes.get("tp", 1)), loss_fn)
        gradient.finalize(max_norm=1.0)
        found |= {f"gradient {step} {name}": _local(each.grad) for name, each in _parameters(models)}
        optimizer.step()
    found |= {f"parameter {name}": _local(each.data) for name, each in _parameters(models)}
    found |= {f"buffer {name}": each for one in models for name, each in one.named_buffers()}
    found["torch's random numbers"], found["others"] = (
        torch.rand(3),
        torch.tensor([random.random(), np.random.random()]),
    )
    found["training"] = torch.tensor([module.training for one in models for module in one.modules()])
    return found, gradient


def run_job(name: str) -> dict[str, Any]:
    wrapper, _, sync = name.split(":")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(
        0
    )  # what earlier jobs of this process took is given back, and is no room for this one
    cap = int(resident_bytes()) + SPARE_BYTES
    moved, gradient = trained(wrapper, sync, Auto(memory_bytes=cap))
    fit = gradient.fit
    assert fit is not None
    expected, _ = trained(wrapper, sync, Tokens(fit.max_microbatch_tokens, fit.cost))
    differ = [key for key, value in expected.items() if not _same(value, moved[key])]
    plan = gradient.last_plan
    return {
        "bound": fit.max_microbatch_tokens, "longest": fit.longest_tokens, "differ": differ, "compared": len(expected),
        "measured": [each.rows for each in fit.measured], "microbatches": plan and plan.num_microbatches,
    }  # fmt: skip


def run_measured(name: str) -> dict[str, Any]:
    """Measure each rank's own cost in its updates, and make the same updates with the splits that came of it."""
    wrapper, world, _ = name.split(":")
    runs: list[list[Tensor | None]] = []
    plans: list[Any] = []
    for cost in ("measure", None):
        model = model_in(wrapper)
        torch.manual_seed(dist.get_rank())
        gradient = GradientAccumulator(model, planner=Tokens(400, cost))
        runs.append([])
        for step in range(5):
            batch = update(step, dist.get_rank(), int(world))[: (14, 40)[step % 2] + dist.get_rank()]
            gradient.forward_backward(batch, loss_fn, plan=None if cost else plans[step])
            gradient.finalize()
            if cost:  # with microbatches that were cut smaller in place of dummies
                plans.append(gradient.last_plan)
            runs[-1] += [_local(each.grad) for _, each in _parameters([model])]
    return {
        "predicted": [plan.seconds is not None for plan in plans if plan.lengths],
        "differ": [index for index, pair in enumerate(zip(*runs, strict=True)) if not _same(*pair)],
        "compared": len(runs[0]),
    }


def run_short(name: str) -> dict[str, Any]:
    """Run out of memory on rank 1, in the microbatch of eight rows that is measured."""
    wrapper, world, _ = name.split(":")
    module = NoisyLM()
    Spikes(module, ("embedding",)).set({4: ("forward", 0)} if dist.get_rank() == int(world) - 1 else {})
    torch.manual_seed(0)
    model = wrap(module, wrapper)
    gradient = GradientAccumulator(model)
    gradient.forward_backward(update(0, dist.get_rank(), int(world)), loss_fn)
    gradient.finalize()
    fit = gradient.fit
    assert fit is not None
    rows = [each.rows for each in fit.measured]
    return {"bound": fit.max_microbatch_tokens, "longest": fit.longest_tokens, "rows": rows}


def run_grown(name: str) -> list[int]:
    """Give one rank samples that are longer than any before, in two calls; return the longest that is known after each.

    The last sample is longer than the limit too.
    """
    wrapper, world, _ = name.split(":")
    gradient = GradientAccumulator(model_in(wrapper), max_microbatch_tokens="auto")
    found: list[int] = []
    for step, longest in enumerate((0, LONGEST + 1, 0, 200 * LONGEST)):
        batch = update(0, dist.get_rank(), int(world))[:9]
        if longest and dist.get_rank() == step % int(world):
            ids = torch.arange(longest) % VOCABULARY
            batch.append({"input_ids": ids, "labels": ids})
        gradient.forward_backward(batch, loss_fn)
        gradient.finalize()
        assert gradient.fit is not None
        found.append(gradient.fit.longest_tokens)
    return found


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _local(tensor: Any) -> Tensor | None:
    return None if tensor is None else getattr(tensor, "to_local", lambda: tensor)().detach().clone()


def _parameters(models: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [(f"{index} {name}", each) for index, one in enumerate(models) for name, each in one.named_parameters()]


JOBS = [
    "plain:1:auto", "plain:2:auto", "plain:3:auto", "ddp:2:auto", "ddp:3:auto", "ddp:2:every", "ddp-find-unused:2:auto",
    "ddp-bucket-view:2:auto", "fsdp2:1:auto", "fsdp2:2:auto", "fsdp2:3:auto", "fsdp2:2:last", "hsdp:2:auto",
    "replicate:2:auto", "tp:2:auto", "fsdp1:2:auto", "fsdp1:2:last",
]  # fmt: skip
results = of_ranks("tests.exact.test_auto:run_job", JOBS)
GROWN = ["plain:1:", "ddp:2:", "fsdp2:2:", "plain:3:"]
grown = of_ranks("tests.exact.test_auto:run_grown", GROWN)
MEASURED = ["plain:1:", "plain:2:", "plain:3:", "ddp:2:", "fsdp2:2:", "fsdp2:3:"]
measured = of_ranks("tests.exact.test_auto:run_measured", MEASURED)
SHORT = ["plain:2:", "ddp:2:", "plain:3:"]
shorts = of_ranks("tests.exact.test_auto:run_short", SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("job", some(JOBS, 6))
def test_same_bits_and_the_same_bound_on_every_rank(results, job: str) -> None:
    values = results(job)
    for value in values:
        assert not value["differ"]
        assert value["compared"] > 20
    assert len({value["bound"] for value in values}) == len({value["microbatches"] for value in values}) == 1
    assert values[0]["microbatches"] > 1, "the cap is to cut"
    assert values[0]["measured"][:2] == [1, 8]
    assert values[0]["longest"] == max(value["longest"] for value in values) <= LONGEST


@pytest.mark.slow
@pytest.mark.parametrize("job", some(GROWN, 2))
def test_a_longer_sample_of_one_rank_is_measured_on_all(grown, job: str) -> None:
    values = grown(job)
    assert all(value == values[0] for value in values)
    assert values[0][1:] == [LONGEST + 1, LONGEST + 1, 200 * LONGEST]


@pytest.mark.slow
@pytest.mark.parametrize("job", some(SHORT, 1))
def test_what_one_rank_has_no_memory_for_fits_on_none_and_no_rank_leaves(shorts, job: str) -> None:
    values = shorts(job)
    assert len({value["bound"] for value in values}) == 1
    assert values[0]["rows"][:2] == [1, 7]
    assert values[0]["bound"] <= 8 * values[0]["longest"]


@pytest.mark.slow
@pytest.mark.parametrize("job", some(MEASURED, 2))
def test_a_measured_cost_decides_the_split_of_its_rank_and_nothing_else(measured, job: str) -> None:
    for value in measured(job):
        assert value["compared"] >= 4
        assert not value["differ"]
        assert value["predicted"][-1], "a cost was measured"

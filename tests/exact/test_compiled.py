"""torch.compile and recomputation: the same gradients, nothing compiled twice, no collective more."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import megabatch
from megabatch import GradientAccumulator
from tests.comm.counting import Collectives
from tests.exact import harness, models, oracle
from tests.exact.launch import of_ranks
from tests.tiers import some

LENGTH, MICRO_BATCH_SIZE = 6, 2
# Samples of each rank, update by update: ranks with fewer microbatches run dummies, and their numbers change.
UPDATES = [(4, 4), (8, 2), (2, 6), (6, 4)]
WRAPPERS = {
    "plain": ("auto",),
    "ddp": ("last", "every"),
    "ddp-outside": ("last", "every"),  # compile(DDP(model)); the former is DDP(compile(model))
    "fsdp2": ("every", "last"),
    "fsdp2-outside": ("every",),
}


class Counting:
    """A backend that runs a graph as it is and counts how many it was given."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.num_graphs += 1
        return graph.forward


class Block(nn.Module):
    """A layer in a module of its own: torch compiles no frame of nn.Linear's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden) * 1.0


def new_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    model = models.integer_model("tokens").to(dtype)
    model.blocks = nn.ModuleList(map(Block, model.blocks))
    return model


def samples(seed: int, num_samples: int) -> list[oracle.Sample]:
    generator = torch.Generator().manual_seed(seed)
    return [_sample(generator) for _ in range(num_samples)]


def _sample(generator: torch.Generator) -> oracle.Sample:
    ids = torch.randint(0, models.VOCABULARY, (LENGTH,), generator=generator)
    return {"input_ids": ids, "y": torch.randint(-3, 4, (LENGTH,), generator=generator)}


def sums(model: nn.Module, batch: oracle.Sample) -> oracle.Sums:
    errors = model(batch["input_ids"]) - batch["y"]
    return {"loss": (errors.square().sum(), torch.tensor(float(errors.numel())))}


def loss_fn() -> Callable[..., Any]:
    return megabatch.loss(weigh=lambda microbatch: microbatch["y"].numel())(lambda *args: sums(*args)["loss"])


def wrap(model: nn.Module, wrapper: str, backend: Any) -> nn.Module:
    if wrapper in ("plain", "ddp"):
        compiled = torch.compile(model, backend=backend)
        return compiled if wrapper == "plain" else DistributedDataParallel(compiled)
    if wrapper == "ddp-outside":
        return torch.compile(DistributedDataParallel(model), backend=backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for block in models.blocks(model):
        if wrapper == "fsdp2":
            block.compile(backend=backend)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return torch.compile(model, backend=backend) if wrapper == "fsdp2-outside" else model


def plain_name(name: str) -> str:
    wrappers = ("_orig_mod", "module", "_checkpoint_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def worst(model: nn.Module, reference: nn.Module, given: list[oracle.Sample]) -> float:
    """The worst parameter's error of the gradients that are there."""
    oracle.answer(reference, sums, given)
    found = {plain_name(name): each for name, each in model.named_parameters()}
    expected = {name: each.grad for name, each in reference.named_parameters()}
    return oracle.worst_error(harness.full_gradients(found), expected)[0]


def run_job(name: str) -> dict[str, Any]:
    """The job "what:its name"."""
    what, _, rest = name.partition(":")
    return {"compile": recompilation_job, "inductor": inductor_job, "recompute": recompute_job}[what](rest)


def recompilation_job(name: str) -> dict[str, Any]:
    """The job "wrapper:sync": graphs after each update, and the worst error of its gradients."""
    wrapper, sync = name.split(":")
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about gloo
        backend, rank = Counting(), dist.get_rank()
        model = wrap(new_model(), wrapper, backend)
        gradient = GradientAccumulator(model, micro_batch_size=MICRO_BATCH_SIZE, sync=sync)
        graphs, errors = [], []
        for number, shares in enumerate(UPDATES):
            batch = samples(10 * number + rank, shares[rank])
            gradient.forward_backward(batch, loss_fn())
            assert gradient.finalize().finite
            graphs.append(backend.num_graphs)
            whole = [each for other, size in enumerate(shares) for each in samples(10 * number + other, size)]
            errors.append(worst(model, new_model(), whole))
    return {"graphs": graphs, "errors": errors}


def inductor_job(name: str) -> dict[str, Any]:
    """The job "wrapper:sync": a float32 model that inductor has compiled."""
    wrapper, sync = name.split(":")
    torch._dynamo.reset()
    rank = dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = wrap(new_model(torch.float32), wrapper, "inductor")
        gradient = GradientAccumulator(model, micro_batch_size=MICRO_BATCH_SIZE, sync=sync)
        errors = []
        for number, shares in enumerate(UPDATES[:2]):
            shares = shares[: dist.get_world_size()]
            gradient.forward_backward(samples(10 * number + rank, shares[rank]), loss_fn())
            gradient.finalize()
            whole = [each for other, size in enumerate(shares) for each in samples(10 * number + other, size)]
            errors.append(worst(model, new_model(), whole))
    return {"errors": errors, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


def recompute_job(name: str) -> dict[str, Any]:
    """The job "sync": gradients and collectives of FSDP2 blocks that recompute, beside those that do not."""
    rank, found = dist.get_rank(), {}
    for recompute in (False, True):
        model = models.gpt2()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        for number, block in enumerate(models.blocks(model)):
            if recompute:
                model.transformer.h[number] = checkpoint_wrapper(block)  # use_reentrant=False
            fully_shard(model.transformer.h[number], mesh=mesh)
        fully_shard(model, mesh=mesh)
        gradient = GradientAccumulator(model, micro_batch_size=MICRO_BATCH_SIZE, sync=name)
        counted: list[dict[str, int]] = []
        for _ in range(2):
            with Collectives() as collectives:
                gradient.forward_backward(_language(rank), megabatch.losses.next_token)
                assert gradient.finalize().finite
            counted.append(collectives.table())
        found[recompute] = counted[-1]
        reference = models.gpt2()
        batch = oracle.collate([each for other in range(dist.get_world_size()) for each in _language(other)])
        logits, labels = reference(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (total / (labels != -100).sum()).backward()
        gradients = harness.full_gradients({plain_name(name): each for name, each in model.named_parameters()})
        expected = {name: each.grad for name, each in reference.named_parameters()}
        found[f"error {recompute}"] = oracle.worst_error(gradients, expected)[0]
    return {str(key): value for key, value in found.items()}


def _language(rank: int) -> list[dict[str, Tensor]]:
    """Samples of uneven lengths, of other numbers on each rank."""
    generator = torch.Generator().manual_seed(rank)
    ids = [torch.randint(0, models.VOCABULARY, (3 + 2 * each,), generator=generator) for each in range(4 + 2 * rank)]
    return [{"input_ids": each, "labels": each} for each in ids]


COMPILED = [f"compile:{wrapper}:{sync}" for wrapper, syncs in WRAPPERS.items() for sync in syncs]
RECOMPUTED = ["recompute:every", "recompute:last"]
INDUCTOR = ["inductor:plain:auto"]
values = of_ranks("tests.exact.test_compiled:run_job", {1: INDUCTOR, 2: [*COMPILED, *RECOMPUTED]})


@pytest.mark.slow
@pytest.mark.parametrize("name", some(COMPILED, 4))
def test_reduction_microbatches_and_stand_ins_compile_nothing_again(values, name: str) -> None:
    for value in values(name):
        first, *later = value["graphs"]
        assert first > 0
        assert set(later) == {first}
        assert max(value["errors"]) < 1e-15


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor_gives_the_same_gradients(values, name: str) -> None:
    for value in values(name):
        assert value["graphs"] == 1
        assert max(value["errors"]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", RECOMPUTED)
def test_blocks_that_recompute_have_the_same_gradients_and_collectives(values, name: str) -> None:
    for value in values(name):
        assert value["error True"] <= 1e-12
        assert value["True"] == value["False"]
        assert any("scatter" in collective for collective in value["True"])

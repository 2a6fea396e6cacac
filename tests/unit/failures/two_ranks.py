"""Errors on two ranks: a fault of one is heard by both, in the same words, and none waits for the other."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from megabatch import CostModel, GradientAccumulator, Learner, UpdateSampler, loss, losses, verify
from megabatch.core.mesh import num_collectives
from megabatch.wrappers.collective_order import MAX_COMPARED_CALLS
from tests.unit.failures import auto, expert_parallel, padded, stretches, user_loop
from tests.unit.failures.table import SAMPLES, accumulator, here, linear, squares, told, weighed_squares
from tests.unit.failures.wrappers import fsdp1

KEYS = "['x'] … ['y']"
CAP = "sample 1 has … 9 tokens … max_microbatch_tokens=8"
COUNTED = "counted 7 from … weight 4 on … data rank 1 of 2"
NOT_FINITE = "data rank 1 of 2"
OTHER_TERMS = "finalize() … DDP"
OTHER_WEIGHTS = "on other ranks"
OTHER_UPDATE = "rank 1 is … rank 0"
NEGATIVE = "is -1.0"
NO_INPUT = "NoneType"
UNUSED = "DDP"
EXPERT_AXIS = "'ep' … has 2 ranks"
ALONG_CP = "a cp axis"
MESH_DIFFERS = "has 2 data … over 1"
HOOK_ELSEWHERE = "DDP … 'allreduce_hook' … DDP"
ONE_OF_TWO = "over 1 of … 2 processes"
TWO_WAYS = "DistributedDataParallel"
FSDP1_TWO_WAYS = "FSDP1"
OTHER_SAMPLES = "rank 0 were"
OTHER_DTYPE = "'weight' … (1, 1) … torch.float64 … rank 0 … 'weight' … (1, 1)"
OTHER_WEIGHTS_OF_MODEL = "'weight' … rank 0 than … rank 1"


def iterated(**settings: Any) -> str:
    """The first update of a sampler; what this rank is told, or how many samples it has of it."""
    sampler = UpdateSampler([3, 1, 4, 1, 5], **{"global_batch_size": 5, **settings})
    return told(lambda: next(iter(sampler)))


def dealt_by_the_group() -> str:
    """Without a word of ranks, each sample is on one of them, in every update, compared once."""
    sampler = UpdateSampler(range(1, 12), global_batch_size=4)
    shares, messages = list(sampler), num_collectives()
    shares += list(sampler)
    assert num_collectives() == messages
    both: list[Any] = [None, None]
    dist.all_gather_object(both, shares)
    epoch = [sorted(one + other) for one, other in zip(*both, strict=True)]
    assert [len(update) for update in epoch] == 2 * [4, 4, 3]
    assert [sorted(itertools.chain(*epoch[first : first + 3])) for first in (0, 3)] == 2 * [list(range(11))]
    return told(lambda: None)


def keys_differ() -> str:
    batch = [SAMPLES[0], here({"y": SAMPLES[0]["x"]}, SAMPLES[1])]
    return told(lambda: accumulator().forward_backward(batch, weighed_squares))


def no_batch() -> str:
    return told(lambda: accumulator().forward_backward(here(None, SAMPLES), squares))


def sample_too_long() -> str:
    batch = [{"x": torch.ones(length, 1, dtype=torch.float64)} for length in (8, here(9, 8))]
    gradient = GradientAccumulator(linear(), max_microbatch_tokens=8)
    return told(lambda: gradient.forward_backward(batch, squares))


def collate_runs_out_of_memory() -> str:
    def collate(samples: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    gradient = accumulator(collate=here(collate, None))
    return told(lambda: gradient.forward_backward(SAMPLES, weighed_squares))


def collate_raises() -> str:
    def collate(samples: list[Any]) -> Any:
        raise KeyError("no such column")

    gradient = accumulator(collate=here(collate, None))
    return told(lambda: gradient.forward_backward(SAMPLES, weighed_squares))


def weigh_is_negative() -> str:
    counting = loss(weigh=lambda microbatch: here(-1, 2))(lambda *given: squares(*given))
    return told(lambda: accumulator().forward_backward(SAMPLES, counting))


def weigh_names_differ() -> str:
    counting = loss(weigh=lambda microbatch: {here("two", "one"): 2})(lambda *given: squares(*given))
    return told(lambda: accumulator().forward_backward(SAMPLES, counting))


def weights_disagree(wrap: Callable[[nn.Module], nn.Module]) -> str:
    """Found out after the backward; raised where the update is closed, on both ranks."""
    counting = loss(weigh=lambda microbatch: here(3.5, 2))(lambda *given: squares(*given))
    gradient = accumulator(wrap(linear()))
    gradient.forward_backward(SAMPLES, counting)
    return told(gradient.finalize)


def term_names_differ() -> str:
    def naming(model: nn.Module, microbatch: Any) -> dict[str, Any]:
        return {here("two", "one"): squares(model, microbatch)}

    gradient = accumulator()
    gradient.forward_backward(SAMPLES, naming)
    return told(gradient.finalize)


def gradients_differ() -> str:
    """A term that is a constant on one rank, for want of data, and is differentiated on the other."""

    def constant_here(model: nn.Module, microbatch: Any) -> dict[str, Any]:
        total, weight = squares(model, microbatch)
        return {"one": (total, weight), "two": (here(total.detach(), total), weight)}

    counting = loss(weigh=lambda microbatch: {"one": 2, "two": 2})(constant_here)
    gradient = accumulator()
    gradient.forward_backward(SAMPLES, counting)
    return told(gradient.finalize)


def divisors_differ() -> str:
    gradient = accumulator()
    gradient.forward_backward(SAMPLES, squares)
    return told(lambda: gradient.finalize(weight=here(3.0, 4.0)))


def not_a_number() -> str:
    """The learner reports it and moves nothing."""
    model = linear()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    learner = Learner(model, optimizer, accumulator(model), scheduler=scheduler, max_norm=1.0)
    learner.forward_backward([{"x": SAMPLES[0]["x"] * here(float("nan"), 1.0)}], squares)
    update = learner.optim_step()
    assert not update.finite
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
    assert scheduler.get_last_lr() == [0.1]
    return f"{type(update.problem()).__name__}: {update.problem()}"


def expert_axis() -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    return told(lambda: accumulator(mesh=mesh))


def verify_along_cp() -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    return told(lambda: verify(linear(), weighed_squares, SAMPLES, mesh=mesh))


def other_samples() -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    batch = [{"x": sample["x"] + here(1, 0)} for sample in SAMPLES]
    return told(lambda: accumulator(mesh=mesh).forward_backward(batch, squares))


def other_cut() -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    return told(lambda: accumulator(mesh=mesh, micro_batch_size=here(1, 2)).forward_backward(SAMPLES, squares))


def other_weights_along_tp() -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    return told(lambda: accumulator(mesh=mesh).open(weights=here(1, 2)))


def part_of_the_processes() -> str:
    model, mesh = linear(), DeviceMesh("cpu", [dist.get_rank()], mesh_dim_names=("tp",))
    return told(lambda: accumulator(parallelize_module(model, mesh, ColwiseParallel())))


def fsdp1_in_two_ways() -> str:
    inner = fsdp1(linear(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    return told(lambda: accumulator(fsdp1(nn.Sequential(linear(), inner))))


def wrapped_in_two_ways() -> str:
    return told(lambda: accumulator([linear(), DistributedDataParallel(linear())]))


def mesh_differs() -> str:
    groups = [dist.new_group([rank]) for rank in range(2)]
    ddp = DistributedDataParallel(linear(), process_group=groups[dist.get_rank()])
    return told(lambda: accumulator(ddp, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))))


def another_dtype() -> str:
    return told(lambda: accumulator(linear().to(here(torch.float32, torch.float64))))


def other_weights() -> str:
    model = linear()
    model.weight.data += here(1, 0)
    return told(lambda: accumulator(model))


class Fork(nn.Module):
    """Its second layer sits out where the sample says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor, both: Tensor) -> Tensor:
        return self.first(x) + self.second(x) if both.any() else self.first(x)


FORKED = [{"x": sample["x"], "both": torch.tensor(number < 3)} for number, sample in enumerate(SAMPLES)]


def fork_loss(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
    return (model(**microbatch) ** 2).sum(), len(microbatch["x"])


def hook_over_other_ranks() -> str:
    ddp = DistributedDataParallel(linear())
    groups = [dist.new_group([rank]) for rank in range(2)]
    ddp.register_comm_hook(groups[dist.get_rank()], allreduce_hook)
    return told(lambda: accumulator(ddp))


def parameter_unused_at_last() -> str:
    model = Fork()
    gradient = accumulator(DistributedDataParallel(model), micro_batch_size=1)
    text = told(lambda: gradient.forward_backward(FORKED, fork_loss))
    assert all(parameter.grad is None for parameter in model.parameters())
    return text


class Branches(nn.Module):
    """Takes one of two layers of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([linear(), linear()]), linear()
        for module in (*self.layers, self):
            fully_shard(module)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.head(self.layers[which](x))


def in_a_later_call(models: Any, **given: Any) -> GradientAccumulator:
    """An accumulator whose ranks no longer compare each collective of a new loss, but their hash in `finalize`."""
    gradient: Any = accumulator(models, **given)
    gradient.wrapper.collective_order.num_compared_calls = MAX_COMPARED_CALLS
    return gradient


def another_branch(*, several: bool = False) -> str:
    """Each rank gathers the layer that it goes through, and so is sent a half of the other."""
    models = [Branches(), *([Branches()] if several else [])]

    def loss_fn(_: Any, microbatch: Any) -> tuple[Tensor, int]:
        outputs = [model(microbatch["x"], dist.get_rank()) for model in models]
        return (sum(outputs) ** 2).sum(), len(microbatch["x"])

    gradient = in_a_later_call(models if several else models[0])
    gradient.forward_backward(SAMPLES, loss_fn)
    return told(gradient.finalize)


class Dropping(nn.Module):
    """Runs two layers of the same size, and may leave out the second's output: it is reduced last then, not first."""

    def __init__(self, shard: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.below, self.layers = linear(), nn.ModuleList([linear(), linear()])
        for module in (self.below, *self.layers, self):
            shard(module)

    def forward(self, x: Tensor, drops: Tensor) -> Tensor:
        hidden = self.below(x)
        first, second = (layer(hidden) for layer in self.layers)
        return first**2 if drops.any() else first**2 + second.sin()


def output_unused(shard: Callable[[nn.Module], nn.Module], drops: str = "1111", **given: Any) -> str:
    """Rank 1 drops an output in some samples. Unnoted, the gradients of the two layers would be mixed."""
    model = Dropping(shard)
    gradient = in_a_later_call(model, **{"micro_batch_size": 4, **given})
    batch = [
        {"x": sample["x"], "drops": torch.tensor(here(drop == "1", False))}
        for sample, drop in zip(SAMPLES, drops, strict=True)
    ]
    gradient.forward_backward(batch, fork_loss)
    return told(gradient.finalize)


class Choosing(nn.Module):
    """Runs four layers of the same size and uses the output of one. Backward gathers that one and its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(4))
        self.head = linear()
        for module in (*self.layers, self.head, self):
            fully_shard(module)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.head([layer(x) for layer in self.layers][which])


def another_output() -> str:
    """Reductions come in one order on both ranks, but the weights that backward gathers would be mixed."""

    def loss_fn(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
        return (model(microbatch["x"], here(2, 1)) ** 2).sum(), len(microbatch["x"])

    gradient = in_a_later_call(Choosing(), micro_batch_size=4)
    gradient.forward_backward(SAMPLES, loss_fn)
    return told(gradient.finalize)


def models_in_another_order(wrap: Callable[[nn.Module], nn.Module], swapped: str = "1111", **given: Any) -> str:
    """Rank 1 calls two models in another order in some samples. Unnoted, weights or gradients would be mixed."""
    models = [wrap(linear()) for _ in range(2)]

    def loss_fn(_: Any, microbatch: Any) -> tuple[Tensor, int]:
        called = models[::-1] if microbatch["swapped"].any() else models
        outputs = {model: model(microbatch["x"]) for model in called}
        return (outputs[models[0]] ** 2 + outputs[models[1]].sin()).sum(), len(microbatch["x"])

    gradient = in_a_later_call(models, **{"micro_batch_size": 4, **given})
    batch = [
        {"x": sample["x"], "swapped": torch.tensor(here(swap == "1", False))}
        for sample, swap in zip(SAMPLES, swapped, strict=True)
    ]
    gradient.forward_backward(batch, loss_fn)
    return told(gradient.finalize)


def parameter_unused_and_found() -> str:
    """With find_unused_parameters the gradient is that of both ranks' samples."""
    model, reference = Fork(), Fork()
    gradient = accumulator(DistributedDataParallel(model, find_unused_parameters=True), micro_batch_size=1)
    gradient.forward_backward(FORKED, fork_loss)
    gradient.finalize()
    for sample in 2 * FORKED:  # the same samples on each rank
        (fork_loss(reference, {name: value[None] for name, value in sample.items()})[0] / 8).backward()
    for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-14, atol=0)
    return "nothing"


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def on_both(text: str) -> list[str]:
    return [text, text]


OTHER_ON_BOTH = on_both(f"LossContractError: {OTHER_TERMS}")
COUNTED_ON_BOTH = on_both(f"LossContractError: {COUNTED}")
NOTHING_ON_BOTH = on_both("nothing")


def heard(kind: str, text: str, own: str | None = None) -> list[str]:
    """Rank 0 hears of it from rank 1, which raises its own."""
    return [f"{kind}: data rank 1 of 2: {text}", own or f"{kind}: {text}"]


def kept_gathered(module: nn.Module) -> nn.Module:
    """Gathered again in backward, ranks in different layers would wait for ever."""
    return fully_shard(module, reshard_after_forward=False)


def replicated(module: nn.Module) -> nn.Module:
    return replicate(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def with_own_group(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module, process_group=dist.new_group())


def with_buffers(module: nn.Module) -> nn.Module:
    module.register_buffer("seen", torch.zeros(1))
    return DistributedDataParallel(module)


def hybrid(module: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    return fully_shard(module, mesh=mesh, reshard_after_forward=False)


ORDERS: dict[str, tuple[Callable[[], str], list[str]]] = {  # also run by three ranks
    "an output unused, FSDP2": (lambda: output_unused(kept_gathered), OTHER_ON_BOTH),
    "an output unused, FSDP2, sync last": (lambda: output_unused(kept_gathered, sync="last"), OTHER_ON_BOTH),
    "an output unused, HSDP": (lambda: output_unused(hybrid, "0011", micro_batch_size=2), OTHER_ON_BOTH),
    "an output unused, replicate": (lambda: output_unused(replicated, "0011", micro_batch_size=2), OTHER_ON_BOTH),
    "an output unused before the reduction, replicate": (
        lambda: output_unused(replicated, "1100", micro_batch_size=2),
        NOTHING_ON_BOTH,
    ),
    "another output, FSDP2": (another_output, OTHER_ON_BOTH),
    "models in another order, FSDP2": (lambda: models_in_another_order(fully_shard), OTHER_ON_BOTH),
    "models in another order, FSDP1": (lambda: models_in_another_order(fsdp1), OTHER_ON_BOTH),
    "models in another order, DDP": (lambda: models_in_another_order(DistributedDataParallel), OTHER_ON_BOTH),
    "models in another order, DDP, sync every": (
        lambda: models_in_another_order(DistributedDataParallel, "1100", micro_batch_size=2, sync="every"),
        OTHER_ON_BOTH,
    ),
    "models in another order before the reduction, DDP": (
        lambda: models_in_another_order(DistributedDataParallel, "1100", micro_batch_size=2),
        NOTHING_ON_BOTH,
    ),
    "models in another order before the reduction, DDP with buffers": (
        lambda: models_in_another_order(with_buffers, "1100", micro_batch_size=2),
        OTHER_ON_BOTH,
    ),
    "models in another order, DDP with process groups of their own": (
        lambda: models_in_another_order(with_own_group),
        NOTHING_ON_BOTH,
    ),
}


def padding_of_one_rank() -> str:
    """Samples of rank 0 have one length."""
    gradient = GradientAccumulator(padded.fnet(), micro_batch_size=2)
    batch = padded.texts(*here((3, 4), (3, 3)))
    return told(lambda: gradient.forward_backward(batch, losses.classification))


def later_microbatch_first() -> str:
    gradient = accumulator(linear())
    return told(gradient.microbatch(here(1, 0), of=2, sum_over=1).__enter__)


def idle_with_another_loss() -> str:
    """A rank without samples gives a loss that does not say how its weight is counted."""
    gradient = accumulator(linear())
    gradient.forward_backward(SAMPLES, weighed_squares)
    gradient.finalize()
    return told(lambda: gradient.forward_backward(here([], SAMPLES), here(squares, weighed_squares)))


def shards_within_replicas() -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    return told(lambda: accumulator(fully_shard(linear(), mesh=mesh["dp_shard"])))


JOBS: dict[str, tuple[Callable[[], str], list[str]]] = {  # what each rank is told
    "keys that differ": (keys_differ, heard("PlanError", KEYS)),
    "no batch": (no_batch, heard("PlanError", NO_INPUT)),
    "a sample longer than the cap": (sample_too_long, heard("PlanError", CAP)),
    "padding that a model mixes into tokens": (
        padding_of_one_rank,
        heard("PlanError", "fnet takes no attention_mask"),
    ),
    "a collate that raises": (
        collate_raises,
        heard("PlanError", "KeyError: 'no such column'", "KeyError: 'no such column'"),
    ),
    "a collate that runs out of memory": (
        collate_runs_out_of_memory,
        on_both("PlanError: … data rank 1 of 2 … OutOfMemoryError"),
    ),
    "samplers without a word of ranks": (dealt_by_the_group, NOTHING_ON_BOTH),
    "samplers of other seeds": (lambda: iterated(seed=here(1, 0)), on_both(f"PlanError: {OTHER_UPDATE}")),
    "samplers of other sizes": (lambda: iterated(global_batch_size=here(4, 5)), on_both(f"PlanError: {OTHER_UPDATE}")),
    "samplers of other costs": (
        lambda: iterated(cost=here(CostModel(seconds_per_token=0.0, seconds_per_pair=0.0), None)),
        on_both(f"PlanError: {OTHER_UPDATE}"),
    ),
    "samplers of one share": (lambda: iterated(dp_rank=0, dp_degree=2), on_both("PlanError: … dp_rank … [0, 0]")),
    "a loop that begins with its second microbatch": (
        later_microbatch_first,
        ["PlanError: data rank 1 of 2: … begin with", "MegabatchError: … begin with"],
    ),
    "an idle rank with another loss": (idle_with_another_loss, NOTHING_ON_BOTH),
    "shards within replicas": (shards_within_replicas, on_both("PlanError: the mesh has 2 data")),
    "a negative weight": (weigh_is_negative, heard("LossContractError", NEGATIVE)),
    "weigh names other terms": (weigh_names_differ, on_both(f"LossContractError: {OTHER_WEIGHTS}")),
    "weights that disagree": (lambda: weights_disagree(lambda model: model), COUNTED_ON_BOTH),
    "weights that disagree, DDP": (lambda: weights_disagree(DistributedDataParallel), COUNTED_ON_BOTH),
    "weights that disagree, FSDP2": (lambda: weights_disagree(sharded), COUNTED_ON_BOTH),
    "the loss names other terms": (term_names_differ, OTHER_ON_BOTH),
    "a term without gradient on one rank": (gradients_differ, OTHER_ON_BOTH),
    "finalize with other weights": (divisors_differ, OTHER_ON_BOTH),
    "not a number": (not_a_number, on_both(f"MegabatchError: {NOT_FINITE}")),
    "a mesh axis that is not supported": (expert_axis, on_both(f"PlanError: {EXPERT_AXIS}")),
    "other samples along tp": (other_samples, on_both(f"PlanError: {OTHER_SAMPLES}")),
    "another cut along tp": (other_cut, on_both(f"PlanError: {OTHER_SAMPLES}")),
    "other weights along tp": (other_weights_along_tp, on_both("PlanError: other weights … along cp, tp or pp")),
    "tensor parallel over one of two": (part_of_the_processes, on_both(f"PlanError: {ONE_OF_TWO}")),
    "FSDP1 in two ways": (fsdp1_in_two_ways, on_both(f"PlanError: {FSDP1_TWO_WAYS}")),
    "models wrapped in two ways": (wrapped_in_two_ways, on_both(f"PlanError: {TWO_WAYS}")),
    "a model of another dtype": (another_dtype, on_both(f"PlanError: {OTHER_DTYPE}")),
    "a model of other weights": (other_weights, on_both(f"PlanError: {OTHER_WEIGHTS_OF_MODEL}")),
    "verify with a cp axis": (verify_along_cp, on_both(f"PlanError: {ALONG_CP}")),
    "a mesh that is not the wrapper's": (mesh_differs, on_both(f"PlanError: {MESH_DIFFERS}")),
    "a hook of DDP's over other ranks": (hook_over_other_ranks, on_both(f"PlanError: {HOOK_ELSEWHERE}")),
    "a parameter unused at last": (parameter_unused_at_last, on_both(f"MegabatchError: {UNUSED}")),
    "another branch, FSDP2": (another_branch, OTHER_ON_BOTH),
    "another branch, two models in FSDP2": (lambda: another_branch(several=True), OTHER_ON_BOTH),
    **ORDERS,
    "a parameter unused and found": (parameter_unused_and_found, NOTHING_ON_BOTH),
    **{name: (run, on_both(text)) for name, (run, text) in stretches.JOBS.items()},
    **{name: (run, on_both(text)) for name, (run, text) in user_loop.JOBS.items()},
    **auto.JOBS,
    **expert_parallel.JOBS,
}


def job(name: str) -> str:
    return JOBS[name][0]()

"""Jobs about what wrappers reduce: gradients past FSDP2's outputs, dtypes, sums on three ranks, buckets, buffers."""

import copy
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, MegabatchError, loss

WIDTH = 6
Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch], tuple[Tensor, int]]


class Net(nn.Module):
    """Three layers, of which the middle one is left out of samples whose last feature is negative."""

    def __init__(self, shows: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.shows, self.seen = shows, None
        if shows == "hook":
            self.last.register_forward_hook(lambda *given: setattr(self, "seen", given[-1]))

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).tanh()
        if bool((x[:, -1] >= 0).any()):
            hidden = hidden + self.middle(hidden).tanh() * (x[:, -1:] >= 0)
        if self.shows == "generator":
            return (self.last(each) for each in [hidden])
        output = self.last(hidden)
        shown = {"namespace": SimpleNamespace(output=output), "closure": lambda: output, "hook": output.detach()}
        if self.shows == "attribute":
            self.seen, output = output, output.detach()
        return shown.get(self.shows, output)


def output_of(model: nn.Module, x: Tensor) -> Tensor:
    """The tensor that a loss is made of, however the model shows it."""
    returned, inner = model(x), getattr(model, "module", model)
    if inner.shows == "generator":
        return next(returned)
    if inner.shows == "closure":
        return returned()
    if inner.shows == "namespace":
        return returned.output
    return inner.seen if inner.shows in ("attribute", "hook") else returned


@loss(weigh=lambda batch: len(batch["x"]))
def squares(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return (output_of(model, batch["x"]) - batch["y"]).pow(2).sum(), len(batch["x"])


@loss(weigh=lambda batch: len(batch["x"]))
def with_whole_weight(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """A loss that gathers a sharded weight itself."""
    weight: Any = model.last.weight
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return (output_of(model, batch["x"]) @ weight).pow(2).sum(), len(batch["x"])


def batch_of(step: int, rank: int, dtype: torch.dtype = torch.float64, rows: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + rank)
    drawn = {name: torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for name in "xy"}
    drawn["x"][:, -1] = drawn["x"][:, -1].abs()
    return drawn


def error(model: nn.Module, reference: nn.Module, steps: list[int], loss_fn: Loss = squares, **options: Any) -> float:
    """The largest relative error of a gradient against the uncut update of all ranks in plain torch."""
    reference.zero_grad()
    batches = [batch_of(step, rank, **options) for step in steps for rank in range(dist.get_world_size())]
    total = sum(loss_fn(reference, batch)[0] for batch in batches)
    (total / sum(len(batch["x"]) for batch in batches)).backward()
    worst = 0.0
    for mine, whole in zip(model.parameters(), reference.parameters(), strict=True):
        found: Any = mine.grad
        assert found is not None
        found = found.full_tensor() if isinstance(found, DTensor) else found
        worst = max(worst, float((found - whole.grad).norm() / whole.grad.norm()))
    return worst


def sharded(model: nn.Module, how: str, **options: Any) -> Any:
    world = dist.get_world_size()
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    if how == "blocks":
        for layer in (model.first, model.middle, model.last):
            fully_shard(layer, mesh=mesh, **options)
    return replicate(model, mesh=mesh) if how == "replicate" else fully_shard(model, mesh=mesh, **options)


def told(act: Callable[[], object]) -> str:
    """The error of an act, or "nothing"."""
    try:
        act()
    except MegabatchError as error:
        return str(error)
    return "nothing"


def looped(accumulator: GradientAccumulator, batch: Batch) -> None:
    for index, row in enumerate(zip(batch["x"], batch["y"], strict=True)):
        with accumulator.microbatch(index, of=len(batch["x"]), sum_over=1) as part:
            part.scale(squares(accumulator.model, {"x": row[0][None], "y": row[1][None]})[0]).backward()


def past_outputs(shows: str, how: str, sync: str) -> dict[str, Any]:
    """Updates whose loss FSDP2 does not see, then one that it sees, which has nothing of a discarded one."""
    model = Net(shows).double()
    reference = Net().double()
    accumulator = GradientAccumulator(sharded(model, how), micro_batch_size=1, sync=sync)
    batch, found = batch_of(0, dist.get_rank()), {}

    def call() -> None:
        accumulator.forward_backward(batch, squares)

    def call_opened() -> None:
        accumulator.open()
        accumulator.forward_backward(batch, squares)

    def call_twice() -> None:
        call()
        call()

    acts = {"call": call, "loop": lambda: looped(accumulator, batch), "opened": call_opened, "calls": call_twice}
    for name, act in acts.items():
        act()
        accumulator.finalize()
        found[name] = error(model, reference, [0])
    call()
    accumulator.discard()
    model.shows = "tensor"
    accumulator.forward_backward(batch_of(1, dist.get_rank()), squares)
    accumulator.finalize()
    return found | {"after": error(model, reference, [1])}


def whole_weight(how: str, sync: str) -> str:
    accumulator = GradientAccumulator(sharded(Net().double(), how), micro_batch_size=1, sync=sync)
    return told(lambda: accumulator.forward_backward(batch_of(0, dist.get_rank()), with_whole_weight))


def only_the_last(how: str, sync: str) -> float:
    """Parameters in bfloat16, reduced in float32, of which the last microbatch alone uses some: error by tensor."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    model, reference = Net(), Net()
    batches = [batch_of(0, rank, torch.float32) for rank in range(dist.get_world_size())]
    for batch in batches:
        batch["x"][:-1, -1] *= -1
    accumulator = GradientAccumulator(sharded(model, how, mp_policy=policy), micro_batch_size=1, sync=sync)
    for _ in range(2):
        accumulator.forward_backward(batches[dist.get_rank()], squares)
        accumulator.finalize()
    total = sum(squares(reference, batch)[0] for batch in batches) / sum(len(batch["x"]) for batch in batches)
    total.backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((mine.grad.full_tensor() - whole.grad).norm() / whole.grad.norm()) for mine, whole in pairs)


class Norm(nn.Module):
    """RMSNorm as language models have it: in float32 whatever the model's dtype is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        single = x.float()
        return self.weight * (single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def normed(buffer: bool = False) -> nn.Sequential:
    """A stack of layers in whose backward the order of gradients is not that of the parameters."""
    torch.manual_seed(5)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Norm()) for _ in range(6)]
    model = nn.Sequential(*layers, *([nn.BatchNorm1d(WIDTH)] if buffer else []))
    model.register_parameter("unordered", nn.Parameter(torch.full((WIDTH,), 0.5)))
    model.register_forward_pre_hook(lambda module, given: (given[0] * module.unordered,))
    return model


@loss(weigh=lambda batch: len(batch["x"]))
def of_normed(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return (model(batch["x"]) - batch["y"]).pow(2).sum(), len(batch["x"])


OPTIONS = {
    "plain": {}, "unused": {"find_unused_parameters": True}, "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
}  # fmt: skip
CAP_MB = 0.0005  # so that there are several buckets


def in_ddp(model: nn.Module, options: str) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=CAP_MB, **OPTIONS[options])


def sums(options: str, way: str) -> dict[str, float]:
    """Float32 norms in a float64 model: what multiplies the loss shows in the gradient, unless it is a power of two."""
    reference, rank = normed().double(), dist.get_rank()
    ddp = in_ddp(copy.deepcopy(reference), options)
    accumulator = GradientAccumulator(ddp, micro_batch_size=1)
    found = {"first": 0.0, "later": 0.0}
    for step in range(3):
        if way == "open":
            accumulator.open()
        accumulator.forward_backward(batch_of(step, rank), of_normed)
        steps = [step]
        if way != "one":
            accumulator.forward_backward(batch_of(step + 50, rank), of_normed)
            steps.append(step + 50)
        accumulator.finalize()
        found["later" if step else "first"] = error(ddp.module, reference, steps, of_normed)
    return found | _around(ddp, reference)


def _around(ddp: DistributedDataParallel, reference: nn.Module) -> dict[str, float]:
    """A backward of the user's own averages as ever; so it is after a call that failed; and a second accumulator."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def own() -> float:
        ddp.zero_grad()
        of_normed(ddp, batch_of(9, rank))[0].backward()
        reference.zero_grad()
        (sum(of_normed(reference, batch_of(9, each))[0] for each in range(world)) / world).backward()
        pairs = zip(ddp.module.parameters(), reference.parameters(), strict=True)
        return max(float((mine.grad - whole.grad).norm() / whole.grad.norm()) for mine, whole in pairs)

    found = {"own": own()}
    second = GradientAccumulator(ddp, micro_batch_size=2)
    found["failed"] = float(told(lambda: second.forward_backward(batch_of(1, rank), lambda model, batch: None)) != "")
    second.discard()
    found["own after a failure"] = own()
    second.forward_backward(batch_of(1, rank), of_normed)
    second.finalize()
    return found | {"second": error(ddp.module, reference, [1], of_normed)}


def resumes(options: str, kind: str) -> list[bool]:
    """Updates after a stop against those of a process that went on: equal in every bit."""
    rank = dist.get_rank()

    def updates(steps: range, weights: dict[str, Tensor] | None = None) -> Iterator[list[Tensor]]:
        model = Tables() if kind == "sparse" else normed()
        if weights is not None:
            model.load_state_dict(weights)
        ddp = in_ddp(model, options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        accumulator = GradientAccumulator(ddp, micro_batch_size=2)
        for step in steps:
            batch = batch_of(step, rank, torch.float32, rows=2 + (rank + step) % 3)
            accumulator.forward_backward(batch, of_normed)
            accumulator.finalize()
            optimizer.step()
            yield [each.detach().clone() for each in ddp.module.state_dict().values()]

    names = list((Tables() if kind == "sparse" else normed()).state_dict())
    gone_on = list(updates(range(4)))
    resumed = list(updates(range(1, 4), dict(zip(names, gone_on[0], strict=True))))
    return [all(map(torch.equal, one, other)) for one, other in zip(gone_on[1:], resumed, strict=True)]


class Tables(nn.Module):
    """A table with sparse gradients beside dense layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.table = nn.Embedding(WIDTH, WIDTH, sparse=True)
        self.layers = normed()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + self.table(x.argmax(1)))


def buffers(how: str) -> list[bool]:
    """Running statistics after an update are those of rank 0 on all ranks, where DDP has not reduced by itself."""
    dtype = torch.float32 if how == "wide" else None
    model = normed(buffer=True).to(torch.bfloat16 if how == "wide" else torch.float64)
    ddp = DistributedDataParallel(model, broadcast_buffers=how != "kept")
    accumulator = GradientAccumulator(ddp, micro_batch_size=3, accumulate_dtype=dtype)
    for step in range(2):
        if how != "wide":
            accumulator.open()
        accumulator.forward_backward(batch_of(step, dist.get_rank(), next(model.parameters()).dtype), of_normed)
        accumulator.finalize()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {name: each.tolist() for name, each in ddp.module.named_buffers()})
    return [each == found[0] for each in found[1:]]


def buckets(num: str) -> dict[str, Any]:
    """Sums without a wrapper, in buckets of two dtypes, with tensors larger than one and views that are not dense."""
    from megabatch.wrappers import rank_sums

    before, rank_sums.BUCKET_BYTES = rank_sums.BUCKET_BYTES, 256
    try:
        rank = dist.get_rank()
        dtypes = (torch.float64, torch.float32, torch.bfloat16)
        sizes = [(n % 7 + 1, 1 + 5 * (n % 3)) for n in range(int(num))]
        tensors = [torch.full(size, float(rank + n), dtype=dtypes[n % 3]) for n, size in enumerate(sizes)]
        tensors += [torch.full((40, 3), 1.0 + rank).t(), torch.tensor(2.0 * rank), torch.full((0, 3), 1.0)]
        with _counting() as calls:
            rank_sums.sum_over_ranks(tensors, dist.group.WORLD)
        world = dist.get_world_size()
        ranks = world * (world - 1) / 2
        expected = [ranks + world * n for n in range(int(num))] + [world + ranks, 2 * ranks, 1.0]
        right = all(bool((tensor == value).all()) for tensor, value in zip(tensors, expected, strict=True))
        return {"right": right, "calls": len(calls), "tensors": len(tensors)}
    finally:
        rank_sums.BUCKET_BYTES = before


@contextmanager
def _counting() -> Generator[list[int]]:
    """Collect the bytes of each all-reduce."""
    from tests.comm.counting import Collectives

    found: list[int] = []
    with Collectives() as collectives:
        yield found
    found += [size for kind, size in collectives.seen if kind == "all_reduce"]


@loss(weigh=lambda batch: len(batch["x"]))
def of_both(models: Any, batch: Batch) -> tuple[Tensor, int]:
    """The second model has a part in samples whose first feature is positive."""
    output = models[0](batch["x"])
    if bool((batch["x"][:, 0] > 0).any()):
        output = output + models[1](batch["x"]) * (batch["x"][:, :1] > 0)
    return (output - batch["y"]).pow(2).sum(), len(batch["x"])


def gathered_once(sync: str, between: str) -> dict[str, Any]:
    """Microbatches leave a module or a whole model out; forwards after the step and the next update see new weights."""
    references = nn.ModuleList([Net().double(), Net().double()])
    models = [sharded(copy.deepcopy(each), "blocks") for each in references]
    accumulator = GradientAccumulator(models, micro_batch_size=1, sync=sync)
    trained = [*models[0].parameters(), *models[1].parameters()]
    optimizers = [torch.optim.SGD(each, lr=0.5) for each in (trained, references.parameters())]
    found: list[float] = []
    gathered = 0
    for step in range(4):
        batches = [batch_of(step, rank) for rank in range(dist.get_world_size())]
        for batch in batches:  # what the second sample alone uses is neither in the first microbatch nor in the last
            batch["x"][:, [0, -1]] = torch.tensor([[-1.0], [1.0], [-1.0]], dtype=torch.float64)
        accumulator.forward_backward(batches[dist.get_rank()], of_both)
        accumulator.finalize()
        references.zero_grad()
        (sum(of_both(references, batch)[0] for batch in batches) / sum(len(each["x"]) for each in batches)).backward()
        for mine, whole in zip(trained, references.parameters(), strict=True):
            found.append(float((mine.grad.full_tensor() - whole.grad).norm() / whole.grad.norm()))
        modules = [module for model in models for module in model.modules() if isinstance(module, FSDPModule)]
        gathered += sum(map(_is_gathered, modules))
        for optimizer in optimizers:
            optimizer.step()
        if between == "nothing":
            continue
        with torch.no_grad():
            pairs = zip(models, references, strict=True)
            found += [float((a(batches[0]["x"]) - b(batches[0]["x"])).abs().max()) for a, b in pairs]
    return {"errors": found, "gathered": gathered}


def _is_gathered(module: nn.Module) -> bool:
    return any(not isinstance(each, DTensor) for each in module.parameters(recurse=False))


KINDS: dict[str, Callable[..., Any]] = {
    "past": past_outputs, "weight": whole_weight, "last": only_the_last,
    "sums": sums, "resumes": resumes, "buffers": buffers, "buckets": buckets, "once": gathered_once,
}  # fmt: skip


def run_job(name: str) -> Any:
    """The job "kind/arguments...": one of `KINDS`."""
    kind, *given = name.split("/")
    return partial(KINDS[kind], *given)()

"""Parameters with two homes, in stages of a pipeline or in groups of FSDP2: jobs on ranks, against a plain model."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, PlanError, loss, verify
from megabatch.pipeline import Pipeline

VOCABULARY, WIDTH, NUM_STAGES = 6, 4, 3
Sample = dict[str, Tensor]


class Layer(nn.Module):
    """A linear map; on the first stage of what is embedded, on the last one before the head."""

    def __init__(self, stage: int, matrix: Tensor) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.linear.weight.data = integers(generator, WIDTH, WIDTH)
        self.stage = stage
        if stage in (0, NUM_STAGES - 1):
            self.matrix = nn.Parameter(matrix)  # [V, E]
            self.offset = nn.Parameter(integers(torch.Generator().manual_seed(8), WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(F.embedding(x, self.matrix) if self.stage == 0 else x)  # [B, T, E]
        hidden = hidden if self.stage == 1 else hidden + self.offset
        return F.linear(hidden, self.matrix) if self.stage == NUM_STAGES - 1 else hidden


class Whole(nn.Module):
    """All layers on one process, with one matrix and one offset."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(stage, start()) for stage in range(NUM_STAGES))
        self.layers[-1].matrix, self.layers[-1].offset = self.layers[0].matrix, self.layers[0].offset

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def integers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=generator).double()


def start() -> Tensor:
    return integers(torch.Generator().manual_seed(9), VOCABULARY, WIDTH)


def samples(call: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(call)
    return [
        {"x": torch.randint(VOCABULARY, (length,), generator=generator), "y": integers(generator, length, VOCABULARY)}
        for length in (12, 1, 1, 12, 12, 1, 1, 1)  # in two schedule steps
    ]


@loss(weigh=lambda m: 8 * len(m["x"]))
def aligned(model: Any, m: Sample) -> tuple[Tensor, int]:
    return (model(m["x"]) * m["y"]).sum(), 8 * len(m["x"])


def pipeline_of(
    wrapper: str, change: Callable[[int, Layer], None] | None = None, holders: tuple[int, ...] = (0, NUM_STAGES - 1)
) -> tuple[Pipeline, DeviceMesh]:
    """This rank's stage of three; ``change`` may change it before it is wrapped. ``holders`` name their copies."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // NUM_STAGES, NUM_STAGES), mesh_dim_names=("dp", "pp"))
    stage = mesh.get_local_rank("pp")
    layer = Layer(stage, start())
    if change is not None:
        change(stage, layer)
    module: nn.Module = layer
    if wrapper == "ddp":
        module = DistributedDataParallel(layer, process_group=mesh["dp"].get_group())
    elif wrapper != "plain":
        (fully_shard if wrapper == "fsdp2" else replicate)(layer, mesh=mesh["dp"])

    def shape(width: int) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.empty(*x.shape, width, dtype=torch.float64, device="meta")

    # In another order on each rank, with other shapes: their sums must not be mistaken for each other.
    tied = dict([("matrix", layer.matrix), ("offset", layer.offset)][:: stage - 1]) if stage in holders else None
    return Pipeline([module], mesh, boundary=shape(WIDTH), output=shape(VOCABULARY), tied=tied), mesh


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def step(parameters: Any) -> None:
    with torch.no_grad():
        for each in parameters:
            each.sub_(each.grad.sign())  # integers again


def exact(wrapper: str) -> list[str]:
    """Two updates, each of two calls: what differs from the plain model by a bit, and norms by more than rounding."""
    pipeline, mesh = pipeline_of(wrapper)
    (layer,), plain, wrong = pipeline.stages, Whole(), list[str]()
    own: Any = getattr(layer, "module", layer)
    gradient = GradientAccumulator(pipeline, micro_batch_size=1)
    for update in range(2):
        batches = [samples(2 * update), samples(2 * update + 1)]
        for batch in batches:
            gradient.forward_backward(batch[mesh.get_local_rank("dp") :: mesh["dp"].size()], aligned)
            if len(gradient.last_plan.steps) != 2:
                wrong.append(f"schedule steps {gradient.last_plan.steps}")
        norm = gradient.finalize(max_norm=1e9).grad_norm
        plain.zero_grad()
        for each in (each for batch in batches for each in batch):
            ((plain(each["x"][None]) * each["y"]).sum() / 128).backward()
        expected = torch.stack([each.grad.norm() for each in plain.parameters()]).norm()
        if not torch.isclose(norm, expected, rtol=1e-12):
            wrong.append(f"norm {norm} and {expected}")
        for name, each in own.named_parameters():
            if not torch.equal(whole(each.grad), plain.layers[own.stage].get_parameter(name).grad):
                wrong.append(f"gradient of {name} in update {update}")
        for each in (own, plain):
            step(each.parameters())
        for name, each in own.named_parameters():
            if not torch.equal(whole(each), plain.layers[own.stage].get_parameter(name)):
                wrong.append(f"weight of {name} after update {update}")
    return wrong


def said(function: Callable[[], object]) -> str:
    try:
        function()
    except PlanError as error:
        return str(error)
    return "nothing"


def refused(fault: str) -> str:
    """Return the error of copies that cannot be one parameter."""

    def change(stage: int, layer: Layer) -> None:
        if stage == NUM_STAGES - 1 and fault == "weights":
            layer.matrix.data[0, 0] += 1
        if stage == NUM_STAGES - 1 and fault == "frozen":
            layer.matrix.requires_grad_(False)

    holders = (0,) if fault == "alone" else (0, NUM_STAGES - 1)
    return said(lambda: GradientAccumulator(pipeline_of("plain", change, holders)[0], micro_batch_size=1))


def drifting(wrapper: str) -> str:
    """Return the error after a step that moves one copy in another way, on one data rank's shard."""
    pipeline, mesh = pipeline_of(wrapper)
    gradient = GradientAccumulator(pipeline, micro_batch_size=1)
    if dist.get_rank() == 0:
        parameter = next(each for name, each in pipeline.named_parameters() if name.endswith("matrix"))
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        with torch.no_grad():
            local[0, 0] += 1
    gradient.forward_backward(samples(0)[mesh.get_local_rank("dp") :: mesh["dp"].size()], aligned)
    return said(gradient.finalize)


def grouped(num_rows: int) -> tuple[nn.Module, nn.Module]:
    """A plain model, and one whose ends are sharded in two groups and tied again, as transformers does."""
    plain = nn.Sequential(nn.Embedding(num_rows, WIDTH), nn.Tanh(), nn.Linear(WIDTH, num_rows, bias=False)).double()
    plain[0].weight.data = integers(torch.Generator().manual_seed(9), num_rows, WIDTH) / 4
    sharded = copy.deepcopy(plain)
    plain[2].weight = plain[0].weight
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for module in (sharded[0], sharded):
        fully_shard(module, mesh=mesh)
    sharded[2].weight = sharded[0].weight
    return plain, sharded


@loss(weigh=lambda m: len(m["x"]))
def squared(model: Any, m: Sample) -> tuple[Tensor, int]:
    return model(m["x"]).pow(3).sum(), len(m["x"])


def in_groups(num_rows: str) -> list[str]:
    """Three steps after an evaluation, and the verdict of ``verify``: differences from the plain model."""
    plain, sharded = grouped(int(num_rows))
    samples, wrong = [{"x": torch.tensor([number % int(num_rows)])} for number in range(8)], list[str]()
    report = verify(sharded, squared, samples[dist.get_rank() :: dist.get_world_size()])
    if not report.ok:
        wrong.append(f"verify: {report.causes}")
    gradient = GradientAccumulator(sharded, micro_batch_size=2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (plain, sharded)]
    for update in range(3):
        gradient.forward_backward(samples[dist.get_rank() :: dist.get_world_size()], squared)
        gradient.finalize()
        plain.zero_grad()
        (sum(squared(plain, {"x": sample["x"][None]})[0] for sample in samples) / len(samples)).backward()
        expected, found = plain[0].weight.grad, whole(sharded[0].weight.grad)
        if not torch.allclose(found, expected, rtol=1e-12, atol=1e-12):
            wrong.append(f"gradient of update {update}: {float((found - expected).norm() / expected.norm()):.1e}")
        for optimizer in optimizers:
            optimizer.step()
    return wrong


def run_job(name: str) -> Any:
    """The job "kind/what it is given"."""
    kind, given = name.split("/")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about gloo
        return {"exact": exact, "refused": refused, "drifting": drifting, "groups": in_groups}[kind](given)

"""Pipelines: cells that are run through each of torch's schedules, over stages that are wrapped or not."""

import warnings
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, MegabatchError, loss, losses
from megabatch.core.right_padding import pad_right
from megabatch.pipeline.run import Pipeline, evaluate
from tests.comm.counting import Collectives
from tests.exact import harness, models, wrappers
from tests.exact.cells import Cell
from tests.unit.failures import pipeline as failures
from tests.unit.failures.table import told

NUM_STAGES = {
    "GPipe": 2, "1F1B": 2, "Interleaved1F1B": 4, "LoopedBFS": 4, "InterleavedZeroBubble": 4, "ZBVZeroBubble": 4,
    "DualPipeV": 4,
}  # fmt: skip
GOES_BACK = ("ZBVZeroBubble", "DualPipeV")
SPLITS = ("InterleavedZeroBubble", *GOES_BACK)  # compute gradients of weights where DDP does not see it
PARTS = {  # of the language model in each stage, and of the model of integers
    2: (("embedding", "blocks.0"), ("blocks.1", "norm", "head")),
    4: (("embedding",), ("blocks.0",), ("blocks.1",), ("norm", "head")),
}
INTEGER_PARTS = (("embedding", "blocks.0"), ("blocks.1", "head"))
MESHES = {  # axes of the wrappers that need others than the rest
    "hsdp": ("dp_replicate", "dp_shard", "pp"),
    "fsdp2-tp": ("dp", "pp", "tp"),
}


class Stage(nn.Module):
    """Some parts of a model under their own names, run one after the other."""

    def __init__(self, model: nn.Module, parts: tuple[str, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict()
        for part in parts:
            folder, _, name = part.rpartition(".")
            (self.blocks if folder else self).add_module(name, model.get_submodule(part))
        self.parts = parts
        self.gives_logits = isinstance(model, models.SmallLM)

    def forward(self, hidden: Tensor) -> Any:
        for part in self.parts:
            hidden = self.get_submodule(part)(hidden)
        if "head" not in self.parts:
            return hidden
        return models.Logits(hidden) if self.gives_logits else hidden.squeeze(-1)


def wrap(stage: nn.Module, wrapper: str, mesh: DeviceMesh) -> nn.Module:
    """A stage in its wrapper, over the axes of the mesh beside "pp"."""
    if wrapper == "plain":
        return stage
    if wrapper == "ddp":
        return DistributedDataParallel(stage, process_group=mesh["dp"].get_group())
    if wrapper == "fsdp2-tp":
        plan = wrappers._tensor_plan(models.small_lm(), sequence=False)
        parallelize_module(stage, mesh["tp"], plan)
    data = mesh["dp_replicate", "dp_shard"] if wrapper == "hsdp" else mesh["dp"]
    shard = replicate if wrapper == "replicate" else fully_shard
    for block in stage.blocks.values():
        shard(block, mesh=data)
    return shard(stage, mesh=data)


@cache
def mesh_of(group: dist.ProcessGroup, data_degree: int, wrapper: str) -> DeviceMesh:
    """One for all jobs of a process group."""
    axes, size = MESHES.get(wrapper, ("dp", "pp")), dist.get_world_size()
    sizes = (2, 2, 2) if len(axes) == 3 else (data_degree, size // data_degree)
    return init_device_mesh("cpu", sizes, mesh_dim_names=axes)


class PipelineRun(harness.CellRun):
    """A cell whose model is cut into stages; the cell's world is the number of its data ranks."""

    def __init__(self, cell: Cell, schedule: str, wrapper: str) -> None:
        self.schedule, self.stage_wrapper = schedule, wrapper
        self.stage_mesh = mesh_of(dist.group.WORLD, cell.world, wrapper)
        super().__init__(cell)
        data = [self.stage_mesh.get_local_rank(axis) for axis in self.stage_mesh.mesh_dim_names if "dp" in axis]
        self.rank = data[0] if len(data) == 1 else 2 * data[0] + data[1]

    def _new_model(self, dtype: torch.dtype) -> nn.Module:
        if self.model_kind != "language":
            return models.integer_model("tokens")
        model = models.small_lm(dtype)
        for block in model.blocks:
            block.key.bias = None  # its gradient is rounding alone, whatever is computed
        return model

    def _wrapped(self, model: nn.Module) -> Pipeline:
        language, num_stages = self.model_kind == "language", NUM_STAGES[self.schedule]
        rank, ranks = self.stage_mesh.get_local_rank("pp"), self.stage_mesh["pp"].size()
        indices = (rank, 2 * ranks - 1 - rank) if self.schedule in GOES_BACK else range(rank, num_stages, ranks)
        parts = PARTS[num_stages] if language else INTEGER_PARTS
        width, last = (16, (models.VOCABULARY,)) if language else (4, ())
        return Pipeline(
            [wrap(Stage(model, parts[index]), self.stage_wrapper, self.stage_mesh) for index in indices],
            self.stage_mesh,
            schedule=self.schedule,
            boundary=lambda ids: torch.empty(*ids.shape, width, dtype=self.dtype, device="meta"),
            output=lambda ids: torch.empty(*ids.shape, *last, dtype=self.dtype, device="meta"),
        )

    def own(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank's stages, by their names in the model."""
        return {name: p for stage in self.model.stages for name, p in wrappers.parameters_of(stage).items()}

    def of_all_stages(self, own: dict[str, Any]) -> dict[str, Any]:
        gathered: list[dict[str, Any]] = [{}] * self.model.group.size()
        dist.all_gather_object(gathered, own, group=self.model.group)
        return {name: value for each in gathered for name, value in each.items()}

    def gradients(self) -> dict[str, Tensor | None]:
        own = {name: each.grad for name, each in self.own().items()}
        return self.of_all_stages({name: None if each is None else wrappers.full(each) for name, each in own.items()})

    def copy_weights(self) -> None:
        weights = self.of_all_stages({name: wrappers.full(each.detach()) for name, each in self.own().items()})
        for each in (self.reference, self.same_dtype):
            each.load_state_dict(weights)


BITS = "bits:plain:{}:auto:calls:list:weigh:two-samples:forward_backward:loose"
SOME = "float64:plain:{}:auto:calls:list:late:one-sample:forward_backward:tight"  # of so many data ranks


def exact_after_a_fault(wrapper: str) -> dict[str, Any]:
    """A loss raises in the last microbatch of a step; then what comes, through the same stages."""
    this = PipelineRun(Cell.parse(SOME.format(dist.get_world_size() // 2)), "1F1B", wrapper)
    (call, *_), *_ = this.updates()
    num_calls = 0

    def loss_fn(model: nn.Module, microbatch: Any) -> Any:
        nonlocal num_calls
        sums = this.sums(model, microbatch)["loss"]
        num_calls += 1
        return sums if num_calls < 3 else None

    said = "nothing"
    try:
        GradientAccumulator(this.model, micro_batch_size=1).forward_backward(this.batch(call), loss_fn)
    except MegabatchError as error:
        said = str(error).removeprefix("data rank 0 of 1: ").removeprefix("data rank 0 of 2: ")
    return {"said": said, **harness.run(this)}


def counts(wrapper: str, microbatches: str, calls: str) -> dict[str, int]:
    """Reductions of one update, in the steady state."""
    this = PipelineRun(Cell.parse(SOME.format(dist.get_world_size() // 2)), "1F1B", wrapper)
    gradient = GradientAccumulator(this.model, micro_batch_size=1)
    batch = {name: torch.ones(int(microbatches), 3, dtype=torch.long) for name in ("input_ids", "labels")}

    def update() -> None:
        for _ in range(int(calls)):
            gradient.forward_backward(batch, losses.next_token)
        assert gradient.finalize().num_microbatches == int(microbatches) * int(calls)

    update()
    with Collectives() as collectives:
        update()
    return {name: collectives.table().get(name, 0) for name in ("reduce_scatter", "all_reduce")}


LENGTHS = [3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 9, 10, 11, 12, 14, 16, 19, 24, 31, 40]  # skewed, as those of text are
CAP_TOKENS = 48


@loss(weigh=lambda microbatch: len(microbatch["labels"]))
def squared(model: Any, microbatch: Any) -> Any:
    """Integers from integers. Its weight counts samples, so that the update's is a power of two."""
    labels = microbatch["labels"]  # [B, T]
    return (((model(microbatch["input_ids"]) - labels) * (labels != -100)) ** 2).sum(), len(labels)


def ragged_call(call: int, data_degree: int) -> list[list[dict[str, Tensor]]]:
    """The samples of each data rank: 32 in all, the longest of them on the first rank, and none after the second."""
    numbers = torch.Generator().manual_seed(call)
    samples = [
        {name: torch.randint(1, 5, (length,), generator=numbers) for name in ("input_ids", "labels")}
        for length in sorted(LENGTHS[call:] + LENGTHS[: 12 + call], reverse=True)
    ]
    starts = [0, *[20, 32, 32][: data_degree - 1], 32]
    return [samples[start:end] for start, end in pairwise(starts)]


def noting_shapes(this: PipelineRun) -> list[tuple[int, int]]:
    """Return a list to which the first stage appends the rows and columns of each of its forwards."""
    shapes = list[tuple[int, int]]()

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        shapes.append(tuple(inputs[0].shape))

    if this.model.indices[0] == 0:
        getattr(this.model.stages[0], "module", this.model.stages[0]).register_forward_pre_hook(note)
    return shapes


def ragged(kind: str, schedule: str, wrapper: str) -> dict[str, Any]:
    """Two calls with samples of unequal lengths: their gradient, schedule steps, tokens and reductions."""
    degree = dist.get_world_size() // 2
    this = PipelineRun(Cell.parse((SOME if kind == "language" else BITS).format(degree)), schedule, wrapper)
    loss_fn = losses.next_token if kind == "language" else squared
    gradient = GradientAccumulator(this.model, max_microbatch_tokens=CAP_TOKENS)
    shapes, calls = noting_shapes(this), [ragged_call(call, degree) for call in range(2)]
    steps, weight = list[tuple[int, ...]](), 0
    for sample in (sample for shares in calls for share in shares for sample in share):
        total, number = loss_fn(this.reference, {name: value[None] for name, value in sample.items()})
        total.backward()
        weight += int(number)
    with Collectives() as collectives:
        for shares in calls:
            gradient.forward_backward(shares[this.rank], loss_fn)
            steps.append(gradient.last_plan.steps)
        gradient.finalize()
    found = this.gradients()
    return {
        "gradient": max(
            float((found[name] - each.grad / weight).norm() / (each.grad / weight).norm().clamp(min=1e-9))
            for name, each in this.reference.named_parameters()
        ),
        "steps": steps,
        "computed": sum(rows * longest for rows, longest in shapes),
        "most": max((rows * longest for rows, longest in shapes), default=0),
        "reductions": {name: collectives.table().get(name, 0) for name in ("reduce_scatter", "all_reduce")},
    }


def evaluated(schedule: str, wrapper: str) -> dict[str, Any]:
    """Microbatches of unequal lengths, forward only: the error of their terms, and the computed tokens."""
    degree = dist.get_world_size() // 2
    this = PipelineRun(Cell.parse(SOME.format(degree)), schedule, wrapper)
    samples = ragged_call(0, degree)[this.rank][:12]
    microbatches = [pad_right(samples[2 * index : 2 * index + 2]) for index in (3, 0, 5, 1, 4, 2)]
    shapes, wrong = noting_shapes(this), 0.0
    found = evaluate(this.model, microbatches, losses.next_token)
    for terms, microbatch in zip(found, microbatches, strict=True):
        total, weight = terms["loss"]
        expected, counted = losses.next_token(this.reference, microbatch)
        wrong = max(wrong, abs(float(total / expected - 1)), abs(int(weight) - int(counted)))
    computed = sum(rows * longest for rows, longest in shapes)
    return {"error": wrong, "computed": computed, "in_one_shape": 12 * len(samples[0]["labels"])}


def unreadable(wrapper: str) -> list[str]:
    """A batch that cannot be measured on the second data rank: what this rank is told, and in a call after it."""
    this = PipelineRun(Cell.parse(SOME.format(dist.get_world_size() // 2)), "1F1B", wrapper)
    gradient = GradientAccumulator(this.model, max_microbatch_tokens=CAP_TOKENS)
    share = ragged_call(0, 2)[this.rank]
    wrong = [{name: value[:0] for name, value in share[0].items()}]
    batches = [wrong if this.rank else share, share]
    return [told(lambda batch=batch: gradient.forward_backward(batch, losses.next_token)) for batch in batches]


JOBS: dict[str, Callable[..., Any]] = {
    "fault": exact_after_a_fault, "counts": counts, "ragged": ragged, "evaluated": evaluated, "unreadable": unreadable,
}  # fmt: skip


def run_job(name: str) -> Any:
    """The job "schedule/wrapper/cell", or one of `JOBS` with what it is given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about gloo and about plans that name parts of other stages
        kind, *rest = name.split("/")
        if kind in JOBS:
            return JOBS[kind](*rest)
        if kind == "told":
            return failures.JOBS[rest[0]][0]()
        return harness.run(PipelineRun(Cell.parse(rest[1]), kind, rest[0]))

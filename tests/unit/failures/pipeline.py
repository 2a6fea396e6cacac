"""Pipelines that cannot be run exactly, on one rank and on two."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, JointLoss, LossContractError, MegabatchError
from megabatch.pipeline.run import Pipeline, evaluate
from tests.unit.failures.table import SAMPLES, Failure, linear, squares, told
from tests.unit.failures.wrappers import fsdp1, mesh, root_left_out

NO_AXIS = "'dp' … 'pp'"
NO_SCHEDULE = "'gpipe'"
TWO_STAGES = "1 … runs 1 stages … given 2"
NO_STAGE = "LoopedBFS … given 0"
FROZEN = "requires a gradient"
INSIDE = "inside a stage"
FSDP1 = "FSDP1"
DDP_SPLIT = "ZBVZeroBubble … DDP"
STATIC_GRAPH = "DDP … static_graph"
EVERY = "'every'"
CALLED = "cannot be called"
OTHER_MESH = "mesh="
NOT_CALLED = "it is given"
CALLED_TWICE = "model 2 times"
DRAWS = "calls the model"
AUTOCAST = "torch.autocast … torch.no_grad"
GRADIENT = "carries a gradient"
NO_META = "boundary= … output= … torch.Size … [2, 1]"
OUTPUT = "stage 0 returned … [((2, 1), torch.float64)] … [((2, 2), torch.float64)]"
NO_TENSOR = "stage 0 returned"
NO_ROWS = "of 1 rows … to 2 … output= … dim 0"
OTHER_INPUTS = "of one call"
OTHER_DIMS = "[(2, 1, 1), (2, 1, 2)]"
BOUNDARY = "stage 0 returned … [((1, 1), torch.float64)] … [((1, 2), torch.float64)]"
MICROBATCHES = "rank 0 were"
STAGES = "of their stages"
DETACHED = "stage 0 returned"
AS_MANY = "given 1 and … 2 microbatches"
JOINT = "JointLoss"
STEPS = "(1, 3) microbatches"
OTHER_STEPS = "other schedule steps"


def said(*shape: int) -> Callable[..., Tensor]:
    return lambda x: torch.empty(*(shape or x.shape), dtype=torch.float64, device="meta")


def pipeline(*stages: nn.Module, schedule: str = "GPipe", axes: tuple[str, ...] = ("dp", "pp"), **said_of: Any) -> Any:
    """One rank holds all stages."""
    shapes = {"boundary": said(), "output": said()} | said_of
    return Pipeline(stages or [linear()], mesh(*axes), schedule=schedule, **shapes)


def update(loss_fn: Any = squares, model: Pipeline | None = None, batch: Any = SAMPLES, **settings: Any) -> Any:
    gradient = GradientAccumulator(model or pipeline(), **{"micro_batch_size": 2, **settings})
    return gradient.forward_backward(batch, loss_fn)


def _without_call(model: Any, microbatch: Any) -> Any:
    return microbatch["x"].sum(), 1


def _twice(model: Any, microbatch: Any) -> Any:
    return model(microbatch["x"]).sum() + model(microbatch["x"]).sum(), 1


def _with_noise(model: Any, microbatch: Any) -> Any:
    return model(torch.randn_like(microbatch["x"])).sum(), 1


def _in_autocast(model: Any, microbatch: Any) -> Any:
    with torch.autocast("cpu"):
        return model(microbatch["x"]).sum(), 1


def _of_a_gradient(model: Any, microbatch: Any) -> Any:
    return model(microbatch["x"].requires_grad_()).sum(), 1


def _of_other_names(model: Any, microbatch: Any) -> Any:
    x = microbatch["x"]
    return (model(x) if x[0] > 2 else model(input=x)).sum(), 1


def _wider(model: Any, microbatch: Any) -> Any:
    x = microbatch["x"][:, None]
    return model(x if x[0] > 2 else x.expand(2, 1, 2)).sum(), 1


def _frozen() -> nn.Module:
    return linear().requires_grad_(False)


class _Detaches(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class _Says(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return "something"


def _with_steps(model: Pipeline, *steps: int) -> None:
    gradient = GradientAccumulator(model, micro_batch_size=1)
    gradient.forward_backward(SAMPLES, squares, plan=replace(gradient.plan(SAMPLES), steps=steps))


def _own_loop() -> None:
    GradientAccumulator(pipeline(), micro_batch_size=1).microbatch(0, of=1, sum_over=1).__enter__()


FAILURES = {
    "a mesh without pp": Failure(NO_AXIS, lambda: pipeline(axes=("dp",))),
    "an unknown schedule": Failure(NO_SCHEDULE, lambda: pipeline(schedule="gpipe")),
    "too many stages": Failure(TWO_STAGES, lambda: pipeline(linear(), linear(), schedule="1F1B")),
    "no stage": Failure(
        NO_STAGE, lambda: Pipeline([], mesh("dp", "pp"), schedule="LoopedBFS", boundary=said(), output=said())
    ),
    "a frozen stage": Failure(FROZEN, lambda: pipeline(_frozen())),
    "a wrapper inside a stage": Failure(INSIDE, lambda: pipeline(root_left_out())),
    "FSDP1": Failure(FSDP1, lambda: pipeline(fsdp1(linear()))),
    "DDP and split backwards": Failure(
        DDP_SPLIT, lambda: pipeline(*(DistributedDataParallel(linear()) for _ in range(2)), schedule="ZBVZeroBubble")
    ),
    "DDP with a static graph": Failure(
        STATIC_GRAPH, lambda: pipeline(DistributedDataParallel(linear(), static_graph=True))
    ),
    "sync": Failure(EVERY, lambda: update(sync="every")),
    "sync of some": Failure("'every:2' … a pipeline reduces once", lambda: update(sync="every:2")),
    "a pipeline that is called": Failure(CALLED, lambda: pipeline()(SAMPLES[0]["x"]), MegabatchError),
    "another mesh": Failure(OTHER_MESH, lambda: update(mesh=mesh("dp_shard", "pp"))),
    "a joint loss": Failure(JOINT, lambda: update(JointLoss(_without_call, _without_call))),
    "a loop of one's own": Failure("a pipeline … microbatch", _own_loop),
    "a loss that does not call": Failure(NOT_CALLED, lambda: update(_without_call)),
    "a loss that calls twice": Failure(CALLED_TWICE, lambda: update(_twice), LossContractError),
    "a loss that draws": Failure(DRAWS, lambda: update(_with_noise)),
    "autocast": Failure(AUTOCAST, lambda: update(_in_autocast)),
    "an input with a gradient": Failure(GRADIENT, lambda: update(_of_a_gradient)),
    "other arguments": Failure(OTHER_INPUTS, lambda: update(_of_other_names)),
    "other dims": Failure(OTHER_DIMS, lambda: update(_wider)),
    "steps that a schedule cannot run": Failure(
        STEPS, lambda: _with_steps(pipeline(linear(), linear(), schedule="DualPipeV"), 1, 3)
    ),
    "steps that are too few": Failure("(1,) microbatches", lambda: _with_steps(pipeline(), 1)),
    "a size for a shape": Failure(NO_META, lambda: update(model=pipeline(output=lambda x: x.shape))),
    "another output": Failure(OUTPUT, lambda: update(model=pipeline(output=said(2, 2)))),
    "an output that is no tensor": Failure(NO_TENSOR, lambda: update(model=pipeline(_Says(1, 1).double()))),
    "a detached output": Failure(DETACHED, lambda: update(model=pipeline(_Detaches(1, 1).double()))),
    "an output without rows": Failure(NO_ROWS, lambda: update(model=pipeline(output=said(2, 1)), batch=SAMPLES[:3])),
}


def over_two(axes: tuple[str, ...] = ("pp",), num_stages: int = 1, schedule: str = "1F1B", **said_of: Any) -> Pipeline:
    made = init_device_mesh("cpu", (*[2] * len(axes[:-1]), dist.get_world_size() // 2 ** len(axes[:-1])),
                            mesh_dim_names=axes)  # fmt: skip
    shapes = {"boundary": said(), "output": said()} | said_of
    return Pipeline([linear() for _ in range(num_stages)], made, schedule=schedule, **shapes)


def wrong_boundary() -> str:
    model = over_two(boundary=lambda x: torch.empty(len(x), 2, dtype=torch.float64, device="meta"))
    return told(lambda: update(model=model, micro_batch_size=1))


def other_microbatches() -> str:
    def collate(samples: list[Any]) -> Any:
        return {"x": torch.stack([each["x"] for each in samples]) + dist.get_rank()}

    return told(lambda: update(model=over_two(), collate=collate))


def other_numbers_of_stages() -> str:
    return told(lambda: update(model=over_two(num_stages=1 + dist.get_rank(), schedule="LoopedBFS")))


def other_schedule_steps() -> str:
    return told(lambda: _with_steps(over_two(), *[(4,), (2, 2)][dist.get_rank()]))


def other_numbers_of_microbatches() -> str:
    some = [{"x": torch.ones(2, 1, dtype=torch.float64)}] * (1 + dist.get_rank())
    return told(lambda: evaluate(over_two(), some, squares))


class _Raises(nn.Linear):
    """A stage that fails in its third microbatch."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 3:
            raise ZeroDivisionError("in the second stage")
        return super().forward(x)


def stage_raises() -> str:
    model = over_two()
    if dist.get_rank() == 1:
        model = Pipeline([_Raises(1, 1).double()], model.mesh, boundary=said(), output=said())
    return told(lambda: update(model=model, micro_batch_size=1))


def spread_stage_raises() -> str:
    """On both ranks, whose group can then go on; `tests.exact.leaving` has one that leaves the others waiting."""
    axes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    stage = fully_shard(_Raises(1, 1).double(), mesh=axes["dp"])
    model = Pipeline([stage], axes, boundary=said(), output=said(), schedule="GPipe")
    return told(lambda: update(model=model, micro_batch_size=1))


def loss_raises() -> str:
    def loss_fn(model: Any, microbatch: Any) -> Any:
        return squares(model, microbatch) if microbatch["x"][0] < 3 else {}["no such key"]

    return told(lambda: update(loss_fn, over_two()))


def _no_pair_at_last(model: Any, microbatch: Any) -> Any:
    total, _ = squares(model, microbatch)
    return (total, 1) if microbatch["x"][0] < 3 else total


def loss_raises_at_last() -> str:
    return told(lambda: update(_no_pair_at_last, over_two()))


MEAN = "()"
RAISED = "ZeroDivisionError: in the second stage"
JOBS: dict[str, tuple[Callable[[], str], list[str]]] = {  # what each rank is told
    "another boundary": (wrong_boundary, [f"PlanError: {BOUNDARY}", f"PlanError: data rank 0 of 1: {BOUNDARY}"]),
    "microbatches that differ": (other_microbatches, [f"PlanError: {MICROBATCHES}"] * 2),
    "other numbers of stages": (other_numbers_of_stages, [f"PlanError: {STAGES}"] * 2),
    "other schedule steps": (other_schedule_steps, [f"PlanError: {OTHER_STEPS}"] * 2),
    "other numbers of microbatches": (other_numbers_of_microbatches, [f"PlanError: {AS_MANY}"] * 2),
    "a loss that gives no pair in an evaluation": (
        lambda: told(lambda: evaluate(over_two(), SAMPLES, _no_pair_at_last)),
        [f"LossContractError: … data rank 0 of 1 … {MEAN}", f"LossContractError: {MEAN}"],
    ),
    "a stage that raises": (stage_raises, [f"PlanError: data rank 0 of 1: {RAISED}", RAISED]),
    "a stage that raises where ranks wait for it": (spread_stage_raises, [f"MegabatchError: stage 0 … {RAISED}"] * 2),
    "a loss that raises": (loss_raises, ["KeyError: 'no such key'"] * 2),
    "a loss that gives no pair": (
        loss_raises_at_last,
        [f"LossContractError: … data rank 0 of 1 … {MEAN}", f"LossContractError: {MEAN}"],
    ),
}

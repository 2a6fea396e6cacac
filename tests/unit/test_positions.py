"""Ranks that make other calls are told so on all ranks, in one line that says which rank is where."""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, JointLoss, Learner, MegabatchError, losses
from megabatch.core.mesh import DataRanks, num_collectives
from megabatch.guards.error_broadcast import ErrorBroadcast
from tests.exact.launch import of_ranks
from tests.tiers import full_unless

BATCH = {"x": torch.ones(3, 2), "labels": torch.ones(3, 1)}
WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp2": fully_shard,
    "hsdp": lambda model: fully_shard(
        model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    ),
}
Act = Callable[[GradientAccumulator, bool], Any]  # of an accumulator, and whether this rank is the odd one


def call(gradient: GradientAccumulator) -> Any:
    return gradient.forward_backward(BATCH, losses.mse)


def update(gradient: GradientAccumulator, num_calls: int = 1) -> Any:
    for _ in range(num_calls):
        call(gradient)
    return gradient.finalize()


def loop(gradient: GradientAccumulator) -> None:
    with gradient.microbatch(0, of=1, sum_over=3) as part:
        part.scale(losses.mse(gradient.model, BATCH)[0]).backward()


def fewer_calls(gradient: GradientAccumulator, is_odd: bool) -> None:
    update(gradient, 2 if is_odd else 3)


def fewer_calls_after_open(gradient: GradientAccumulator, is_odd: bool) -> None:
    gradient.open()
    update(gradient, 2 if is_odd else 3)


def evaluation_alone(gradient: GradientAccumulator, is_odd: bool) -> None:
    call(gradient)
    if is_odd:
        gradient.evaluate(BATCH, losses.mse)
    gradient.finalize()


def outputs_alone(gradient: GradientAccumulator, is_odd: bool) -> None:
    if is_odd:
        gradient.forward(BATCH, lambda model, microbatch: model(microbatch["x"]))
    update(gradient)


def forgotten_finalize(gradient: GradientAccumulator, is_odd: bool) -> None:
    call(gradient)
    if not is_odd:
        gradient.finalize()
    update(gradient)


def discarded_alone(gradient: GradientAccumulator, is_odd: bool) -> None:
    update(gradient)
    if is_odd:
        gradient.discard()
    update(gradient)


def skipped_by_discard(gradient: GradientAccumulator, is_odd: bool) -> None:
    for number in range(3):
        call(gradient)
        if is_odd and number == 1:
            gradient.discard()
        else:
            gradient.finalize()


def opened_alone(gradient: GradientAccumulator, is_odd: bool) -> None:
    if is_odd:
        gradient.open()
    update(gradient)


def loop_alone(gradient: GradientAccumulator, is_odd: bool) -> None:
    if is_odd:
        loop(gradient)
    else:
        call(gradient)
    gradient.finalize()


def caught_error(gradient: GradientAccumulator, is_odd: bool) -> None:
    if not is_odd:
        call(gradient)
    update(gradient)


def other_accumulator(gradient: GradientAccumulator, is_odd: bool) -> None:
    second = GradientAccumulator(nn.Linear(2, 1), micro_batch_size=2)
    update(second if is_odd else gradient)


def learner_alone(gradient: GradientAccumulator, is_odd: bool) -> None:
    learner = Learner(gradient.model, torch.optim.SGD(gradient.model.parameters(), lr=0.1), gradient)
    learner.forward_backward(BATCH, losses.mse)
    learner.optim_step()
    if is_odd:
        learner.forward_backward(BATCH, losses.mse)
    learner.forward_backward(BATCH, losses.mse)
    learner.optim_step()


ACTS: dict[str, tuple[Act, tuple[str, ...]]] = {  # and parts of the line
    "fewer calls": (fewer_calls, ("finalize() of update 0", "forward_backward(), call 3 of update 0")),
    "fewer calls after open": (fewer_calls_after_open, ("finalize()", "call 3")),
    "evaluation alone": (evaluation_alone, ("evaluate()", "finalize()")),
    "outputs alone": (outputs_alone, ("forward()", "forward_backward(), call 1")),
    "forgotten finalize": (forgotten_finalize, ("finalize() of update 0", "forward_backward(), call 2 of update 0")),
    "discarded alone": (discarded_alone, ("after 1 discarded", "after 0 discarded")),
    "skipped by discard": (skipped_by_discard, ("finalize() of update 1", "forward_backward(), call 1 of update 1")),
    "opened alone": (opened_alone, ("open()", "forward_backward()")),
    "loop alone": (loop_alone, ("microbatch()", "forward_backward()")),
    "caught error": (caught_error, ("finalize()", "call 2")),
    "other accumulator": (other_accumulator, ("of accumulator",)),
    "learner alone": (learner_alone, ("finalize() of update 1", "forward_backward(), call 2 of update 1")),
}
JOBS = [f"{name}:{wrap}:{world}:" for wrap in ("plain", "ddp", "fsdp2") for name in ACTS for world in (2, 3)]
JOBS += [f"{name}:hsdp:4:" for name in ACTS if name != "other accumulator"]  # whose ranks are others


def run_job(job: str) -> str:
    """Return the error of this rank, or "nothing"."""
    name, wrap, world, _ = job.split(":")
    torch.manual_seed(0)
    gradient = GradientAccumulator(WRAPS[wrap](nn.Linear(2, 1)), micro_batch_size=2)
    try:
        ACTS[name][0](gradient, dist.get_rank() == int(world) - 1)
    except MegabatchError as error:
        return str(error)
    return "nothing"


errors = of_ranks("tests.unit.test_positions:run_job", JOBS, group_timeout_seconds=20.0)


@pytest.mark.parametrize("job", full_unless(JOBS, lambda number, job: "fsdp2:3" not in job and "hsdp" not in job))
def test_all_ranks_say_which_rank_is_where(errors, job: str) -> None:
    name, _, world, _ = job.split(":")
    lines = errors(job)
    assert len(set(lines)) == 1, lines
    others = {"2": "rank 0 is", "3": "ranks 0, 1 are", "4": "ranks 0, 1, 2 are"}[world]
    for words in (f"rank {int(world) - 1} is", others, *ACTS[name][1]):
        assert words in lines[0]


def _loss(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
    return (model(microbatch["x"]) - microbatch["labels"]).square().sum(), len(microbatch["x"])


def mean_on_one_rank(model: nn.Module, microbatch: Any) -> Any:
    total, weight = _loss(model, microbatch)
    return total / weight if dist.get_rank() else (total, weight)


def error_on_one_rank(model: nn.Module, microbatch: Any) -> Any:
    if dist.get_rank():
        raise ArithmeticError("a bad sample")
    return _loss(model, microbatch)


def encode_on_one_rank(model: nn.Module, microbatch: Any) -> Tensor:
    if dist.get_rank():
        raise ArithmeticError("a bad sample")
    return model(microbatch["x"])


def weight_on_one_rank(model: nn.Module, microbatch: Any) -> Any:
    total, weight = _loss(model, microbatch)
    return total, -weight if dist.get_rank() else weight


joint_on_one_rank = JointLoss(encode_on_one_rank, lambda output: (output.square().sum(), len(output)))
TOLD: dict[str, tuple[Act, str, str]] = {  # what fails on rank 1, and the kinds of error there and on rank 0
    "mean": (lambda gradient, _: _finish(gradient, mean_on_one_rank), "LossContractError", "LossContractError"),
    "weight": (lambda gradient, _: _finish(gradient, weight_on_one_rank), "LossContractError", "LossContractError"),
    "loss": (lambda gradient, _: _finish(gradient, error_on_one_rank), "ArithmeticError", "MegabatchError"),
    "encode": (lambda gradient, _: _finish(gradient, joint_on_one_rank), "ArithmeticError", "LossContractError"),
    "evaluate": (
        lambda gradient, _: gradient.evaluate(BATCH, error_on_one_rank), "ArithmeticError", "MegabatchError",
    ),
    "norm": (lambda gradient, _: _clip_on_one_rank(gradient), "PlanError", "PlanError"),
}  # fmt: skip


def _clip_on_one_rank(gradient: GradientAccumulator) -> None:
    call(gradient)
    gradient.finalize(max_norm=-1.0 if dist.get_rank() else 1.0)


def _finish(gradient: GradientAccumulator, loss_fn: Any) -> None:
    gradient.forward_backward(BATCH, loss_fn)
    gradient.finalize()


def told_job(job: str) -> list[str]:
    """Return the kind and the text of this rank's error. The rank that has failed makes its next call."""
    name, *_ = job.split(":")
    torch.manual_seed(0)
    gradient = GradientAccumulator(nn.Linear(2, 1), micro_batch_size=2)
    try:
        TOLD[name][0](gradient, False)
    except Exception as raised:
        error = raised
    if dist.get_rank() or name == "encode":
        with contextlib.suppress(MegabatchError):
            update(gradient)
    return [type(error).__name__, str(error)]


told = of_ranks("tests.unit.test_positions:told_job", [f"{name}:2:" for name in TOLD], group_timeout_seconds=20.0)


@pytest.mark.parametrize("name", list(TOLD))
def test_an_error_of_one_rank_is_told_to_all(told, name: str) -> None:
    heard, raised = told(f"{name}:2:")
    assert [raised[0], heard[0]] == [*TOLD[name][1:]]
    assert "rank 1 of 2" in heard[1]
    assert raised[1] in heard[1]
    assert len(heard[1].splitlines()) == 1


def count_job(job: str) -> list[int]:
    """Return the collectives of a call, of its finalize, and of an evaluation."""
    wrap, *_ = job.split(":")
    torch.manual_seed(0)
    gradient, counts = GradientAccumulator(WRAPS[wrap](nn.Linear(2, 1)), micro_batch_size=3), []
    update(gradient)
    for act in (call, GradientAccumulator.finalize, lambda gradient: gradient.evaluate(BATCH, losses.mse)):
        before = num_collectives()
        act(gradient)
        counts.append(num_collectives() - before)
    return counts


# A group counts each message twice. A call begins with one, finalize has one, and an evaluation has both. The others
# are the wrapper's: layouts and gradients of two parameters, buckets and their order, what FSDP2 gathers and reduces.
EXPECTED = {"plain": [2, 6, 4], "ddp": [8, 2, 4], "fsdp2": [6, 2, 8]}
counts = of_ranks("tests.unit.test_positions:count_job", [f"{wrap}:2:" for wrap in EXPECTED])


@pytest.mark.parametrize("wrap", EXPECTED)
def test_positions_take_no_message_of_their_own(counts, wrap: str) -> None:
    for found in counts(f"{wrap}:2:"):
        assert found == EXPECTED[wrap]


def share_job(job: str) -> list[Any]:
    """Exchange objects of other sizes."""
    gradient = GradientAccumulator(nn.Linear(2, 1), micro_batch_size=1)
    value: dict[str, Tensor] = {"x": torch.arange(dist.get_rank() * 5)}
    return [len(each["x"]) for each in gradient.ranks.exchange_objects(value)]


shares = of_ranks("tests.unit.test_positions:share_job", ["objects:3:"])


def test_objects_of_several_sizes_are_exchanged(shares) -> None:
    for found in shares("objects:3:"):
        assert found == [0, 5, 10]


def device_job(job: str) -> str:
    """Return the error of ranks of which some end an update as on a device, or "nothing"."""
    which, world, _ = job.split(":")
    rank, degree = dist.get_rank(), int(world)
    ends = {"one": rank > 0, "half": rank < degree // 2, "all": True}[which]
    sizes, names = ((degree // 2, 2), ("dp_replicate", "dp_shard")) if degree > 2 else ((degree,), ("dp",))
    ranks = DataRanks.of_mesh(init_device_mesh("cpu", sizes, mesh_dim_names=names))
    position = ranks.position
    try:
        position.verb, position.call = "forward_backward()", 1
        ranks.exchange_numbers([1.0])
        if ends:
            position.verb = "finalize()"
            ranks.send_position()
            position.verb, position.update, position.call = "forward_backward()", 1, 1
        else:
            position.call = 2
        ranks.exchange_numbers([1.0])
    except MegabatchError as error:
        return str(error)
    return "nothing"


DEVICE_JOBS = ["one:2:", "all:2:", "half:4:", "all:4:"]  # of four ranks, each meets one of the other half
device_errors = of_ranks("tests.unit.test_positions:device_job", DEVICE_JOBS, group_timeout_seconds=20.0)


@pytest.mark.parametrize("job", full_unless(DEVICE_JOBS, lambda number, job: ":2:" in job))
def test_a_host_that_does_not_wait_at_the_end_of_an_update_meets_the_others(device_errors, job: str) -> None:
    lines = device_errors(job)
    if job.startswith("all"):
        assert lines == ["nothing"] * len(lines)
        return
    for line in lines:
        assert "in finalize() of update 0" in line
        assert "in forward_backward(), call 2 of update 0" in line


def alone_job(job: str) -> str:
    """Return the error of a rank, and leave its groups as a process does that ends, which breaks messages of others."""
    error = alone_error(job.split(":")[0])
    gc.collect()
    dist.destroy_process_group()
    return error


def alone_error(way: str) -> str:
    """Return the error of four ranks of which the last makes a second call, and the others end the update.

    On a device a message shows a rank its row and its column. The end of an update on the CPU is one message.
    """
    names = {"device": ("dp_replicate", "dp_shard"), "tp": ("dp", "tp")}[way]
    ranks = DataRanks.of_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
    position = ranks.position
    try:
        with ErrorBroadcast(ranks, torch.device("cpu")).listening("a call"):
            position.verb, position.call = "forward_backward()", 1
            ranks.exchange_numbers([1.0])
            if dist.get_rank() == 3:
                position.call = 2
            else:
                position.verb = "finalize()"
                if way == "device":
                    ranks.send_position()
                else:
                    ranks.gather_report(torch.ones(3))
                position.verb, position.update, position.call = "forward_backward()", 1, 1
            ranks.exchange_numbers([1.0])
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "nothing"


ALONE = [f"{inner}:4:" for inner in ("device", "tp")]
alone_errors = of_ranks("tests.unit.test_positions:alone_job", ALONE, group_timeout_seconds=20.0)


@pytest.mark.full
@pytest.mark.parametrize("job", ALONE)
def test_a_rank_that_no_message_shows_the_others_is_told(alone_errors, job: str) -> None:
    for line in alone_errors(job):
        assert "in finalize() of update 0" in line
        assert "rank 3 is in forward_backward(), call 2 of update 0" in line


def report_job(job: str) -> list[float]:
    """Return what a rank reads of the report of an update's end: each rank tells its own number."""
    ranks = DataRanks.of_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    return ranks.gather_report(torch.tensor([float(dist.get_rank())])).flatten().tolist()


reports = of_ranks("tests.unit.test_positions:report_job", ["report:4:"])


def test_the_report_of_an_update_is_of_the_ranks_with_other_samples(reports) -> None:
    assert reports("report:4:") == [[0, 2], [1, 3], [0, 2], [1, 3]]

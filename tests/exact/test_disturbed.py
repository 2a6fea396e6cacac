"""An error in an update is raised on every rank, and nothing of it is left in the next."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from megabatch import GradientAccumulator, LossContractError, MegabatchError, loss
from tests.exact import functions, harness, models, oracle
from tests.exact.cells import MAIN, OTHERS, Cell
from tests.exact.launch import of_ranks
from tests.exact.wrappers import WRAPPERS, Wrapped
from tests.tiers import some

Loss = Callable[[Wrapped, oracle.Sample], tuple[Tensor, Tensor]]


class InterruptedLossError(Exception):
    """The user's own loss fails."""


def _weigh(microbatch: oracle.Sample) -> Tensor:
    return functions.tokens_weights(microbatch)["loss"]


def _pair(model: Wrapped, microbatch: oracle.Sample) -> tuple[Tensor, Tensor]:
    return functions.tokens_sums(models.called(model), microbatch)["loss"]


def nan(this: harness.CellRun) -> Loss:
    """One microbatch of the last rank is not a number."""

    def spoiled(model: Wrapped, microbatch: oracle.Sample) -> tuple[Tensor, Tensor]:
        total, weight = _pair(model, microbatch)
        return (total * float("nan") if this.rank == this.cell.data_degree - 1 else total), weight

    return loss(weigh=_weigh)(spoiled)


def mismatch(this: harness.CellRun) -> Loss:
    """The last rank counts the label at position 0, which the causal shift never uses."""

    def count(microbatch: oracle.Sample) -> Tensor:
        if this.rank == this.cell.data_degree - 1:
            return (microbatch["labels"] != -100).sum()
        return _weigh(microbatch)

    return loss(weigh=count)(_pair)


def interrupted(this: harness.CellRun) -> Loss:
    """The loss raises in its second microbatch, on every rank."""
    calls = iter(range(1000))

    def fails(model: Wrapped, microbatch: oracle.Sample) -> tuple[Tensor, Tensor]:
        pair = _pair(model, microbatch)
        if next(calls) == 1:
            raise InterruptedLossError
        return pair

    return loss(weigh=_weigh)(fails)


def unweighed_terms(this: harness.CellRun) -> Loss:
    """Two differentiable terms, and nobody says what each is divided by."""

    def two(model: Wrapped, microbatch: oracle.Sample) -> Any:
        sums = functions.tokens_sums(models.called(model), microbatch)
        return {name: sums[name] for name in ("loss", "positive")}

    return two


def taken_apart(this: harness.CellRun) -> Loss:
    """The loss takes its microbatch apart, and a rank without samples runs another's over and over."""

    def pair(model: Wrapped, microbatch: oracle.Sample) -> tuple[Tensor, Tensor]:
        return _pair(model, {name: microbatch.pop(name) for name in list(microbatch)})

    return pair


DISTURBED = {each.__name__: each for each in (nan, mismatch, interrupted, unweighed_terms, taken_apart)}
EXPECTED = {
    "nan": "finite=False", "mismatch": LossContractError.__name__, "interrupted": InterruptedLossError.__name__,
    "unweighed_terms": LossContractError.__name__, "left_early": MegabatchError.__name__,
    "taken_apart": "finite=True",
}  # fmt: skip


def run_job(name: str) -> dict[str, Any]:
    """The job "disturbance:wrapper:world:sync": what happened, and the error of the next update."""
    if name == PARTLY:
        return _partly_gathered()
    if name in STALE:
        return _stepped_after_a_forward(name.split(":")[-1])
    disturbance, wrapper, world, sync = name.split(":")
    values = ("bits", wrapper, world, sync, "C5", "list", "weigh", "one-sample", "forward_backward", "no-clip")
    this = harness.CellRun(Cell.parse(":".join(values)))
    (calls,) = this.updates()
    gradient = GradientAccumulator(this.model, mesh=this.mesh, micro_batch_size=1, sync=sync)
    batch = [] if disturbance == "taken_apart" and this.rank else this.batch(calls[0])
    if disturbance == "left_early":
        happened = _left_early(gradient, this, batch)
    else:
        happened = _happens(gradient, batch, DISTURBED[disturbance](this))
    for _ in range(2):  # what leaks would leak into the next update, or be doubled in the one after it
        gradient.forward_backward(this.batch(calls[0]), this.loss_fn())
        harness.judge(this, gradient.finalize(), calls, None)
    return {"happened": happened, "gradient": this.found.gradient, "wrong": this.found.wrong}


def _partly_gathered() -> dict[str, Any]:
    """A forward without a backward leaves a block on parts of the ranks, then an update gathers once."""
    reference = models.integer_model("tokens")
    model, ids = copy.deepcopy(reference), torch.tensor([[1, 2, 3], [3, 5, 7]])
    fully_shard(model.blocks[0], reshard_after_forward=2)
    fully_shard(model)
    parameters = dict(model.named_parameters())
    gradient = GradientAccumulator(model, micro_batch_size=1, sync="gather_once")
    for _ in range(2):  # FSDP2 begins with its first forward
        with torch.no_grad():
            model(ids)
        gradient.forward_backward({"input_ids": ids}, lambda model, batch: (model(batch["input_ids"]).sum(), 1))
        gradient.finalize()
    (reference(ids).sum() / 2).backward()
    pairs = [(parameters[name].grad.full_tensor(), each.grad) for name, each in reference.named_parameters()]
    return {"gradient": max(float((found - expected).abs().max()) for found, expected in pairs)}


def _stepped_after_a_forward(sync: str) -> dict[str, Any]:
    """A forward without a backward leaves weights gathered, and the optimizer then steps the shards."""
    reference = models.integer_model("tokens")
    model, ids = copy.deepcopy(reference), torch.tensor([[1, 2, 3], [3, 5, 7]])
    fully_shard(model.blocks[0], reshard_after_forward=False)
    fully_shard(model)
    parameters, num_differing = dict(model.named_parameters()), 0
    gradient = GradientAccumulator(model, micro_batch_size=1, sync=sync)
    own, whole = (torch.optim.SGD(each.parameters(), lr=1.0) for each in (model, reference))
    for _ in range(3):
        gradient.forward_backward({"input_ids": ids}, lambda model, batch: (model(batch["input_ids"]).sum(), 1))
        with torch.no_grad():
            model(ids)
        gradient.finalize()
        whole.zero_grad()
        (reference(ids).sum() / 2).backward()
        pairs = [(parameters[name].grad.full_tensor(), each.grad) for name, each in reference.named_parameters()]
        num_differing += sum(not torch.equal(found, expected) for found, expected in pairs)
        own.step()
        whole.step()
        evaluated = gradient.evaluate({"input_ids": ids}, lambda model, batch: (model(batch["input_ids"]).sum(), 1))
        num_differing += not math.isclose(evaluated["loss"].item(), reference(ids).sum().item() / 2, rel_tol=1e-9)
        model.reshard()  # else the next call finds what this evaluation has gathered
    return {"gradient": float(num_differing)}


def _left_early(gradient: GradientAccumulator, this: harness.CellRun, batch: Any) -> str:
    """A loop of `microbatch` is left after the first of two, and then closed. A slow rank hears it in the first."""
    microbatch = oracle.collate(batch[:1])
    try:
        with gradient.microbatch(0, of=2, sum_over=int(_weigh(microbatch))) as part:
            part.scale(_pair(this.model, microbatch)[0]).backward()
        gradient.finalize()
        return "an update"
    except MegabatchError as error:
        gradient.discard()
        return type(error).__name__


def _happens(gradient: GradientAccumulator, batch: Any, loss_fn: Loss) -> str:
    try:
        gradient.forward_backward(batch, loss_fn)
        return f"finite={bool(torch.as_tensor(gradient.finalize().finite))}"
    except (InterruptedLossError, LossContractError) as error:
        return type(error).__name__


JOBS = [f"{disturbance}:{wrapper}:{world}:{sync}" for wrapper in MAIN for world in (1, 2, 3) for disturbance in EXPECTED
        for sync in ("last", "every")]  # fmt: skip
JOBS += [f"{disturbance}:{wrapper}:{max(WRAPPERS[wrapper].worlds)}:{sync}" for wrapper in OTHERS
         for disturbance in ("interrupted", "left_early")
         for sync in ("last", "every", "replica_last") if sync not in WRAPPERS[wrapper].refused]  # fmt: skip
JOBS += [f"{disturbance}:{wrapper}:gather_once" for wrapper in ("fsdp2:2", "hsdp:4")
         for disturbance in ("interrupted", "left_early")]  # fmt: skip
PARTLY = "partly_gathered:fsdp2:4:gather_once"
STALE = [f"stepped_after_a_forward:fsdp2:2:{sync}" for sync in ("every", "last", "gather_once")]
results = of_ranks("tests.exact.test_disturbed:run_job", [*JOBS, PARTLY, *STALE])


@pytest.mark.slow
@pytest.mark.parametrize("job", STALE)
def test_weights_of_before_a_step_are_gathered_again(results, job: str) -> None:
    assert [value["gradient"] for value in results(job)] == [0.0] * 2


@pytest.mark.slow
def test_what_a_forward_left_on_part_of_the_ranks_is_gathered_again(results) -> None:
    assert [value["gradient"] for value in results(PARTLY)] == [0.0] * 4


@pytest.mark.slow
@pytest.mark.parametrize("job", some(JOBS, 5))
def test_said_everywhere_and_forgotten(results, job: str) -> None:
    for value in results(job):
        assert value["happened"] == EXPECTED[job.split(":")[0]]
        averages = WRAPPERS[job.split(":")[1]].averages
        tolerance = 1e-15 if averages == "always" or (averages == "once" and "every" in job) else 0.0
        assert value["gradient"] <= tolerance, "the next update"
        assert not value["wrong"], value["wrong"]

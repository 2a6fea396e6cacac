"""Loops that are not megabatch's: each rank runs its own microbatches, its own loss and its own backward."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch import GradientAccumulator, MegabatchError, Update
from megabatch.guards.error_broadcast import TOLD
from megabatch.torch_private.process_groups import default_store
from tests.comm import jobs
from tests.comm.counting import Collectives
from tests.exact import harness, models, oracle
from tests.exact.cells import Cell

Told = dict[str, Any]
FORMS: dict[str, Callable[[Tensor, float], Told]] = {  # arguments, by the microbatch's weight and this rank's
    "sum": lambda weight, own: {"sum_over": weight},
    "mean": lambda weight, own: {"mean_over": weight},
    "late": lambda weight, own: {},
    "before": lambda weight, own: {"update_weight": own},
    "both": lambda weight, own: {"sum_over": weight, "update_weight": own},
    "divisor": lambda weight, own: {"update_weight": own},
    "own-sum": lambda weight, own: {"update_weight": own},
    "divided": lambda weight, own: {"divided": True},
    "own-divided": lambda weight, own: {"divided": True},
}
UNSEEN = ("divisor", "own-sum", "own-divided")  # forms in which the loss is not known


def run_job(name: str) -> dict[str, Any]:
    """The job "form:wrapper:sync:case:clip:world:": each update of the case, one sample per microbatch."""
    form, wrapper, sync, case, clip, world, _ = name.split(":")
    values = ("bits", wrapper, world, sync, case, "list", "late", "one-sample", "open", clip)
    if world == "1" and wrapper == "plain":
        dist.destroy_process_group()
    this = harness.CellRun(Cell.parse(":".join(values)))
    gradient = GradientAccumulator(this.model, mesh=this.mesh, micro_batch_size=1, sync=sync)
    optimizers = [models.SignSGD(each) for each in (this.parameters.values(), this.reference.parameters())]
    for calls in this.updates():
        _run_update(this, gradient, form, calls)
        update = gradient.finalize(max_norm=harness.MAX_NORM[clip])
        if _judge(this, update, calls, form):
            for optimizer in optimizers:
                optimizer.step()
    return {"gradient": this.found.gradient, "wrong": this.found.wrong, "averages": this.cell.averages}


def _judge(this: harness.CellRun, update: Update, calls: list[harness.Call], form: str) -> bool:
    """Compare one update with the oracle's; whether it can be stepped."""
    samples = [sample for call in calls for share in call for sample in share]
    expected, found, gradients = oracle.answer(this.reference, this.oracle_sums, samples), this.found, this.gradients()
    has_weight = expected.weights["loss"] > 0
    found.expect("finite", bool(update.finite), has_weight)
    found.near("the weight", update.weight, 1.0 if "divided" in form else expected.weights["loss"])
    if not has_weight:
        found.expect("gradients", [name for name, each in gradients.items() if each is not None], [])
        return False
    if form in UNSEEN:
        found.expect("a loss is known", bool(update.loss.isfinite()), False)
    else:
        found.near("the loss", update.loss, expected.loss)
    if (clipped := harness.MAX_NORM[this.cell.clip]) is not None:
        norm = torch.nn.utils.clip_grad_norm_(this.reference.parameters(), clipped)
        assert update.grad_norm is not None
        found.near("the norm", update.grad_norm, float(norm))
    found.see(*oracle.worst_error(gradients, harness.full_gradients(dict(this.reference.named_parameters()))))
    return True


def _run_update(this: harness.CellRun, gradient: GradientAccumulator, form: str, calls: list[harness.Call]) -> None:
    """One sample per microbatch; a rank that has fewer repeats one with the weight 0."""
    by_rank = [[sample for call in calls for sample in call[rank]] for rank in range(len(calls[0]))]
    most, mine = max(map(len, by_rank)), by_rank[this.rank]
    spare = next((sample for samples in by_rank for sample in samples), None)
    owns = [sum(float(this.weights(oracle.collate([sample]))["loss"]) for sample in samples) for samples in by_rank]
    if spare is None:
        return
    for index in range(most):
        is_dummy = index >= len(mine)
        batch = oracle.collate([spare if is_dummy else mine[index]])
        weight = torch.tensor(0.0) if is_dummy else this.weights(batch)["loss"]
        told = FORMS[form](weight, owns[this.rank])
        if is_dummy and form in ("before", "divisor") and owns[this.rank]:  # a rank without weight need not say so
            told["sum_over"] = 0
        with gradient.microbatch(index, of=most, **told) as part:
            total, _ = this.sums(this.model, batch)["loss"]
            _backward(form, part, total, weight, sum(owns), is_dummy)


def _backward(form: str, part: Any, total: Tensor, weight: Tensor, whole: float, is_dummy: bool) -> None:
    if form == "mean":
        part.scale(total / max(float(weight), 1.0)).backward()
    elif form == "late":
        part.scale(total, sum_over=weight).backward()
    elif form == "divisor":
        (total / part.divisor).backward()
    elif form == "divided":
        part.scale(total * (0.0 if is_dummy else 1 / whole)).backward()
    elif form == "own-divided":
        (total * (0.0 if is_dummy else 1 / whole)).backward()
    elif form == "own-sum":
        (total * (0.0 if is_dummy else 1.0)).backward()
    else:
        part.scale(total).backward()


def lost_job(name: str) -> list[str]:
    """The job "name:rank:world:": the last body fails on one rank, and all go on without `discard`.

    The other ranks come to `finalize` after the error: one that waits in a collective of it cannot go on.
    """
    _, culprit, _, _ = name.split(":")
    model, gradient = jobs.accumulator("plain", "auto")
    found: list[str] = []

    def update(*, fails: bool) -> None:
        for index in range(2):
            with gradient.microbatch(index, of=2, sum_over=jobs.ROWS) as part:
                if fails and index == 1 and dist.get_rank() == int(culprit):
                    raise ValueError("of one rank")
                part.scale(jobs.squares(model, jobs.batch(jobs.ROWS))[0]).backward()
        if fails:
            default_store().wait([gradient.error_guard._key(TOLD)])
        gradient.finalize()

    for fails in (True, False):
        try:
            update(fails=fails)
            found.append("done")
        except (MegabatchError, ValueError) as error:
            found.append(type(error).__name__)
    return found


def count_job(name: str) -> list[dict[str, int]]:
    """The job "wrapper:sync:microbatches:world:": collectives of an update of forward_backward, and of a loop."""
    wrapper, sync, number, _, _ = name.split(":")
    model, gradient = jobs.accumulator(wrapper, sync)
    found: list[dict[str, int]] = []

    def loop() -> None:
        for index in range(int(number)):
            with gradient.microbatch(index, of=int(number), sum_over=jobs.ROWS) as part:
                part.scale(jobs.squares(model, jobs.batch(jobs.ROWS))[0]).backward()

    for run in (lambda: gradient.forward_backward(jobs.batch(jobs.ROWS * int(number)), jobs.squares), loop):
        for _ in range(jobs.SETTLED):
            run(), gradient.finalize()
        with Collectives() as collectives:
            run(), gradient.finalize()
        found.append(collectives.table() | {"message_bytes": 0})  # a loop says less
    return found

"""Losses that couple samples, cut and dealt over ranks, beside one graph of all samples by plain torch.

The loss over integers weighs every pair of a query and a document by their places in the call, so that another order of
the samples is another gradient; the one over a language model is contrastive.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import GradientAccumulator, JointLoss, Term, Update
from tests.exact import dropped, harness, models, oracle
from tests.exact.cells import Cell
from tests.exact.wrappers import WRAPPERS, Wrapped
from tests.unit.failures import joint as failures

ENCODES = ("once", "twice")  # forwards of the model for one microbatch
DROPPED_PREFIX = "dropout|"
DROPPED = tuple(f"{DROPPED_PREFIX}{wrapper}" for wrapper in ("plain", "ddp", "fsdp2", "fsdp1"))


@dataclass(frozen=True)
class Job:
    """A cell, and how often a microbatch goes through the model before its backward."""

    encode: str
    cell: Cell

    @property
    def name(self) -> str:
        return f"{self.encode}|{self.cell.name}"

    @property
    def tolerance(self) -> float:
        """The largest error of a gradient against the oracle's."""
        return 1e-5 if self.cell.evidence == "float32" else self.cell.tolerance

    @classmethod
    def parse(cls, name: str) -> "Job":
        encode, cell = name.split("|")
        return cls(encode, Cell.parse(cell))


MAIN = ("plain", "ddp", "fsdp2")  # on every number of ranks; the others on their most
LANGUAGE = ("plain", "ddp", "fsdp2", "hsdp", "fsdp2-tp")  # with a language model too
CASES = ("C1", "uneven-ranks", "C4c", "short-tail", "calls", "empty-first-rank", "C-R", "calls-empty-ranks")
ONE_RANK = ("C1", "C4c", "short-tail", "calls", "C-R")  # the cases that one rank can have
LOSSES = ("late", "terms", "metric-late")
BOUNDS = ("two-samples", "tokens", "one-sample", "all-samples")
MOST_RANKS = 4
ONE_FORWARD = {"several", "several-ddp", "several-fsdp2", "ddp-static-graph", "ddp-find-unused"}


def jobs() -> list[Job]:
    """Each wrapper on its numbers of ranks under each policy; cases, losses and cuts in step."""
    turns = cycle(CASES), cycle(LOSSES), cycle(BOUNDS), cycle(ENCODES)
    made = [_job("bits", *where, *map(next, turns)) for where in _places(tuple(WRAPPERS))]
    made += [
        _job("float64" if where[2] == "last" else "float32", *where, *map(next, turns))
        for where in _places(LANGUAGE)
        if where[1] in (1, MOST_RANKS)
    ]
    return sorted(made, key=lambda job: (job.cell.world, list(WRAPPERS).index(job.cell.wrapper)))


def _places(wrappers: Sequence[str]) -> list[tuple[str, int, str]]:
    """(wrapper, ranks, sync)"""
    found: list[tuple[str, int, str]] = []
    for name in wrappers:
        wrapper = WRAPPERS[name]
        worlds = [world for world in wrapper.worlds if world <= MOST_RANKS]
        syncs = [sync for sync in ("last", "every", "replica_last") if sync not in wrapper.refused]
        found += [(name, world, sync) for world in (worlds if name in MAIN else worlds[-1:]) for sync in syncs]
    return found


def _job(evidence: str, wrapper: str, world: int, sync: str, case: str, loss: str, bound: str, encode: str) -> Job:
    if WRAPPERS[wrapper].data_degree(world) == 1 and case not in ONE_RANK:
        case = "C-R"
    if case == "C4c" and evidence != "bits":  # samples without targets have no direction
        case = "C1"
    if case.startswith("calls") and loss == "terms":  # each term would have a factor of its own
        loss = "late"
    encode = "once" if wrapper in ONE_FORWARD else encode
    return Job(encode, Cell(evidence, wrapper, world, sync, case, "list", loss, bound, "forward_backward", "no-clip"))


PLANTED = (  # what is run with each planted bug, on three ranks
    DROPPED[0],
    _job("bits", "plain", 3, "last", "uneven-ranks", "metric-late", "tokens", "once").name,
    _job("bits", "plain", 3, "last", "calls-empty-ranks", "late", "two-samples", "once").name,
)


class JointRun(harness.CellRun):
    """A cell whose loss couples the samples of each call."""

    def __init__(self, job: Job) -> None:
        self.job = job
        super().__init__(job.cell)

    def _new_model(self, dtype: torch.dtype) -> nn.Module:
        # Not a GPT-2: there is nothing in it that the small one lacks here, and it takes long to import.
        return models.small_lm(dtype) if self.model_kind == "language" else super()._new_model(dtype)

    def encode(self, model: Wrapped, batch: oracle.Sample) -> tuple[Tensor, Tensor, Tensor]:
        """A query and a document of each sample [B, ...], and how many targets it has [B]."""
        valid, run = batch["labels"][:, 1:] != -100, models.called(model)
        first = second = _tensor(run(batch["input_ids"]))[:, :-1]
        if self.job.encode == "twice":
            second = _tensor(run((batch["input_ids"] + 1) % models.VOCABULARY))[:, :-1]
        kept = valid if first.ndim == 2 else valid[..., None]
        labels = batch["labels"][:, 1:].view_as(kept).to(first.dtype)
        return (kept * first).sum(1), (kept * labels * second).sum(1), valid.sum(1)

    def couple(self, queries: Tensor, documents: Tensor, targets: Tensor) -> oracle.Sums:
        make = _weigh_pairs if queries.ndim == 1 else _contrast
        terms = make(queries, documents, targets)
        return {name: terms[name] for name in self.names}

    def expected(self, model: nn.Module, calls: list[harness.Call]) -> oracle.Answer:
        """Each call in one graph; the sum of their totals, over the sum of their weights."""
        batches = [[sample for share in call for sample in share] for call in calls if any(call)]

        def sums(model: nn.Module, _: oracle.Sample) -> oracle.Sums:
            found = [self.couple(*self.encode(model, oracle.collate(batch))) for batch in batches]
            return {name: tuple(map(sum, zip(*(each[name] for each in found), strict=True))) for name in self.names}

        return oracle.answer(model, sums, [sample for batch in batches for sample in batch])


def _tensor(outputs: Any) -> Tensor:
    return getattr(outputs, "logits", outputs)


def _weigh_pairs(queries: Tensor, documents: Tensor, targets: Tensor) -> oracle.Sums:
    """Sums over pairs by their places; a second term of neighbours, and how many queries are above zero."""
    place, weight = torch.arange(len(queries)), targets.sum()
    signs = (3 * place[:, None] + 5 * place + place[:, None] * place) % 7 - 3  # [N, N]
    return {
        "loss": (queries @ signs.to(queries.dtype) @ documents, weight),
        "positive": ((queries.roll(1) * documents).sum(), 2 * weight),
        "above": ((queries.detach() > 0).sum().to(queries.dtype), weight),
    }


def _contrast(queries: Tensor, documents: Tensor, targets: Tensor) -> oracle.Sums:
    """Each query finds its document among those of all samples, and each document its query."""
    scores = F.normalize(queries, dim=-1) @ F.normalize(documents, dim=-1).T / 0.1  # [N, N]
    place, size = torch.arange(len(scores)), torch.tensor(len(scores))
    return {
        "loss": (F.cross_entropy(scores, place, reduction="sum"), size),
        "positive": ((F.cross_entropy(scores.T, place, reduction="none") * targets).sum(), targets.sum()),
        "above": ((scores.detach().argmax(1) == place).sum().to(scores.dtype), size),
    }


def run_job(name: str) -> dict[str, Any]:
    """The job by its name: every update of the cell, with an optimizer between; dropout in a wrapper; or an error."""
    if name in failures.JOBS:
        return {"told": failures.job(name)}
    if name in DROPPED:
        return dropped.run_job(name.removeprefix(DROPPED_PREFIX))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about gloo and about one rank
        return run(JointRun(Job.parse(name)))


def run(this: JointRun) -> dict[str, Any]:
    updates = this.updates()
    gradient = GradientAccumulator(this.model, mesh=this.mesh, sync=this.cell.sync, **this.bound(updates))
    trained = this.parameters, dict(this.reference.named_parameters())
    optimizers = [models.SignSGD(parameters.values()) for parameters in trained]
    joint = JointLoss(this.encode, this.couple)
    for calls in updates:
        returned = [gradient.forward_backward(this.batch(call), joint) for call in calls]
        update, expected = gradient.finalize(), this.expected(this.reference, calls)
        _judge(this, returned, update, expected)
        if not expected.weights["loss"]:
            continue
        if this.cell.evidence != "bits":  # and of one update, since two models would drift apart
            this.found.see(oracle.whole_error(this.gradients(), expected.gradients), "all")
            break
        this.found.see(*oracle.worst_error(this.gradients(), expected.gradients))
        for optimizer in optimizers:
            optimizer.step()
    return this.found.row


def _judge(this: JointRun, returned: list[dict[str, Term]], update: Update, expected: oracle.Answer) -> None:
    """The sums are those of all samples on data rank 0 and nothing elsewhere; the update's are the oracle's."""
    found, weight = this.found, expected.weights["loss"]
    found.expect("finite", bool(update.finite), weight > 0)
    found.near("the weight", update.weight, weight)
    if not weight:
        found.expect("gradients", [name for name, each in this.gradients().items() if each is not None], [])
        return
    for name in this.names:
        found.near(f"the term {name!r}", update.terms[name], expected.terms[name])
        of_calls = [sums[name] for sums in returned if sums]
        here = expected.weights[name] if this.rank == 0 else 0.0
        found.near(f"this rank's weight of {name!r}", sum(term.weight for term in of_calls), here)
        found.near(f"this rank's total of {name!r}", sum(term.total for term in of_calls), expected.terms[name] * here)
    found.near("the loss", update.loss, expected.loss)

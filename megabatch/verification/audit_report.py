"""Result of an audit: the records of all ranks merged."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.errors import MegabatchError
from megabatch.verification.audit_records import (
    EndRecord,
    LoopRecord,
    MicrobatchRecord,
    Record,
    SchedulerRecord,
    UpdateRecord,
    join_rows,
    read_lines,
    write_line,
)

# A gradient of logits that is further from a cross-entropy's is another loss's.
MAX_RESIDUAL = 0.05
# Counts mean nothing where more of p.grad is not explained by the microbatches that were seen.
MAX_UNEXPLAINED = 0.05
# Relative differences of weights that are called equal (bfloat16 has 0.001), and of counts, which sketches estimate.
SAME, COUNT = 0.005, 0.02
# Share of the absolute weights; with more of either sign the loss is one of preferences or a policy.
SIGNS = 0.01
# Singular value below which gradients of microbatches cannot be told apart.
PARALLEL = 1e-6
TINY = 1e-300
TOKEN, SAMPLE, SEQUENCE = "token mean", "sample mean", "sequence mean"
MEANS = {"token": TOKEN, "sample": SAMPLE, "sequence": SEQUENCE}
OF_MICROBATCHES, OF_RANKS, NO_MEAN = "mean of microbatch means", "mean of rank means", "none of the known means"
# The loop of megabatch.
MEGABATCH = "megabatch"


@dataclass
class Distance:
    """Relative difference of an update's gradient from that of a mean, the ratio of lengths, and that of directions."""

    error: float
    length: float
    direction: float


@dataclass
class UpdateFindings:
    """One optimizer step over all ranks.

    Attributes:
        number: From 1.
        microbatches: Rank and record of each that has a target or a gradient; ``num_empty`` others have none.
        weights: Of the target tokens, times the number of them; 1 is the token mean. Empty if they cannot be told.
        counts: How often each microbatch is in p.grad. None if it cannot be told.
        leaks: Largest count of a microbatch of an update before.
        kind: The mean that the weights are closest to, times ``factor``.
        distances: From the gradient of each mean, where sketches can tell.
        is_signed: Weights have both signs, as those of a preference or policy loss.
    """

    number: int
    world: int
    microbatches: list[tuple[int, MicrobatchRecord]] = field(default_factory=list[tuple[int, MicrobatchRecord]])
    num_empty: int = 0
    row_hashes: list[int] = field(default_factory=list[int])
    row_tokens: list[int] = field(default_factory=list[int])
    num_positions: int = 0
    weights: list[Tensor] = field(default_factory=list[Tensor])
    counts: list[float] | None = None
    usual_count: float = 1.0
    shares_counts: bool = False
    leaks: float = 0.0
    kind: str = NO_MEAN
    factor: float = 1.0
    distances: dict[str, Distance] = field(default_factory=dict[str, Distance])
    weight_distances: dict[str, float] = field(default_factory=dict[str, float])
    rank_difference: float = 0.0
    weights_differ: bool = False
    is_sharded: bool = False
    is_compiled: bool = False
    scheduler_steps: list[int] = field(default_factory=list[int])
    collectives: dict[str, list[int]] | None = None
    num_clips: int = 0
    loop: LoopRecord = field(default_factory=LoopRecord)
    is_signed: bool = False
    unknown: list[str] = field(default_factory=list[str])

    @property
    def records(self) -> list[MicrobatchRecord]:
        """The microbatches, without their ranks."""
        return [record for _, record in self.microbatches]

    @property
    def all_weights(self) -> Tensor:
        """The weights of all microbatches, [targets]."""
        return torch.cat([torch.empty(0), *self.weights])

    @property
    def num_targets(self) -> int:
        """Target tokens of all ranks."""
        return sum(record.num_targets for record in self.records)

    @property
    def is_length_known(self) -> bool:
        """Return False if something between the last backward and the step has scaled the gradient."""
        off_the_sum, off_the_mean = abs(self.usual_count - 1), abs(self.usual_count * self.world - 1)
        return self.counts is None or min(off_the_sum, off_the_mean, abs(self.factor - 1)) < SAME

    def error(self, mean: str = TOKEN) -> float | None:
        """Return the relative error of the gradient; of its direction alone if its length cannot be told."""
        distance = self.distances.get(mean)
        if distance is None:
            return None
        return distance.error if self.is_length_known else distance.direction

    @property
    def relative_counts(self) -> Tensor:
        """Count of each microbatch in the gradient, as a multiple of the usual count. Empty if it is not known."""
        return torch.tensor(self.counts or [], dtype=torch.float64) / self.usual_count

    @property
    def dropped(self) -> list[int]:
        """Microbatches that are not in the gradient."""
        return (self.relative_counts.abs() < COUNT).nonzero().flatten().tolist()

    @property
    def miscounted(self) -> list[int]:
        """Microbatches that are counted in part or more than once."""
        counts = self.relative_counts
        return ((counts.abs() >= COUNT) & ((counts - 1).abs() > COUNT)).nonzero().flatten().tolist()


class Audit:
    """The findings of `megabatch.audit`; ``print(found)`` prints them in ten lines."""

    def __init__(self) -> None:
        # Records of all ranks that are here.
        self.records: list[Record] = []
        self.command = ""
        self._updates: list[UpdateFindings] | None = None

    @classmethod
    def from_records(cls, records: Iterable[Record], command: str = "") -> Self:
        """Return the findings of records of all ranks."""
        findings = cls()
        findings.command = command
        for record in records:
            findings.add(record)
        return findings

    @classmethod
    def from_lines(cls, lines: Iterable[str], command: str = "") -> Self:
        """Return the findings of lines that `to_line` made. Raises `MegabatchError` for any other line."""
        return cls.from_records(read_lines(lines), command)

    @staticmethod
    def to_line(record: Record) -> str:
        """Return a record as a line of JSON."""
        return write_line(record)

    def add(self, record: Record) -> None:
        """Add a record of any rank."""
        self.records.append(record)
        self._updates = None

    def gather(self) -> None:
        """Add the records of the other ranks. All ranks must call it, after the ``with`` block."""
        if not dist.is_initialized():
            return
        lines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(lines, [write_line(record) for record in self.records])
        self.records = read_lines(itertools.chain.from_iterable(lines))
        self._updates = None

    @property
    def updates(self) -> list[UpdateFindings]:
        """Each audited update."""
        if self._updates is None:
            self._updates = list(_merge_updates(self.records))
        return self._updates

    @property
    def left_over(self) -> list[int] | None:
        """Target tokens of the microbatches that no optimizer step used; None if the end was not watched."""
        if not self._ends or not all(end.is_end_of_run for end in self._ends):
            return None
        return list(itertools.chain.from_iterable(end.left_over for end in self._ends))

    @property
    def _ends(self) -> list[EndRecord]:
        return [record for record in self.records if isinstance(record, EndRecord)]

    def error(self, mean: str = "token") -> float | None:
        """Return the largest relative error of an update's gradient; None if it cannot be told.

        Args:
            mean: "token", "sample", "sequence", or "any" for the closest of them.

        Raises:
            MegabatchError: For another mean.
        """
        if mean != "any" and mean not in MEANS:
            raise MegabatchError(f"the mean {mean!r} is not known; give token, sample, sequence or any")
        names = MEANS.values() if mean == "any" else [MEANS[mean]]
        return min((self.errors[name] for name in names if name in self.errors), default=None)

    @property
    def errors(self) -> dict[str, float]:
        """The largest relative error from each mean, as far as that of every update is known."""
        errors: dict[str, float] = {}
        for name in (*MEANS.values(), OF_MICROBATCHES):
            known = [error for update in self.updates if (error := update.error(name)) is not None]
            if known and len(known) == len(self.updates):
                errors[name] = max(known)
        return errors

    def is_near(self, *names: str) -> bool:
        """Return True if every update's gradient is that of one of these means."""
        return any(self.errors.get(name, math.inf) <= SAME for name in names)

    @property
    def is_counted(self) -> bool:
        """True if it is known how often each microbatch is in the gradient."""
        return all(update.counts is not None for update in self.updates)

    @property
    def scheduler_steps(self) -> list[int]:
        """Numbers of steps of a scheduler in an update, in ascending order."""
        return sorted({step for update in self.updates for step in update.scheduler_steps})

    @property
    def problems(self) -> list[str]:
        """Faults beside the weights: microbatches, ranks and schedulers."""
        problems = [*find_miscounts(self), *find_rank_differences(self.updates)]
        steps = max(self.scheduler_steps, default=0)
        if steps > 1:
            problems.append(f"scheduler: {steps} steps per update")
        return problems

    @property
    def ok(self) -> bool:
        """True if every update's gradient is that of the token, sample or sequence mean, and nothing else is wrong.

        A gradient whose length cannot be told is not ok, nor is one of the sample mean that may be a mean of means.
        """
        is_mean = self.is_near(*MEANS.values()) and not self.may_be_mean_of_means
        return is_mean and self.is_length_known and not self.problems

    @property
    def is_length_known(self) -> bool:
        """False if something unknown scales a gradient before the step. The clips of torch and megabatch are known."""
        return all(update.is_length_known for update in self.updates)

    @property
    def may_be_mean_of_means(self) -> bool:
        """True if sample or sequence mean and the mean of microbatch means are the same in every update."""
        return self.is_near(SAMPLE, SEQUENCE) and self.is_near(OF_MICROBATCHES) and not self.is_near(TOKEN)

    @property
    def loop(self) -> LoopRecord:
        """The loop of the first update."""
        return self.updates[0].loop if self.updates else LoopRecord()

    @property
    def is_signed(self) -> bool:
        """True if weights of both signs were seen, as in preference and policy losses: their mean cannot be told."""
        return any(update.is_signed for update in self.updates)

    @property
    def unknown(self) -> list[str]:
        """Findings that the audit cannot make, and why."""
        reasons: list[str] = []
        for update in self.updates:
            reasons += update.unknown
        for end in self._ends:
            reasons += end.notes
        if not self.is_length_known:
            reasons.append("the gradient's length: something scales it between the last backward and the step")
        if not self.updates:
            reasons.append(
                "no step of a torch optimizer followed a backward of a watched model; a compiled step is not seen"
            )
        return list(dict.fromkeys(reasons))

    def __str__(self) -> str:
        from megabatch.verification.audit_text import lines_of

        return "\n".join(f"{name:12}{text}" if name else text for name, text in lines_of(self))

    def page(self) -> str:
        """Return the findings as a page of HTML, which loads nothing."""
        from megabatch.verification.audit_page import page_of

        return page_of(self)


def _merge_updates(records: Sequence[Record]) -> Iterator[UpdateFindings]:
    updates, schedulers = _by_place(records, UpdateRecord), _by_place(records, SchedulerRecord)
    earlier: list[MicrobatchRecord] = []
    for _, group in itertools.groupby(sorted(updates), key=itemgetter(0)):
        places = list(group)
        findings = _merge_ranks([updates[place] for place in places], earlier)
        findings.scheduler_steps = [schedulers[place].steps for place in places if place in schedulers]
        earlier += findings.records
        yield findings


def _by_place(records: Sequence[Any], kind: type[Any]) -> dict[tuple[int, int], Any]:
    """Return the records of a kind by their numbers and ranks."""
    return {(record.number, record.rank): record for record in records if isinstance(record, kind)}


def _merge_ranks(records: Sequence[UpdateRecord], earlier: Sequence[MicrobatchRecord]) -> UpdateFindings:
    first = records[0]
    findings = UpdateFindings(
        first.number + 1, first.world, is_sharded=first.is_sharded, collectives=first.collectives,
        num_clips=first.num_clips, loop=first.loop,
    )  # fmt: skip
    for record in records:
        findings.is_compiled |= record.is_compiled
        findings.unknown += record.notes
        for microbatch in record.microbatches:
            if microbatch.is_empty:
                findings.num_empty += 1
            else:
                findings.microbatches.append((record.rank, microbatch))
                findings.row_hashes += microbatch.row_hashes
                findings.row_tokens += microbatch.row_tokens
                findings.num_positions += microbatch.num_positions
    gradient = None
    if len(records) < first.world:
        findings.unknown.append(f"what other ranks do: records of {len(records)} of {first.world} ranks are here")
    else:
        gradient = _merge_gradients(records, findings)
    if gradient is not None:
        _count_microbatches(findings, gradient, earlier)
    _weigh_tokens(findings)
    if gradient is not None and findings.weights and findings.counts is not None and not findings.is_signed:
        _measure_distances(findings, gradient)
    return findings


def _merge_gradients(records: Sequence[UpdateRecord], findings: UpdateFindings) -> Tensor | None:
    """Return the sketch of the gradient that is stepped, and note how ranks differ."""
    sketches = [record.gradient for record in records if record.gradient is not None]
    if len(sketches) < len(records):
        if not any(reason.startswith("how often a") for reason in findings.unknown):
            findings.unknown.append("how often a microbatch is counted: no parameter has a gradient at the step")
        return None
    gradients = torch.stack(sketches)  # [ranks, bins]
    if findings.is_sharded:
        return gradients.sum(0)
    differences = (gradients - gradients[0]).norm(dim=1)
    findings.rank_difference = float(differences.max() / gradients.norm(dim=1).max().clamp_min(TINY))
    findings.weights_differ = len({record.weights_checksum for record in records}) > 1
    return gradients[0]


def _count_microbatches(findings: UpdateFindings, gradient: Tensor, earlier: Sequence[MicrobatchRecord]) -> None:
    """Find how often each microbatch is in the gradient, by least squares over sketches."""
    sketches = [record.sketch for record in findings.records if record.sketch is not None]
    if not sketches or len(sketches) < len(findings.microbatches) or not gradient.norm():
        return
    earlier_sketches = [record.sketch for record in earlier if record.sketch is not None]
    columns = torch.stack([*sketches, *earlier_sketches], 1)  # [bins, microbatches]
    lengths = columns.norm(dim=0).clamp_min(TINY)
    if not torch.cat([lengths, gradient]).isfinite().all():
        findings.unknown.append("how often a microbatch is counted: a gradient is not finite")
        return
    matrix = columns / lengths
    basis, small = torch.linalg.qr(matrix)
    left_vectors, singular, right_vectors = torch.linalg.svd(small, full_matrices=False)
    inverse = torch.where(singular > PARALLEL * singular[0], 1 / singular, 0.0)
    # Where gradients are parallel, this is the shortest solution.
    solution = right_vectors.T @ (inverse * (left_vectors.T @ (basis.T @ gradient)))
    unexplained = float((matrix @ solution - gradient).norm() / gradient.norm())
    if unexplained > MAX_UNEXPLAINED:
        findings.unknown.append(
            f"how often a microbatch is counted: {unexplained:.0%} of the gradient comes from elsewhere"
        )
        return
    findings.shares_counts = bool(singular[-1] < PARALLEL)
    if findings.shares_counts:
        findings.unknown.append("which of the microbatches with equal gradients is counted: they share their counts")
    counts, leaks = (solution / lengths).tensor_split([len(sketches)])
    present = counts[counts.abs() > COUNT * counts.abs().max()].sort().values
    findings.counts = counts.tolist()
    findings.usual_count = float(present[len(present) // 2]) if len(present) else 1.0
    findings.leaks = max((leaks / findings.usual_count).abs().tolist(), default=0.0)


def _weigh_tokens(findings: UpdateFindings) -> None:
    """Set the weight of each target token in the update, and the mean that the weights are closest to."""
    residuals = [record.residual for record in findings.records if record.residual is not None]
    if len(residuals) < len(findings.microbatches):
        reason = "inside torch.compile" if findings.is_compiled else "without logits (use megabatch.verify for it)"
        findings.unknown.append(f"the weights of tokens: a loss {reason}")
        return
    worst = max(residuals, default=0.0)
    if worst > MAX_RESIDUAL:
        findings.unknown.append(
            f"the weights of tokens: the gradient of the logits is {worst:.0%} from a cross-entropy's (use "
            "megabatch.verify for this loss)"
        )
        return
    total = findings.num_targets
    if not total:
        return
    counts = findings.counts or [1.0] * len(residuals)
    pairs = zip(findings.records, counts, strict=True)
    findings.weights = [record.weights * count * total for record, count in pairs]
    weights = findings.all_weights
    negative = float(weights.clamp(max=0).abs().sum() / weights.abs().sum().clamp_min(TINY))
    findings.is_signed = SIGNS < negative < 1 - SIGNS
    if findings.is_signed:
        findings.unknown.append("which mean is meant: the weights contain margins or advantages")
        return
    closest = SAME * 2
    for name, mean in _weights_of_means(findings).items():
        wanted = mean * total
        factor = float(weights @ wanted / (wanted @ wanted))
        findings.weight_distances[name] = float((weights - wanted).norm() / wanted.norm())
        residual = float((weights - factor * wanted).norm() / weights.norm().clamp_min(TINY))
        # Of means that are equal here the first is named.
        if residual < closest / 2:
            findings.kind, findings.factor, closest = name, factor, residual


def _weights_of_means(findings: UpdateFindings) -> dict[str, Tensor]:
    """Return the weights [targets] of the update's tokens under each mean that can be told from the records.

    A mean over groups of tokens gives each group the same weight, and each token of a group the same share of it.
    """
    sizes = torch.tensor([record.num_targets for record in findings.records])
    ranks = torch.tensor([rank for rank, _ in findings.microbatches])
    groups_of_means = {
        TOKEN: torch.zeros(findings.num_targets),
        SAMPLE: join_rows([record.samples for record in findings.records]),
        SEQUENCE: join_rows([record.sequences for record in findings.records]),
        OF_MICROBATCHES: torch.arange(len(sizes)).repeat_interleave(sizes),
        OF_RANKS: ranks.repeat_interleave(sizes),
    }
    weights: dict[str, Tensor] = {}
    for name, groups in groups_of_means.items():
        _, group_of_token, group_sizes = torch.unique(groups, return_inverse=True, return_counts=True)
        # Groups that are not known are -1.
        if groups.min() >= 0:
            weights[name] = 1 / (len(group_sizes) * group_sizes.double()[group_of_token])
    return weights


def _measure_distances(findings: UpdateFindings, gradient: Tensor) -> None:
    """Compare the gradient with that of each mean: microbatches' sketches, weighed anew."""
    records = [record for record in findings.records if record.num_targets]
    sizes = [record.num_targets for record in records]
    weights = torch.cat([record.weights for record in records])
    sketches = torch.stack([cast(Tensor, record.sketch) for record in records], 1)  # [bins, microbatches]
    for name, mean in _weights_of_means(findings).items():
        ratios = (mean / weights).split(sizes)
        scales = torch.stack([ratio.mean() for ratio in ratios])  # [microbatches]
        spreads = torch.stack([ratio.std(correction=0) for ratio in ratios])  # [microbatches]
        total = sketches @ scales
        # A sketch cannot be taken apart where weights inside of the microbatch differ from the mean's.
        if total.norm() and (spreads <= 4 * SAME * scales.abs()).all():
            findings.distances[name] = Distance(
                float((gradient - total).norm() / total.norm()), float(gradient.norm() / total.norm()),
                float((gradient / gradient.norm() - total / total.norm()).norm()),
            )  # fmt: skip


def find_miscounts(audit: Audit) -> list[str]:
    """Return a line for each microbatch that is dropped, counted in part or more than once, or leaked."""
    descriptions: list[str] = []
    for update in audit.updates:
        at, of_all = f"update {update.number}:", f"of {len(update.microbatches)}"
        dropped = ", ".join(str(number + 1) for number in update.dropped)
        if dropped:
            descriptions.append(f"{at} microbatch {dropped} {of_all} DROPPED")
        for number in update.miscounted:
            times = float(update.relative_counts[number])
            descriptions.append(f"{at} microbatch {number + 1} {of_all} counted {times:.2g} times")
        if update.leaks > COUNT:
            descriptions.append(f"{at} LEAKED into from an update before ({update.leaks:.2g} times)")
    if unused := audit.left_over:
        descriptions.append(f"at the end {plural(len(unused), 'microbatch')} of {sum(unused)} targets never stepped")
    return descriptions


def find_rank_differences(updates: Sequence[UpdateFindings]) -> list[str]:
    """Return lines on ranks whose gradients or weights differ."""
    differences: list[str] = []
    worst = max((update.rank_difference for update in updates), default=0.0)
    if worst > SAME:
        differences.append(f"gradients of ranks DIFFER by {worst:.2g} before the step")
    if any(update.weights_differ for update in updates):
        differences.append("the WEIGHTS of ranks differ")
    return differences


def largest_microbatch(updates: Sequence[UpdateFindings]) -> int:
    """Return the tokens of the largest microbatch, padding included; 0 where they are not known."""
    return max((record.num_positions for update in updates for record in update.records), default=0)


def plural(number: int, noun: str) -> str:
    """Return a number with its noun."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending if number != 1 else ''}"

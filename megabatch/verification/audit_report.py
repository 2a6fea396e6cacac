"""Result of an audit: the records of all ranks merged."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

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
    read_lines,
    write_line,
)

MAX_RESIDUAL = 0.05  # a gradient of logits further from a cross-entropy's is another loss's
MAX_UNEXPLAINED = 0.05  # of p.grad by the microbatches that were seen; above, counts mean nothing
SAME = 0.005  # relative difference of weights that are called equal; bfloat16 has 0.001
COUNT = 0.02  # the same of counts, which sketches estimate
SIGNS = 0.01  # of the sum of absolute weights; with more of either sign the loss is one of preferences or a policy
PARALLEL = 1e-6  # singular value below which gradients of microbatches cannot be told apart
TOKEN, SAMPLE, SEQUENCE = "token mean", "sample mean", "sequence mean"
MEANS = {"token": TOKEN, "sample": SAMPLE, "sequence": SEQUENCE}
MEGABATCH = "megabatch"  # the loop
OF_MICROBATCHES, OF_RANKS = "mean of microbatch means", "mean of rank means"


@dataclass
class Distance:
    """Difference between an update's gradient and that of a mean, relative to the latter."""

    error: float
    length: float  # times that the gradient is longer
    direction: float  # difference of the unit vectors


@dataclass
class UpdateFindings:
    """One optimizer step over all ranks."""

    number: int  # from 1
    world: int
    microbatches: list[tuple[int, MicrobatchRecord]]  # rank and record
    weights: list[Tensor] | None = None  # of the target tokens times the number of them; 1 is the token mean
    counts: list[float] | None = None  # of each microbatch in p.grad; None: cannot be told
    usual_count: float = 1.0
    shares_counts: bool = False  # some microbatches have equal gradients
    num_empty: int = 0  # microbatches without a target, whose gradient is zero; not among the others
    leaks: float = 0.0  # largest count of a microbatch of an update before
    unexplained: float = math.nan
    kind: str = ""  # the mean that the weights are closest to; "": none
    factor: float = 1.0  # times that mean
    distances: dict[str, Distance] = field(default_factory=dict[str, Distance])  # where sketches can tell
    weight_distances: dict[str, float] = field(default_factory=dict[str, float])  # of all tokens' weights, relative
    rank_difference: float = 0.0  # of gradients
    weights_differ: bool = False
    is_sharded: bool = False
    is_compiled: bool = False
    scheduler_steps: list[int] = field(default_factory=list[int])
    collectives: dict[str, list[int]] | None = None
    num_clips: int = 0
    loop: LoopRecord = field(default_factory=LoopRecord)
    is_signed: bool = False  # weights of both signs: a preference or policy loss
    unknown: list[str] = field(default_factory=list[str])

    @property
    def num_targets(self) -> int:
        """Target tokens of all ranks."""
        return sum(record.num_targets for _, record in self.microbatches)

    @property
    def is_length_known(self) -> bool:
        """Return False if something between the last backward and the step has scaled the gradient."""
        is_reduced = any(abs(self.usual_count * way - 1) < SAME for way in (1, self.world))
        return self.counts is None or is_reduced or abs(self.factor - 1) < SAME

    def error(self, mean: str = TOKEN) -> float | None:
        """Return the relative error of the gradient; of its direction alone if its length cannot be told."""
        distance = self.distances.get(mean)
        if distance is None:
            return None
        return distance.error if self.is_length_known else distance.direction

    @property
    def dropped(self) -> list[int]:
        """Microbatches that are not in the gradient."""
        return [number for number, count in enumerate(self.counts or []) if abs(count) < COUNT * self.usual_count]

    @property
    def miscounted(self) -> list[int]:
        """Microbatches that are counted in part or more than once."""
        relative = [count / self.usual_count for count in self.counts or []]
        return [n for n, count in enumerate(relative) if n not in self.dropped and abs(count - 1) > COUNT]


class Audit:
    """The findings of `megabatch.audit`; ``print(found)`` prints them in ten lines."""

    def __init__(self) -> None:
        self.records: list[Record] = []  # of all ranks that are here
        self._updates: list[UpdateFindings] | None = None
        self.command = ""  # shown in the title

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
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        lines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(lines, [write_line(record) for record in self.records])
        self.records = [record for part in lines for record in read_lines(part)]
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
        ends = [record for record in self.records if isinstance(record, EndRecord)]
        if not ends or not all(end.is_end_of_run for end in ends):
            return None
        return [size for end in ends for size in end.left_over]

    def error(self, mean: str = "token") -> float | None:
        """Return the largest relative error of an update's gradient; None if it cannot be told.

        Args:
            mean: "token", "sample", "sequence", or "any" for the closest of them.

        Raises:
            MegabatchError: For another mean.
        """
        if mean != "any" and mean not in MEANS:
            raise MegabatchError(f"the mean {mean!r} is not known; give token, sample, sequence or any")
        names = list(MEANS.values()) if mean == "any" else [MEANS[mean]]
        errors_by_mean: list[float] = []
        for name in names:
            errors = [update.error(name) for update in self.updates]
            known = [error for error in errors if error is not None]
            if known and len(known) == len(errors):
                errors_by_mean.append(max(known))
        return min(errors_by_mean, default=None)

    @property
    def problems(self) -> list[str]:
        """Faults beside the weights: microbatches, ranks and schedulers."""
        return [*find_miscounts(self), *find_rank_differences(self.updates), *_find_scheduler(self.updates)]

    @property
    def ok(self) -> bool:
        """True if every update's gradient is that of the token, sample or sequence mean, and nothing else is wrong.

        A gradient whose length cannot be told is not ok, nor is one of the sample mean that may be a mean of means.
        """
        error = self.error("any")
        if error is None or error > SAME or self.problems:
            return False
        return self.is_length_known and not self.may_be_mean_of_means

    @property
    def is_length_known(self) -> bool:
        """False if something unknown scales a gradient before the step. The clips of torch and megabatch are known."""
        return all(update.is_length_known for update in self.updates)

    @property
    def may_be_mean_of_means(self) -> bool:
        """True if sample or sequence mean and the mean of microbatch means are the same in every update."""
        if self._is_near("token") or not (self._is_near("sample") or self._is_near("sequence")):
            return False
        means = [update.distances.get(OF_MICROBATCHES) for update in self.updates]
        return all(distance is not None and distance.error <= SAME for distance in means)

    def _is_near(self, mean: str) -> bool:
        error = self.error(mean)
        return error is not None and error <= SAME

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
        return list(_find_unknown(self, self.records))

    def __str__(self) -> str:
        from megabatch.verification.audit_text import lines_of

        return "\n".join(f"{name:12}{text}" if name else text for name, text in lines_of(self))

    def page(self) -> str:
        """Return the findings as a page of HTML, which loads nothing."""
        from megabatch.verification.audit_page import page_of

        return page_of(self)


# Merging


def _merge_updates(records: Sequence[Record]) -> Iterator[UpdateFindings]:
    by_number: dict[int, dict[int, UpdateRecord]] = {}
    for record in records:
        if isinstance(record, UpdateRecord):
            by_number.setdefault(record.number, {})[record.rank] = record
    schedulers = {
        (record.number, record.rank): record.steps for record in records if isinstance(record, SchedulerRecord)
    }
    earlier: list[MicrobatchRecord] = []
    for number in sorted(by_number):
        rank_records = [by_number[number][rank] for rank in sorted(by_number[number])]
        findings = _merge_ranks(rank_records, earlier)
        findings.scheduler_steps = [
            schedulers[number, record.rank] for record in rank_records if (number, record.rank) in schedulers
        ]
        earlier = [*earlier, *(record for _, record in findings.microbatches)]
        yield findings


def _merge_ranks(records: Sequence[UpdateRecord], earlier: Sequence[MicrobatchRecord]) -> UpdateFindings:
    first = records[0]
    microbatches = [(record.rank, microbatch) for record in records for microbatch in record.microbatches]
    findings = UpdateFindings(first.number + 1, first.world, [pair for pair in microbatches if not pair[1].is_empty])
    findings.num_empty = len(microbatches) - len(findings.microbatches)
    findings.collectives, findings.num_clips, findings.loop = first.collectives, first.num_clips, first.loop
    findings.is_sharded, findings.is_compiled = first.is_sharded, any(record.is_compiled for record in records)
    findings.unknown = list(dict.fromkeys(note for record in records for note in record.notes))
    if len(records) < first.world:
        findings.unknown.append(f"what other ranks do: records of {len(records)} of {first.world} ranks are here")
    gradient = _merge_gradients(records, findings) if len(records) == first.world else None
    if gradient is not None:
        _count_microbatches(findings, gradient, earlier)
    elif len(records) == first.world and not any(reason.startswith("how often a") for reason in findings.unknown):
        findings.unknown.append("how often a microbatch is counted: no parameter has a gradient at the step")
    _weigh_tokens(findings)
    if gradient is not None and findings.weights is not None and findings.counts is not None and not findings.is_signed:
        _measure_distances(findings, gradient)
    return findings


def _merge_gradients(records: Sequence[UpdateRecord], findings: UpdateFindings) -> Tensor | None:
    """Return the sketch of the gradient that is stepped, and note how ranks differ."""
    sketches = [record.gradient for record in records if record.gradient is not None]
    if len(sketches) < len(records):
        return None
    if records[0].is_sharded:
        return torch.stack(sketches).sum(0)
    longest = max(float(sketch.norm()) for sketch in sketches)
    differences = [float((sketch - sketches[0]).norm()) for sketch in sketches]
    findings.rank_difference = max(differences) / longest if longest else 0.0
    findings.weights_differ = len({record.weights_checksum for record in records}) > 1
    return sketches[0]


def _count_microbatches(findings: UpdateFindings, gradient: Tensor, earlier: Sequence[MicrobatchRecord]) -> None:
    """Find how often each microbatch is in the gradient, by least squares over sketches."""
    sketches = [record.sketch for _, record in findings.microbatches]
    if not sketches or any(sketch is None for sketch in sketches) or not gradient.norm():
        return
    columns = [sketch for sketch in (*sketches, *(record.sketch for record in earlier)) if sketch is not None]
    lengths = torch.stack([column.norm() for column in columns])
    if not lengths.isfinite().all() or not gradient.isfinite().all():
        findings.unknown.append("how often a microbatch is counted: a gradient is not finite")
        return
    matrix = torch.stack(columns, 1) / lengths.clamp_min(1e-300)  # [bins, microbatches]
    basis, small = torch.linalg.qr(matrix)
    left_vectors, singular, right_vectors = torch.linalg.svd(small, full_matrices=False)
    inverse = torch.where(singular > PARALLEL * singular[0], 1 / singular, 0.0)
    # Where gradients are parallel, this is the shortest solution.
    solution = right_vectors.T @ (inverse * (left_vectors.T @ (basis.T @ gradient)))
    findings.unexplained = float((matrix @ solution - gradient).norm() / gradient.norm())
    if findings.unexplained > MAX_UNEXPLAINED:
        findings.unknown.append(
            f"how often a microbatch is counted: {findings.unexplained:.0%} of the gradient comes from elsewhere"
        )
        return
    findings.shares_counts = bool(singular[-1] < PARALLEL)
    if findings.shares_counts:
        findings.unknown.append("which of the microbatches with equal gradients is counted: they share their counts")
    counts = (solution / lengths.clamp_min(1e-300)).tolist()
    current = findings.counts = counts[: len(sketches)]
    present = sorted(count for count in current if abs(count) > COUNT * max(map(abs, current)))
    findings.usual_count = present[len(present) // 2] if present else 1.0
    leaks = [abs(count / findings.usual_count) for count in counts[len(sketches) :]]
    findings.leaks = max(leaks, default=0.0)


def _weigh_tokens(findings: UpdateFindings) -> None:
    """Set the weight of each target token in the update, and the mean that the weights are closest to."""
    records = [record for _, record in findings.microbatches]
    if any(record.residual is None for record in records):
        reason = "inside torch.compile" if findings.is_compiled else "without logits (use megabatch.verify for it)"
        findings.unknown.append(f"the weights of tokens: a loss {reason}")
        return
    worst = max((record.residual or 0.0 for record in records), default=0.0)
    if worst > MAX_RESIDUAL:
        findings.unknown.append(
            f"the weights of tokens: the gradient of the logits is {worst:.0%} from a cross-entropy's (use "
            "megabatch.verify for this loss)"
        )
        return
    counts = findings.counts or [1.0] * len(records)
    total = findings.num_targets
    if not total:
        return
    findings.weights = [record.weights * count * total for record, count in zip(records, counts, strict=True)]
    flat = torch.cat(findings.weights)
    negative = float(flat.clamp(max=0).abs().sum() / flat.abs().sum().clamp_min(1e-300))
    findings.is_signed = SIGNS < negative < 1 - SIGNS
    if findings.is_signed:
        findings.unknown.append("which mean is meant: the weights contain margins or advantages")
        return
    closest = SAME * 2
    for name, mean in _means_of(findings).items():
        shape = torch.cat(mean) * total
        factor = float(flat @ shape / (shape @ shape))
        findings.weight_distances[name] = float((flat - shape).norm() / shape.norm())
        residual = float((flat - factor * shape).norm() / flat.norm().clamp_min(1e-300))
        if residual < closest / 2:  # the first of equals
            findings.kind, findings.factor, closest = name, factor, residual


def _means_of(findings: UpdateFindings) -> dict[str, list[Tensor]]:
    """Return the weights of target tokens under each mean that can be told from the records."""
    records, total = [record for _, record in findings.microbatches], findings.num_targets
    sizes = [record.num_targets for record in records]
    means = {TOKEN: [torch.full((size,), 1 / total, dtype=torch.float64) for size in sizes]}
    for name, groups in (
        (SAMPLE, [record.samples for record in records]),
        (SEQUENCE, [record.sequences for record in records]),
    ):
        if all(bool((group >= 0).all()) for group in groups):
            parts = [torch.unique(group, return_inverse=True, return_counts=True) for group in groups]
            number = sum(len(part[0]) for part in parts)
            means[name] = [1 / (number * sizes.double()[which]) for _, which, sizes in parts]
    filled = [size for size in sizes if size]
    means[OF_MICROBATCHES] = [
        torch.full((size,), 1 / (len(filled) * max(size, 1)), dtype=torch.float64) for size in sizes
    ]
    by_rank: dict[int, int] = {}
    for (rank, _), size in zip(findings.microbatches, sizes, strict=True):
        by_rank[rank] = by_rank.get(rank, 0) + size
    means[OF_RANKS] = [
        torch.full((size,), 1 / (len(by_rank) * max(by_rank[rank], 1)), dtype=torch.float64)
        for (rank, _), size in zip(findings.microbatches, sizes, strict=True)
    ]
    return means


def _measure_distances(findings: UpdateFindings, gradient: Tensor) -> None:
    """Compare the gradient with that of each mean: microbatches' sketches, weighed anew."""
    for name, mean in _means_of(findings).items():
        total: Tensor | None = None
        for (_, record), wanted in zip(findings.microbatches, mean, strict=True):
            if record.sketch is None or not record.num_targets:
                continue
            ratio = wanted / record.weights
            if not ratio.isfinite().all() or float(ratio.std(correction=0)) > 4 * SAME * float(ratio.mean().abs()):
                break  # weights inside of the microbatch differ from the mean's: a sketch cannot be taken apart
            scaled = record.sketch * ratio.mean()
            total = scaled if total is None else total + scaled
        else:
            if total is not None and total.norm() and gradient.norm():
                findings.distances[name] = Distance(
                    error=float((gradient - total).norm() / total.norm()),
                    length=float(gradient.norm() / total.norm()),
                    direction=float((gradient / gradient.norm() - total / total.norm()).norm()),
                )


# Faults


def find_miscounts(audit: Audit) -> list[str]:
    """Return a line for each microbatch that is dropped, counted in part or more than once, or leaked."""
    descriptions: list[str] = []
    for update in audit.updates:
        of_all = f"of {len(update.microbatches)}"
        at = f"update {update.number}:"
        if update.dropped:
            descriptions.append(f"{at} microbatch {_numbers(update.dropped)} {of_all} DROPPED")
        for number in update.miscounted:
            times = (update.counts or [])[number] / update.usual_count
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


def _find_scheduler(updates: Sequence[UpdateFindings]) -> list[str]:
    steps = [step for update in updates for step in update.scheduler_steps]
    return [f"scheduler: {max(steps)} steps per update"] if steps and max(steps) > 1 else []


def _find_unknown(audit: Audit, records: Sequence[Record]) -> Iterator[str]:
    reasons = [text for update in audit.updates for text in update.unknown]
    reasons += [text for record in records if isinstance(record, EndRecord) for text in record.notes]
    if any(not update.is_length_known for update in audit.updates):
        reasons.append("the gradient's length: something scales it between the last backward and the step")
    if not audit.updates:
        reasons.append(
            "no step of a torch optimizer followed a backward of a watched model; a compiled step is not seen"
        )
    yield from dict.fromkeys(reasons)


def largest_microbatch(updates: Sequence[UpdateFindings]) -> int:
    """Return the tokens of the largest microbatch, padding included; 0 where they are not known."""
    return max((record.num_positions for update in updates for _, record in update.microbatches), default=0)


def _numbers(indices: Sequence[int]) -> str:
    return ", ".join(str(index + 1) for index in indices)


def plural(number: int, noun: str) -> str:
    """Return a number with its noun."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending if number != 1 else ''}"

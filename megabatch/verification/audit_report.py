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
        return sum(each.num_targets for _, each in self.microbatches)

    @property
    def is_length_known(self) -> bool:
        """Return False if something between the last backward and the step has scaled the gradient."""
        is_reduced = any(abs(self.usual_count * way - 1) < SAME for way in (1, self.world))
        return self.counts is None or is_reduced or abs(self.factor - 1) < SAME

    def error(self, mean: str = TOKEN) -> float | None:
        """Return the relative error of the gradient; of its direction alone if its length cannot be told."""
        found = self.distances.get(mean)
        if found is None:
            return None
        return found.error if self.is_length_known else found.direction

    @property
    def dropped(self) -> list[int]:
        """Microbatches that are not in the gradient."""
        return [number for number, count in enumerate(self.counts or []) if abs(count) < COUNT * self.usual_count]

    @property
    def miscounted(self) -> list[int]:
        """Microbatches that are counted in part or more than once."""
        relative = [count / self.usual_count for count in self.counts or []]
        return [n for n, each in enumerate(relative) if n not in self.dropped and abs(each - 1) > COUNT]


class Audit:
    """The findings of `megabatch.audit`; ``print(found)`` prints them in ten lines."""

    def __init__(self) -> None:
        self.records: list[Record] = []  # of all ranks that are here
        self._updates: list[UpdateFindings] | None = None
        self.command = ""  # shown in the title

    @classmethod
    def from_records(cls, records: Iterable[Record], command: str = "") -> Self:
        """Return the findings of records of all ranks."""
        found = cls()
        found.command = command
        for each in records:
            found.add(each)
        return found

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
        dist.all_gather_object(lines, [write_line(each) for each in self.records])
        self.records = [each for part in lines for each in read_lines(part)]
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
        ends = [each for each in self.records if isinstance(each, EndRecord)]
        if not ends or not all(each.is_end_of_run for each in ends):
            return None
        return [size for each in ends for size in each.left_over]

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
        found: list[float] = []
        for name in names:
            errors = [each.error(name) for each in self.updates]
            known = [each for each in errors if each is not None]
            if known and len(known) == len(errors):
                found.append(max(known))
        return min(found, default=None)

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
        return all(each.is_length_known for each in self.updates)

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
    for each in records:
        if isinstance(each, UpdateRecord):
            by_number.setdefault(each.number, {})[each.rank] = each
    schedulers = {(each.number, each.rank): each.steps for each in records if isinstance(each, SchedulerRecord)}
    earlier: list[MicrobatchRecord] = []
    for number in sorted(by_number):
        ranks = [by_number[number][rank] for rank in sorted(by_number[number])]
        found = _merge_ranks(ranks, earlier)
        found.scheduler_steps = [schedulers[number, each.rank] for each in ranks if (number, each.rank) in schedulers]
        earlier = [*earlier, *(each for _, each in found.microbatches)]
        yield found


def _merge_ranks(ranks: Sequence[UpdateRecord], earlier: Sequence[MicrobatchRecord]) -> UpdateFindings:
    first = ranks[0]
    microbatches = [(each.rank, mb) for each in ranks for mb in each.microbatches]
    found = UpdateFindings(first.number + 1, first.world, [pair for pair in microbatches if not pair[1].is_empty])
    found.num_empty = len(microbatches) - len(found.microbatches)
    found.collectives, found.num_clips, found.loop = first.collectives, first.num_clips, first.loop
    found.is_sharded, found.is_compiled = first.is_sharded, any(record.is_compiled for record in ranks)
    found.unknown = list(dict.fromkeys(note for each in ranks for note in each.notes))
    if len(ranks) < first.world:
        found.unknown.append(f"what other ranks do: records of {len(ranks)} of {first.world} ranks are here")
    gradient = _merge_gradients(ranks, found) if len(ranks) == first.world else None
    if gradient is not None:
        _count_microbatches(found, gradient, earlier)
    elif len(ranks) == first.world and not any(each.startswith("how often a") for each in found.unknown):
        found.unknown.append("how often a microbatch is counted: no parameter has a gradient at the step")
    _weigh_tokens(found)
    if gradient is not None and found.weights is not None and found.counts is not None and not found.is_signed:
        _measure_distances(found, gradient)
    return found


def _merge_gradients(ranks: Sequence[UpdateRecord], found: UpdateFindings) -> Tensor | None:
    """Return the sketch of the gradient that is stepped, and note how ranks differ."""
    sketches = [each.gradient for each in ranks if each.gradient is not None]
    if len(sketches) < len(ranks):
        return None
    if ranks[0].is_sharded:
        return torch.stack(sketches).sum(0)
    longest = max(float(each.norm()) for each in sketches)
    differences = [float((each - sketches[0]).norm()) for each in sketches]
    found.rank_difference = max(differences) / longest if longest else 0.0
    found.weights_differ = len({each.weights_checksum for each in ranks}) > 1
    return sketches[0]


def _count_microbatches(found: UpdateFindings, gradient: Tensor, earlier: Sequence[MicrobatchRecord]) -> None:
    """Find how often each microbatch is in the gradient, by least squares over sketches."""
    own = [each.sketch for _, each in found.microbatches]
    if not own or any(each is None for each in own) or not gradient.norm():
        return
    columns = [each for each in own if each is not None] + [each.sketch for each in earlier if each.sketch is not None]
    lengths = torch.stack([each.norm() for each in columns])
    if not lengths.isfinite().all() or not gradient.isfinite().all():
        found.unknown.append("how often a microbatch is counted: a gradient is not finite")
        return
    matrix = torch.stack(columns, 1) / lengths.clamp_min(1e-300)  # [bins, microbatches]
    basis, small = torch.linalg.qr(matrix)
    left, singular, right = torch.linalg.svd(small, full_matrices=False)
    inverse = torch.where(singular > PARALLEL * singular[0], 1 / singular, 0.0)
    solution = right.T @ (inverse * (left.T @ (basis.T @ gradient)))  # the shortest, where gradients are parallel
    found.unexplained = float((matrix @ solution - gradient).norm() / gradient.norm())
    if found.unexplained > MAX_UNEXPLAINED:
        found.unknown.append(
            f"how often a microbatch is counted: {found.unexplained:.0%} of the gradient comes from elsewhere"
        )
        return
    found.shares_counts = bool(singular[-1] < PARALLEL)
    if found.shares_counts:
        found.unknown.append("which of the microbatches with equal gradients is counted: they share their counts")
    counts = (solution / lengths.clamp_min(1e-300)).tolist()
    current = found.counts = counts[: len(own)]
    present = sorted(each for each in current if abs(each) > COUNT * max(map(abs, current)))
    found.usual_count = present[len(present) // 2] if present else 1.0
    leaks = [abs(each / found.usual_count) for each in counts[len(own) :]]
    found.leaks = max(leaks, default=0.0)


def _weigh_tokens(found: UpdateFindings) -> None:
    """Set the weight of each target token in the update, and the mean that the weights are closest to."""
    records = [each for _, each in found.microbatches]
    if any(each.residual is None for each in records):
        reason = "inside torch.compile" if found.is_compiled else "without logits (use megabatch.verify for it)"
        found.unknown.append(f"the weights of tokens: a loss {reason}")
        return
    worst = max((each.residual or 0.0 for each in records), default=0.0)
    if worst > MAX_RESIDUAL:
        found.unknown.append(
            f"the weights of tokens: the gradient of the logits is {worst:.0%} from a cross-entropy's (use "
            "megabatch.verify for this loss)"
        )
        return
    counts = found.counts or [1.0] * len(records)
    total = found.num_targets
    if not total:
        return
    found.weights = [each.weights * count * total for each, count in zip(records, counts, strict=True)]
    flat = torch.cat(found.weights)
    negative = float(flat.clamp(max=0).abs().sum() / flat.abs().sum().clamp_min(1e-300))
    found.is_signed = SIGNS < negative < 1 - SIGNS
    if found.is_signed:
        found.unknown.append("which mean is meant: the weights contain margins or advantages")
        return
    closest = SAME * 2
    for name, mean in _means_of(found).items():
        shape = torch.cat(mean) * total
        factor = float(flat @ shape / (shape @ shape))
        found.weight_distances[name] = float((flat - shape).norm() / shape.norm())
        residual = float((flat - factor * shape).norm() / flat.norm().clamp_min(1e-300))
        if residual < closest / 2:  # the first of equals
            found.kind, found.factor, closest = name, factor, residual


def _means_of(found: UpdateFindings) -> dict[str, list[Tensor]]:
    """Return the weights of target tokens under each mean that can be told from the records."""
    records, total = [each for _, each in found.microbatches], found.num_targets
    sizes = [each.num_targets for each in records]
    means = {TOKEN: [torch.full((size,), 1 / total, dtype=torch.float64) for size in sizes]}
    for name, groups in (
        (SAMPLE, [each.samples for each in records]),
        (SEQUENCE, [each.sequences for each in records]),
    ):
        if all(bool((each >= 0).all()) for each in groups):
            parts = [torch.unique(each, return_inverse=True, return_counts=True) for each in groups]
            number = sum(len(each[0]) for each in parts)
            means[name] = [1 / (number * sizes.double()[which]) for _, which, sizes in parts]
    filled = [size for size in sizes if size]
    means[OF_MICROBATCHES] = [
        torch.full((size,), 1 / (len(filled) * max(size, 1)), dtype=torch.float64) for size in sizes
    ]
    by_rank: dict[int, int] = {}
    for (rank, _), size in zip(found.microbatches, sizes, strict=True):
        by_rank[rank] = by_rank.get(rank, 0) + size
    means[OF_RANKS] = [
        torch.full((size,), 1 / (len(by_rank) * max(by_rank[rank], 1)), dtype=torch.float64)
        for (rank, _), size in zip(found.microbatches, sizes, strict=True)
    ]
    return means


def _measure_distances(found: UpdateFindings, gradient: Tensor) -> None:
    """Compare the gradient with that of each mean: microbatches' sketches, weighed anew."""
    for name, mean in _means_of(found).items():
        total: Tensor | None = None
        for (_, record), wanted in zip(found.microbatches, mean, strict=True):
            if record.sketch is None or not record.num_targets:
                continue
            ratio = wanted / record.weights
            if not ratio.isfinite().all() or float(ratio.std(correction=0)) > 4 * SAME * float(ratio.mean().abs()):
                break  # weights inside of the microbatch differ from the mean's: a sketch cannot be taken apart
            scaled = record.sketch * ratio.mean()
            total = scaled if total is None else total + scaled
        else:
            if total is not None and total.norm() and gradient.norm():
                found.distances[name] = Distance(
                    error=float((gradient - total).norm() / total.norm()),
                    length=float(gradient.norm() / total.norm()),
                    direction=float((gradient / gradient.norm() - total / total.norm()).norm()),
                )


# Faults


def find_miscounts(audit: Audit) -> list[str]:
    """Return a line for each microbatch that is dropped, counted in part or more than once, or leaked."""
    found: list[str] = []
    for each in audit.updates:
        of_all = f"of {len(each.microbatches)}"
        at = f"update {each.number}:"
        if each.dropped:
            found.append(f"{at} microbatch {_numbers(each.dropped)} {of_all} DROPPED")
        for number in each.miscounted:
            times = (each.counts or [])[number] / each.usual_count
            found.append(f"{at} microbatch {number + 1} {of_all} counted {times:.2g} times")
        if each.leaks > COUNT:
            found.append(f"{at} LEAKED into from an update before ({each.leaks:.2g} times)")
    if left := audit.left_over:
        found.append(f"at the end {plural(len(left), 'microbatch')} of {sum(left)} targets never stepped")
    return found


def find_rank_differences(updates: Sequence[UpdateFindings]) -> list[str]:
    """Return lines on ranks whose gradients or weights differ."""
    found: list[str] = []
    worst = max((each.rank_difference for each in updates), default=0.0)
    if worst > SAME:
        found.append(f"gradients of ranks DIFFER by {worst:.2g} before the step")
    if any(each.weights_differ for each in updates):
        found.append("the WEIGHTS of ranks differ")
    return found


def _find_scheduler(updates: Sequence[UpdateFindings]) -> list[str]:
    steps = [step for each in updates for step in each.scheduler_steps]
    return [f"scheduler: {max(steps)} steps per update"] if steps and max(steps) > 1 else []


def _find_unknown(audit: Audit, records: Sequence[Record]) -> Iterator[str]:
    found = [text for each in audit.updates for text in each.unknown]
    found += [text for each in records if isinstance(each, EndRecord) for text in each.notes]
    if any(not each.is_length_known for each in audit.updates):
        found.append("the gradient's length: something scales it between the last backward and the step")
    if not audit.updates:
        found.append("no step of a torch optimizer followed a backward of a watched model; a compiled step is not seen")
    yield from dict.fromkeys(found)


def _numbers(indices: Sequence[int]) -> str:
    return ", ".join(str(index + 1) for index in indices)


def plural(number: int, noun: str) -> str:
    """Return a number with its noun."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending if number != 1 else ''}"

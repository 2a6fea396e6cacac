"""Findings of an audit in ten lines."""

from collections.abc import Iterator, Sequence

import torch

from megabatch.planning.dealing import plan
from megabatch.verification.audit_advice import advise
from megabatch.verification.audit_report import (
    MEANS,
    OF_MICROBATCHES,
    SAME,
    SAMPLE,
    SEQUENCE,
    TOKEN,
    Audit,
    UpdateFindings,
    find_miscounts,
    find_rank_differences,
    largest_microbatch,
    plural,
)

UNKNOWN = "cannot tell"


def lines_of(audit: Audit) -> Iterator[tuple[str, str]]:
    """Yield the lines of an audit: a name of up to 11 characters, and a text."""
    updates = audit.updates
    title = f"megabatch audit{f' of {audit.command}' if audit.command else ''}: "
    yield "", title + verdict_of(audit)
    if not updates:
        for reason in audit.unknown:
            yield UNKNOWN, reason
        return
    yield "weights", weights_text(updates)
    yield "gradient", _gradient_text(audit)
    yield "change", advise(audit).text
    yield from facts_of(audit)
    yield UNKNOWN, "; ".join([*audit.unknown, "terms of the loss beside its cross-entropy"])


def facts_of(audit: Audit) -> Iterator[tuple[str, str]]:
    """Yield what was seen beside the weights: a name and a text."""
    updates = audit.updates
    targets = sum(update.num_targets for update in updates)
    microbatches = plural(sum(len(update.microbatches) for update in updates), "microbatch")
    ranks = plural(updates[0].world, "rank")
    yield "watched", f"{plural(len(updates), 'update')}, {ranks}, {microbatches}, {targets} targets"
    yield "counted", "; ".join(find_miscounts(audit)) or _counted_text(audit)
    yield "ranks", "; ".join(find_rank_differences(updates)) or _ranks_text(updates)
    yield "scheduler", f"{_scheduler_text(updates)}; collectives: {_collectives_text(updates)}"
    yield "padding", padding_text(updates)


def verdict_of(audit: Audit) -> str:
    """Return the verdict, which begins with "exact", "NOT exact", "depends" or "cannot tell"."""
    updates = audit.updates
    if not updates:
        return f"{UNKNOWN}, no update was seen"
    faults = ", and other things are WRONG" * bool(audit.problems)
    if any(update.weights is None for update in updates):
        return f"{UNKNOWN} what a token weighs{faults}"
    if audit.is_signed:
        return f"{UNKNOWN}: a preference or policy loss, whose weights have both signs{faults}"
    if any(update.counts is None for update in updates):
        return f"{UNKNOWN} how often microbatches are counted{faults}"
    error = audit.error("any")
    if error is None or error > SAME:
        names = sorted({update.kind or "none of the known means" for update in updates})
        return f"NOT exact: {' or '.join(names)}{_factors_text(updates)}"
    name = min(MEANS, key=lambda mean: (audit.error(mean) is None, audit.error(mean)))
    if audit.may_be_mean_of_means:
        distance = audit.error("token")
        away = "" if distance is None else f", {percent(distance)} off the token mean"
        return f"depends: the {MEANS[name]}, which is also the {OF_MICROBATCHES} here{away}{faults}"
    direction = "" if audit.is_length_known else " in direction"
    return f"exact{direction}: the {MEANS[name]}, off by {error:.1e}{faults}"


def percent(share: float) -> str:
    """Return a relative number as people read it."""
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1e}"


def _factors_text(updates: Sequence[UpdateFindings]) -> str:
    """Return by what the updates are multiplied, where that is not 1."""
    known = [update for update in updates if update.kind]
    if all(abs(update.factor - 1) <= SAME for update in known):
        return ""
    lowest, highest = (pick(update.factor for update in known) for pick in (min, max))
    if all(abs(update.factor - 1) > SAME for update in known):
        return f" x {lowest:.2g}" if f"{lowest:.2g}" == f"{highest:.2g}" else f" x {lowest:.2g} to {highest:.2g}"
    factors = (f"x {update.factor:.2g} in update {update.number}" for update in known if abs(update.factor - 1) > SAME)
    return f", {', '.join(factors)}"


def weights_text(updates: Sequence[UpdateFindings]) -> str:
    """Return what a target token weighs in the update where that is furthest from 1."""
    known = [update for update in updates if update.weights is not None and update.num_targets]
    if not known:
        return UNKNOWN
    worst = max(known, key=lambda update: float((torch.cat(update.weights or []) - 1).abs().max()))
    flat = torch.cat(worst.weights or [])
    smoothing = max(record.smoothing for _, record in worst.microbatches)
    extra = f"; label smoothing {smoothing:.2g}" if smoothing else ""
    lowest, highest = f"{float(flat.min()):.2f}", f"{float(flat.max()):.2f}"
    if worst.is_signed:
        negative = float((flat < 0).double().mean())
        return (
            f"from {lowest} to {highest} of a share in the token mean (update {worst.number}); negative for "
            f"{negative:.0%} of the tokens{_samples_text(worst)}{extra}"
        )
    if lowest == highest:
        return f"a target token weighs {lowest} of its share in the token mean (update {worst.number}){extra}"
    means = [float(weights.mean()) for weights in worst.weights or [] if weights.numel()]
    shown = ", ".join(f"{mean:.2f}" for mean in means[:8]) + (", ..." if len(means) > 8 else "")
    return (
        f"a target token weighs {lowest} to {highest} of its share in the token mean "
        f"(update {worst.number}; by microbatch {shown}){extra}"
    )


def _samples_text(update: UpdateFindings) -> str:
    """Return in how many samples every token weighs the same, as margins and advantages of a sample have it."""
    if any(bool((record.samples < 0).any()) for _, record in update.microbatches):
        return ""
    num_samples = num_even = 0
    for weights, (_, record) in zip(update.weights or [], update.microbatches, strict=True):
        for sample in record.samples.unique():
            inside = weights[record.samples == sample]
            num_samples += 1
            num_even += bool((inside.max() - inside.min()).abs() <= SAME * inside.abs().max())
    return f"; the same for all tokens of a sample in {num_even} of {num_samples} samples"


def _gradient_text(audit: Audit) -> str:
    if audit.is_signed:
        return f"{UNKNOWN}: it depends on margins or advantages"
    off: list[str] = []
    unknown: list[str] = []
    for name in (TOKEN, SAMPLE, SEQUENCE, OF_MICROBATCHES):
        distances = [update.distances.get(name) for update in audit.updates]
        if name == SEQUENCE and distances == [update.distances.get(SAMPLE) for update in audit.updates]:
            continue  # no row is packed
        known = [distance for distance in distances if distance is not None]
        if len(known) < len(distances):
            weights = [update.weight_distances[name] for update in audit.updates if name in update.weight_distances]
            unknown.append(name + (f" (its weights are {percent(max(weights))} off)" if weights else ""))
        elif audit.is_length_known:
            off.append(f"{percent(max(distance.error for distance in known))} off the {name}")
        else:
            off.append(f"{percent(max(distance.direction for distance in known))} off the {name} in direction")
    return "; ".join([*off, *(f"{UNKNOWN} for the {name}" for name in unknown)]) if off else UNKNOWN


def _counted_text(audit: Audit) -> str:
    if any(update.counts is None for update in audit.updates):
        return "cannot tell"
    if any(update.shares_counts for update in audit.updates):
        return "cannot tell which of the microbatches with equal gradients is counted"
    end = "nothing left over at the end" if audit.left_over == [] else "the end of the run was not watched"
    num_empty = sum(update.num_empty for update in audit.updates)
    empty = f"; {plural(num_empty, 'microbatch')} had no target, and a gradient of zero" if num_empty else ""
    return f"each microbatch once, none leaked into the next update; {end}{empty}"


def _ranks_text(updates: Sequence[UpdateFindings]) -> str:
    if updates[0].world == 1:
        return "one"
    complete = all(len({rank for rank, _ in update.microbatches}) == update.world for update in updates)
    sizes = [
        sum(record.num_targets for owner, record in updates[0].microbatches if owner == rank)
        for rank in range(updates[0].world)
    ]
    shown = f"targets by rank {', '.join(map(str, sizes[:8]))} in update 1"
    if not complete:
        return f"cannot tell; {shown}"
    return f"{'each holds its own shards' if updates[0].is_sharded else 'gradients and weights are equal'}; {shown}"


def _scheduler_text(updates: Sequence[UpdateFindings]) -> str:
    steps = sorted({step for update in updates for step in update.scheduler_steps})
    if not steps:
        return "cannot tell"
    if steps == [0]:
        return "none stepped"
    text = " or ".join(map(str, steps))
    return f"{text} step{'s' * (steps != [1])} per update{' (WRONG: 1 is right)' if steps[-1] > 1 else ''}"


def _collectives_text(updates: Sequence[UpdateFindings]) -> str:
    if updates[0].world == 1:
        return "none, one process"
    counted = next((update.collectives for update in updates if update.collectives is not None), None)
    if counted is None:
        return "cannot tell"
    parts = [f"{number} {name} of {_bytes_text(size)}" for name, (number, size) in sorted(counted.items())]
    return ", ".join(parts) or "none"


def padding_text(updates: Sequence[UpdateFindings]) -> str:
    """Return the share of padding, and what is left of it in microbatches that megabatch cuts by length."""
    rows = [(update, record) for update in updates for _, record in update.microbatches]
    twice = sum(len(hashes) - len(set(hashes)) for hashes in (
        [row for _, record in update.microbatches for row in record.row_hashes] for update in updates))  # fmt: skip
    same = f"; {plural(twice, 'sample')} seen twice in an update" if twice else "; no sample twice in an update"
    if not rows or not all(record.row_tokens for _, record in rows):
        return f"cannot tell (no attention_mask){same}"
    tokens = sum(sum(record.row_tokens) for _, record in rows)
    positions = sum(record.num_positions for _, record in rows)
    return f"{1 - tokens / max(positions, 1):.0%} of the computed tokens{_replanned_text(updates, positions)}{same}"


def _replanned_text(updates: Sequence[UpdateFindings], positions: int) -> str:
    """Return the padding with microbatches that are no larger than the largest here, cut by length."""
    cap = largest_microbatch(updates)
    computed = tokens = 0
    for update in updates:
        lengths = [max(1, size) for _, record in update.microbatches for size in record.row_tokens]
        for part in plan(lengths, dp_degree=min(update.world, len(lengths)), max_microbatch_tokens=cap):
            for rows in part.microbatches:
                computed += len(rows) * max((part.lengths[row] for row in rows), default=0)
        tokens += sum(lengths)
    return f" ({1 - tokens / computed:.0%} if megabatch cuts them by length)" if computed < positions else ""


def _bytes_text(size: int) -> str:
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size = size / 1000  # pyright: ignore[reportAssignmentType]
    return f"{size:.3g} GB"

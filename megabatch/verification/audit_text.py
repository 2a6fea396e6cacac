"""Findings of an audit in ten lines."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megabatch.planning.dealing import plan
from megabatch.verification.audit_advice import advise
from megabatch.verification.audit_records import join_rows
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
MAX_SHOWN = 8


def lines_of(audit: Audit) -> Iterator[tuple[str, str]]:
    """Yield the lines of an audit: a name of up to 11 characters, and a text."""
    updates = audit.updates
    command = f" of {audit.command}" if audit.command else ""
    yield "", f"megabatch audit{command}: {verdict_of(audit)}"
    if not updates:
        yield UNKNOWN, "; ".join(audit.unknown)
        return
    targets = sum(update.num_targets for update in updates)
    num_microbatches = sum(len(update.microbatches) for update in updates)
    ranks, microbatches = plural(updates[0].world, "rank"), plural(num_microbatches, "microbatch")
    yield "weights", weights_text(updates)
    yield "gradient", _gradient_text(audit)
    yield "change", advise(audit).text
    yield "watched", f"{plural(len(updates), 'update')}, {ranks}, {microbatches}, {targets} targets"
    yield "counted", "; ".join(find_miscounts(audit)) or _counted_text(audit)
    yield "ranks", "; ".join(find_rank_differences(updates)) or _ranks_text(audit)
    yield "scheduler", f"{_scheduler_text(audit)}; collectives: {_collectives_text(updates[0])}"
    yield "padding", _padding_text(updates)
    yield UNKNOWN, "; ".join([*audit.unknown, "terms of the loss beside its cross-entropy"])


def verdict_of(audit: Audit) -> str:
    """Return the verdict, which begins with "exact", "NOT exact", "depends" or "cannot tell"."""
    updates = audit.updates
    if not updates:
        return f"{UNKNOWN}, no update was seen"
    faults = ", and other things are WRONG" * bool(audit.problems)
    if not all(update.weights for update in updates):
        return f"{UNKNOWN} what a token weighs{faults}"
    if audit.is_signed:
        return f"{UNKNOWN}: a preference or policy loss, whose weights have both signs{faults}"
    if not audit.is_counted:
        return f"{UNKNOWN} how often microbatches are counted{faults}"
    errors = audit.errors
    name = min(MEANS.values(), key=lambda name: errors.get(name, math.inf))
    if not audit.is_near(name):
        kinds = sorted({update.kind for update in updates})
        return f"NOT exact: {' or '.join(kinds)}{_factors_text(updates)}"
    if audit.may_be_mean_of_means:
        away = f", {percent(errors[TOKEN])} off the {TOKEN}" if TOKEN in errors else ""
        return f"depends: the {name}, which is also the {OF_MICROBATCHES} here{away}{faults}"
    return f"exact{_direction(audit)}: the {name}, off by {errors[name]:.1e}{faults}"


def _direction(audit: Audit) -> str:
    return "" if audit.is_length_known else " in direction"


def percent(share: float) -> str:
    """Return a relative number as people read it."""
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1e}"


def span(values: Tensor, precision: str = ".2f") -> str:
    """Return the least and the largest number, once if they read the same."""
    ends = format(float(values.min()), precision), format(float(values.max()), precision)
    return " to ".join(dict.fromkeys(ends))


def _factors_text(updates: Sequence[UpdateFindings]) -> str:
    """Return by what the updates are multiplied, where that is not 1."""
    factors = {update.number: update.factor for update in updates if abs(update.factor - 1) > SAME}
    if len(factors) == len(updates):
        return f" x {span(torch.tensor(list(factors.values())), '.2g')}"
    return "".join(f", x {factor:.2g} in update {number}" for number, factor in factors.items())


def weights_text(updates: Sequence[UpdateFindings]) -> str:
    """Return what a target token weighs in the update where that is furthest from 1."""
    known = [update for update in updates if update.weights]
    if not known:
        return UNKNOWN
    worst = max(known, key=lambda update: float((update.all_weights - 1).abs().max()))
    means = [f"{float(weights.mean()):.2f}" for weights in worst.weights if weights.numel()]
    if len(means) > MAX_SHOWN:
        means = [*means[:MAX_SHOWN], "..."]
    text = (
        f"a target token weighs {span(worst.all_weights)} of its share in the token mean "
        f"(update {worst.number}; by microbatch {', '.join(means)})"
    )
    if worst.is_signed:
        negative = float((worst.all_weights < 0).double().mean())
        text += f"; negative for {negative:.0%} of the tokens{_samples_text(worst)}"
    smoothing = max(record.smoothing for record in worst.records)
    return f"{text}; label smoothing {smoothing:.2g}" if smoothing else text


def _samples_text(update: UpdateFindings) -> str:
    """Return in how many samples every token weighs the same, as margins and advantages of a sample have it."""
    sample_of_token = join_rows([record.samples for record in update.records])
    if sample_of_token.min() < 0:
        return ""
    weights_of_samples = [update.all_weights[sample_of_token == sample] for sample in sample_of_token.unique()]
    num_even = sum(bool(part.max() - part.min() <= SAME * part.abs().max()) for part in weights_of_samples)
    return f"; the same for all tokens of a sample in {num_even} of {len(weights_of_samples)} samples"


def _gradient_text(audit: Audit) -> str:
    if audit.is_signed:
        return f"{UNKNOWN}: it depends on margins or advantages"
    errors = audit.errors
    distances: list[str] = []
    unknown: list[str] = []
    for name in (TOKEN, SAMPLE, SEQUENCE, OF_MICROBATCHES):
        # Where no row is packed, sequences are samples.
        if name == SEQUENCE and errors.get(SEQUENCE) == errors.get(SAMPLE):
            continue
        if name in errors:
            distances.append(f"{percent(errors[name])} off the {name}{_direction(audit)}")
            continue
        of_weights = max(update.weight_distances.get(name, 0.0) for update in audit.updates)
        hint = f" (its weights are {percent(of_weights)} off)" if of_weights else ""
        unknown.append(f"{UNKNOWN} for the {name}{hint}")
    return "; ".join([*distances, *unknown]) if distances else UNKNOWN


def _counted_text(audit: Audit) -> str:
    if not audit.is_counted or any(update.shares_counts for update in audit.updates):
        return UNKNOWN
    parts = ["each microbatch once, none leaked into the next update", "the end of the run was not watched"]
    if audit.left_over is not None:
        parts[1] = "nothing left over at the end"
    num_empty = sum(update.num_empty for update in audit.updates)
    if num_empty:
        parts.append(f"{plural(num_empty, 'microbatch')} had no target, and a gradient of zero")
    return "; ".join(parts)


def _ranks_text(audit: Audit) -> str:
    first = audit.updates[0]
    if first.world == 1:
        return "one"
    sizes: Counter[int] = Counter()
    for rank, record in first.microbatches:
        sizes[rank] += record.num_targets
    verdict = "each holds its own shards" if first.is_sharded else "gradients and weights are equal"
    if not audit.is_counted:
        verdict = UNKNOWN
    shown = ", ".join(str(sizes[rank]) for rank in range(min(first.world, MAX_SHOWN)))
    return f"{verdict}; targets by rank {shown} in update 1"


def _scheduler_text(audit: Audit) -> str:
    steps = audit.scheduler_steps
    if not steps:
        return UNKNOWN
    noun = "step" if steps == [1] else "steps"
    warning = " (WRONG: 1 is right)" if steps[-1] > 1 else ""
    return f"{' or '.join(map(str, steps))} {noun} per update{warning}"


def _collectives_text(update: UpdateFindings) -> str:
    if update.world == 1:
        return "none, one process"
    if update.collectives is None:
        return UNKNOWN
    parts = [f"{number} {name} of {_bytes_text(size)}" for name, (number, size) in sorted(update.collectives.items())]
    return ", ".join(parts) or "none"


def _padding_text(updates: Sequence[UpdateFindings]) -> str:
    """Return the share of padding, and what is left of it if megabatch cuts microbatches no larger than the largest."""
    num_twice = tokens = positions = replanned = 0
    is_known = True
    for update in updates:
        lengths = [max(1, length) for length in update.row_tokens]
        num_twice += len(update.row_hashes) - len(set(update.row_hashes))
        tokens += sum(update.row_tokens)
        positions += update.num_positions
        if len(lengths) < max(1, len(update.row_hashes)):
            is_known = False
            continue
        dp_degree = min(update.world, len(lengths))
        for part in plan(lengths, dp_degree=dp_degree, max_microbatch_tokens=largest_microbatch(updates)):
            replanned += part.padded_tokens
    twice = f"{plural(num_twice, 'sample')} seen twice" if num_twice else "no sample twice"
    if not is_known:
        return f"{UNKNOWN} (no attention_mask); {twice} in an update"
    share = f"{1 - tokens / positions:.0%} of the computed tokens"
    if replanned < positions:
        share += f" ({1 - tokens / replanned:.0%} if megabatch cuts them by length)"
    return f"{share}; {twice} in an update"


def _bytes_text(size: int) -> str:
    power = min((len(str(size)) - 1) // 3, 3)
    return f"{size / 1000**power:.3g} {('B', 'KB', 'MB', 'GB')[power]}"

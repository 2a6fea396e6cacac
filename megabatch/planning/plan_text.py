"""A plan in words."""

from collections import Counter

from megabatch.planning.plan import Plan


def explain_plan(plan: Plan) -> str:
    """Describe a plan for a person, one fact per line."""
    dummies = sum(not rows for rows in plan.microbatches)
    rows = [len(rows) for rows in plan.microbatches if rows] or [0]
    spread = f"{min(rows)}" if min(rows) == max(rows) else f"{min(rows)} to {max(rows)}"
    samples = _count(len(plan.lengths), "sample", "s")
    microbatches = _count(plan.num_microbatches, "microbatch", "es")
    lines = [
        f"{samples} in {microbatches} of {spread}"
        + (f", {dummies} of them dummy microbatches of no weight" if dummies else ""),
        f"{plan.num_tokens:,} real tokens, {plan.padded_tokens:,} computed: {plan.padding:.1%} padding"
        + (f", {sum(plan.shared):,} shared" if plan.shared else ""),
        f"sync {plan.sync}" + (f": {plan.reason}" if plan.reason else ""),
    ]
    if len(plan.steps) > 1:
        lines.append(f"schedule steps of {', '.join(map(str, plan.steps))} microbatches")
    if plan.shapes:
        shapes = Counter(plan.shapes.values()).items()
        lines.append("filled up to " + ", ".join(f"{num} of {rows} x {tokens}" for (rows, tokens), num in shapes))
    if plan.num_split:
        lines.append(f"{_count(plan.num_split, 'microbatch', 'es')} did not fit in memory and ran in parts")
    if plan.seconds is not None:
        lines.append(f"predicted {plan.seconds:.3g} seconds")
    if plan.peak_bytes:
        lines.append(f"predicted peak {plan.peak_bytes / 2**30:.2f} GiB")
    return "\n".join(lines)


def _count(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"

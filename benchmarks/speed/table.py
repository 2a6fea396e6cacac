"""The tables of speed in docs/benchmarks.md, from a result: one for each regime and number of ranks."""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import result
from benchmarks.speed.agreement import EXACT
from benchmarks.speed.contestants import CONTESTANTS
from benchmarks.speed.data import NAMES

PAGE = result.ROOT / "docs" / "benchmarks.md"
START, END = "<!-- speed: python -m benchmarks.speed --table -->\n", "<!-- end of speed -->"
REGIME_TITLES = {"compute": "Compute-bound", "launch": "Launch-bound"}
LEGEND = """
{runs}
Numbers are CPU seconds per update over all ranks, wall seconds, and in brackets the CPU seconds as a multiple of
megabatch's. *micro batch* is the best size of each contestant for each data set, found by trying 1, 2, 4, ... 32.
*computed / real* divides the tokens that go through the model by those of the samples. *peak MB* is above the memory
before the run. Rows in italics train on other samples in each update, so compare them with care. *gradient off by* is
the error of a mean of microbatch means, at 8 samples a microbatch.
"""
ONE_RUN = "Each row is one run, so the noise is unknown."
Row = dict[str, Any]


def seconds(row: Row, key: str = "cpu_seconds") -> float:
    """Return the seconds of an update. If its samples are others, of as many tokens as the drawn ones have."""
    return row[key] * row.get("drawn_tokens", row["real_tokens"]) / row["real_tokens"]


def line(row: Row) -> str:
    """A row for who is watching."""
    return (
        f"{row['regime']:7} {row['data']:8} {row['ranks']} {row['contestant']:12} CPU {row['cpu_seconds']:7.3f} s, "
        f"wall {row['seconds_per_update']:7.3f} s at {row['micro_batch_size'] or 'tokens'}"
        f"  computed/real {row['computed_tokens'] / row['real_tokens']:.3f}  {row['peak_bytes'] / 1e6:7.1f} MB"
        f"  gradient off by {row['gradient_error']:.1e}  weights {row['weights_error'] or 0:.1e}"
        f"  sent {sum(row['collectives'].values())}"
    )


def newest() -> Path | None:
    return max(result.RESULTS.glob("speed_*.json"), default=None)


def write() -> None:
    """Between the two marks of the page."""
    path = newest()
    if path is None:
        raise SystemExit("no result yet: run python -m benchmarks.speed")
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + START + render(json.loads(path.read_text())) + END + after)


def render(found: dict[str, Any]) -> str:
    """A table for each number of ranks, and how to read them."""
    rows = [with_drawn_tokens(row, found["rows"]) for row in found["rows"]]
    kinds = sorted({(row["regime"], row["ranks"]) for row in rows}, key=lambda kind: (-len(kind[0]), kind))
    parts = [of_kind([row for row in rows if (row["regime"], row["ranks"]) == kind]) for kind in kinds]
    return "\n" + "\n".join(parts) + LEGEND.format(runs=runs_text(rows)) + "\n"


def runs_text(rows: list[Row]) -> str:
    """How often each was run, and how far apart the same work came out."""
    repeats = max(row.get("num_repeats", len(row["repeats_seconds"])) for row in rows)
    if repeats == 1:
        return ONE_RUN
    all_repeats = [row["repeats_cpu_seconds"] for row in rows]
    apart = [(max(each) - min(each)) / statistics.median(each) for each in all_repeats]
    usual, most = statistics.median(apart), max(apart)
    return (
        f"Each number is the median of {repeats} runs. Repeated runs vary by {usual:.0%} (one row by {most:.0%}). "
        "Treat smaller\ndifferences as noise."
    )


def with_drawn_tokens(row: Row, rows: Iterable[Row]) -> Row:
    """The row, with the tokens that an update has for those who keep its samples."""
    kind = (row["regime"], row["data"])
    same = [each for each in rows if (each["regime"], each["data"]) == kind and each["same_samples"]]
    return row | {"drawn_tokens": same[0]["real_tokens"] if same else row["real_tokens"]}


def of_kind(rows: list[Row]) -> str:
    """Return a table: contestants down, data sets across, in brackets the time as a multiple of megabatch's."""
    names = [name for name in NAMES if any(row["data"] == name for row in rows)]
    ranks = rows[0]["ranks"]
    kind = f"{REGIME_TITLES[rows[0]['regime']]}, {'1 process' if ranks == 1 else f'{ranks} processes (DDP)'}"
    head = [kind, *(NAMES[name] for name in names), "micro batch"]
    head += ["computed / real", "peak MB", "gradient off by"] + ["collectives"] * (ranks > 1)
    lines = [head, ["---"] * len(head)]
    for name in CONTESTANTS:
        own = {row["data"]: row for row in rows if row["contestant"] == name}
        if own:
            lines.append([title(name), *(cell(own.get(each), rows) for each in names), *summary(list(own.values()))])
    return "".join(f"| {' | '.join(each)} |\n" for each in lines)


def title(name: str) -> str:
    who = CONTESTANTS[name]
    return f"**{who.title}**" if name == "megabatch" else who.title if who.comparable else f"*{who.title}*"


def cell(row: Row | None, rows: list[Row]) -> str:
    """Seconds, and how many times megabatch's; those of other samples stand without that."""
    if row is None:
        return ""
    ours = next(
        (seconds(each) for each in rows if (each["data"], each["contestant"]) == (row["data"], "megabatch")), None
    )
    text = f"{seconds(row):.2f} s, {seconds(row, 'seconds_per_update'):.2f} s"
    if ours is None or not row["same_samples"]:
        return text if row["same_samples"] else f"*{text}*"
    return f"{text} ({seconds(row) / ours:.2f})"


def summary(rows: list[Row]) -> list[str]:
    """Over the data sets: padding of each, the most memory, the largest error."""
    padding = " ".join(f"{row['computed_tokens'] / row['real_tokens']:.2f}" for row in rows)
    error = max(row["gradient_error"] for row in rows)
    told = [
        " ".join(str(row["micro_batch_size"] or "tokens") for row in rows) if rows[0]["micro_batch_size"] else "tokens",
        padding,
        f"{max(row['peak_bytes'] for row in rows) / 1e6:.0f}",
        "exact" if error < EXACT else f"{error:.1%}",
    ]
    sent = statistics.median(sum(row["collectives"].values()) for row in rows)
    return [*told, f"{sent:.0f}"] if rows[0]["ranks"] > 1 else told

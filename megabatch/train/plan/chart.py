"""Chart: memory of rank 0 over one update, stacked by category."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.typing import RcKeyType

from megabatch.simulate import CATEGORIES
from megabatch.train.config.byte_sizes import GIB
from megabatch.train.plan.search import PlanRow

COLORS = {
    "parameters": "#2f6db5",
    "buffers": "#9db8d6",
    "optimizer states": "#7a5ea8",
    "gradients": "#b5395a",
    "unsharded parameters": "#3a9ca6",
    "unsharded gradients": "#e08aa0",
    "communication": "#8a6d3b",
    "activations": "#3c8d5a",
    "temporaries": "#d9822b",
}
INK, MUTED, LINE = "#1f2933", "#7b8794", "#e4e7eb"
STYLE: dict[RcKeyType, Any] = {
    "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.edgecolor": MUTED, "axes.labelcolor": INK, "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": LINE,
    "axes.axisbelow": True, "legend.frameon": False, "lines.linewidth": 1.8,
    "text.parse_math": False,  # a "$" in a file's name is a dollar
}  # fmt: skip


def draw_chart(path: Path, row: PlanRow, limit_bytes: int, title: str) -> None:
    """Write the chart of a simulated row."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 5.5), layout="constrained")
        axes = figure.subplots()
        names = [name for name in CATEGORIES if any(moment.bytes.get(name) for moment in row.history)]
        seconds = [moment.seconds for moment in row.history]
        gib = [[moment.bytes.get(name, 0) / GIB for moment in row.history] for name in names]
        axes.stackplot(seconds, gib, labels=names, colors=[COLORS[name] for name in names], step="post", linewidth=0)
        sums = [sum(parts) for parts in zip(*gib, strict=True)]
        top = max(sums)
        axes.plot(seconds[sums.index(top)], top, "o", color=INK, markersize=4, label=f"peak, {top:,.1f} GiB")
        if limit_bytes / GIB < 3 * top:
            axes.axhline(limit_bytes / GIB, color=INK, linestyle="--", linewidth=1.2, label="there for tensors")
        before = ["", *(moment.phase for moment in row.history)]
        starts = [moment for moment, phase in zip(row.history, before, strict=False) if moment.phase != phase]
        is_pipeline = row.parallel.pp > 1  # with as many phases as all microbatches have, whose names would overlap
        at = {moment.seconds: moment.phase for moment in starts}  # the last of those together
        for start, phase in () if is_pipeline else at.items():
            axes.axvline(start, color=LINE, linewidth=1)
            axes.annotate(
                phase, (start, 1), xycoords=("data", "axes fraction"), xytext=(3, -3), textcoords="offset points",
                va="top", fontsize=8, color=MUTED,
            )  # fmt: skip
        n = row.choice.num_microbatches
        part = f", of whose {n} microbatches two are shown" if n > 2 and not is_pipeline else ""
        whose = "the rank of the pipeline that needs most" if is_pipeline else "rank 0"
        axes.set(
            title=title, xlabel=f"seconds of computing in one update{part}", ylabel=f"GiB of {whose}",
            xlim=(0, seconds[-1]),
        )  # fmt: skip
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
        figure.savefig(path, dpi=130)

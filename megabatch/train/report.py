"""Report: a run in one picture, drawn from its metrics and one update's plan."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import RcKeyType

from megabatch import Plan
from megabatch.train import metrics
from megabatch.train.metrics import Row, read_rows

FILE_NAME = "report.png"

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN, SAND = "#2f6db5", "#d9822b", "#3c8d5a", "#e8d9bd"
STYLE: dict[RcKeyType, Any] = {
    "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.edgecolor": MUTED, "axes.labelcolor": INK, "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID,
    "axes.axisbelow": True, "legend.frameon": False, "lines.linewidth": 1.8,
}  # fmt: skip


def draw_report(folder: Path, plan: Plan, title: str) -> None:
    """Write ``report.png``: losses over the width, learning rate and gradient norm, and one update's cut."""
    rows = read_rows(folder / metrics.FILE_NAME)
    updates = [row for row in rows if row.get("loss") is not None]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 10), layout="constrained")
        axes = figure.subplot_mosaic(
            [["loss", "loss"], ["lr", "grad_norm"], ["cut", "cut"]], height_ratios=[1.5, 1, 1.2]
        )
        figure.suptitle(title, x=0.02, ha="left", fontsize=14, fontweight="bold")
        draw_losses(axes["loss"], updates, [row for row in rows if "eval_loss" in row])
        draw_curve(axes["lr"], updates, "lr", "learning rate", GREEN)
        draw_curve(axes["grad_norm"], updates, "grad_norm", "gradient norm before clipping", MUTED)
        draw_cut(axes["cut"], plan)
        figure.savefig(folder / FILE_NAME, dpi=130)


def draw_losses(axes: Axes, updates: Sequence[Row], evaluations: Sequence[Row]) -> None:
    """The loss of every update, and the held-out loss where it was taken, with its last value written."""
    axes.plot(
        [row["step"] for row in updates], [row["loss"] for row in updates], color=BLUE, alpha=0.75, label="update"
    )
    if evaluations:
        steps, losses = [row["step"] for row in evaluations], [row["eval_loss"] for row in evaluations]
        axes.plot(steps, losses, color=ORANGE, marker="o", markersize=5, label="held-out")
        axes.annotate(
            f"{losses[-1]:.3f}", (steps[-1], losses[-1]), xytext=(0, 9), textcoords="offset points",
            color=ORANGE, ha="center", fontweight="bold",
        )  # fmt: skip
    axes.set(title="loss per target token (nats)", xlabel="update", ylim=(0, None))
    axes.legend(loc="upper right")


def draw_curve(axes: Axes, updates: Sequence[Row], key: str, title: str, color: str) -> None:
    """One number of every update that has it."""
    points = [(row["step"], row[key]) for row in updates if row[key] is not None]
    axes.plot([step for step, _ in points], [value for _, value in points], color=color)
    axes.set(title=title, xlabel="update", ylim=(0, None))
    if not points:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=MUTED)


def draw_cut(axes: Axes, plan: Plan) -> None:
    """A bar a microbatch: real tokens below, padding above, the number of samples on top."""
    microbatches = [rows for rows in plan.microbatches if rows]
    real = [sum(plan.lengths[row] for row in rows) for rows in microbatches]
    padded = [len(rows) * max(plan.lengths[row] for row in rows) for rows in microbatches]
    places = range(1, len(microbatches) + 1)
    axes.bar(places, real, color=BLUE, label="real tokens")
    axes.bar(
        places, [all_ - own for all_, own in zip(padded, real, strict=True)], bottom=real, color=SAND, label="padding"
    )
    for place, rows, height in zip(places, microbatches, padded, strict=True):
        if len(microbatches) <= 40:
            axes.annotate(
                f"{len(rows)}", (place, height), xytext=(0, 3), textcoords="offset points", ha="center", color=MUTED
            )
    axes.set(
        title=f"the last update as rank 0 cut it: {len(plan.lengths)} samples, {len(microbatches)} microbatches, "
        f"{plan.padding:.1%} padding",
        xlabel="microbatch, with its number of samples on top",
        ylabel="tokens",
        xlim=(0.4, len(microbatches) + 0.6),
        ylim=(0, max(padded, default=1) * 1.25),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper right", ncols=2)

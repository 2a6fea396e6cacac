"""Report: a run in one picture, drawn from its metrics and one update's plan."""

import math
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.typing import RcKeyType

from megabatch import Plan
from megabatch.train.checkpoints.run_folder import write_if_room
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.jsonl_file import METRICS, Row, is_evaluation, read_rows

FILE_NAME = "report.png"
LOSS_OF_TOKENS = "loss per target token (nats)"

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, GREEN, PURPLE, SAND = "#2f6db5", "#3c8d5a", "#7a5ea8", "#e8d9bd"
SET_COLORS = ("#d9822b", "#3c8d5a", "#b5395a", "#7a5ea8", "#3a9ca6", "#8a6d3b")
NUM_LABELLED = 40  # microbatches with a number on top, beyond which there is no room
NUM_POINTS = 200  # updates that are drawn as a line of their own; more are drawn faintly, with their running mean
NUM_WINDOWS = 60  # over the width, each as wide as what a running mean takes in
MARGINS = {
    "left": 0.085,
    "right": 0.98,
    "top": 0.935,
    "bottom": 0.045,
    "hspace": 0.36,
    "wspace": 0.17,
}  # for any number
STYLE: dict[RcKeyType, Any] = {
    "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.edgecolor": MUTED, "axes.labelcolor": INK, "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID,
    "axes.axisbelow": True, "legend.frameon": False, "lines.linewidth": 1.8,
    "text.parse_math": False,  # a "$" in a name is a dollar
}  # fmt: skip


def write_report(folder: Path, plan: Plan, title: str, console: Console, *, of_tokens: bool) -> None:
    """Draw it at the end of a run, which a full disk does not spoil."""
    write_if_room(folder / FILE_NAME, lambda: draw_report(folder, plan, title, of_tokens=of_tokens), console)


def draw_report(folder: Path, plan: Plan, title: str, *, of_tokens: bool = True) -> None:
    """Write ``report.png``: losses over the width, what moved and what it cost, and one update's cut."""
    rows = read_rows(folder / METRICS)
    updates = [row for row in rows if not is_evaluation(row)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 12))
        axes = figure.subplot_mosaic(
            [["loss", "loss"], ["lr", "grad_norm"], ["throughput", "memory"], ["cut", "cut"]],
            height_ratios=[1.7, 1, 1, 1.2],
            gridspec_kw=MARGINS,
        )
        figure.suptitle(title, x=0.02, y=0.985, ha="left", fontsize=14, fontweight="bold")
        draw_losses(
            axes["loss"], updates, [row for row in rows if is_evaluation(row)], LOSS_OF_TOKENS if of_tokens else "loss"
        )
        draw_curve(axes["lr"], updates, "lr", "learning rate", GREEN)
        draw_curve(axes["grad_norm"], updates, "grad_norm", "gradient norm before clipping", PURPLE)
        unit = "samples" if any("samples_per_second" in row for row in updates) else "tokens"
        real = "real tokens" if unit == "tokens" else unit
        draw_curve(axes["throughput"], updates, f"{unit}_per_second", f"{real} per second", BLUE)
        draw_curve(axes["memory"], updates, "memory_gib", "most memory of the main rank (GiB)", MUTED)
        draw_cut(axes["cut"], plan, unit)
        beside = folder / f"{FILE_NAME}.tmp"
        try:
            figure.savefig(beside, dpi=130, format="png")
            os.replace(beside, folder / FILE_NAME)
        finally:
            beside.unlink(missing_ok=True)  # where the disk is full


def draw_losses(axes: Axes, updates: Sequence[Row], evaluations: Sequence[Row], title: str) -> None:
    """The loss of every update, and of each set where it was taken, with its last value in the legend."""
    draw_points(axes, *points_of(updates, "loss"), BLUE, "update")
    for number, name in enumerate(dict.fromkeys(row["set"] for row in evaluations)):
        steps, losses = points_of([row for row in evaluations if row["set"] == name], "eval_loss")
        if steps:
            color, style = SET_COLORS[number % len(SET_COLORS)], "-" if number < len(SET_COLORS) else "--"
            label = f"{name}: {losses[-1]:.3f}"
            axes.plot(steps, losses, color=color, marker="o", markersize=4, linestyle=style, label=label)
    set_scales(axes, title, [*updates, *evaluations])
    if axes.lines:
        axes.legend(loc="upper right", ncols=1 + len(axes.lines) // 8)


def draw_curve(axes: Axes, updates: Sequence[Row], key: str, title: str, color: str) -> None:
    """One number of every update that has it."""
    draw_points(axes, *points_of(updates, key), color, title)
    set_scales(axes, title, updates)


def draw_points(axes: Axes, steps: list[int], values: list[float], color: str, label: str) -> None:
    """A line; where it has more points than can be told apart, a faint one and its running mean."""
    if not steps:
        return
    if len(steps) <= NUM_POINTS:
        marker = "o" if len(steps) < 3 else ""  # a line too short to be seen
        axes.plot(steps, values, color=color, alpha=0.8, marker=marker, markersize=4, label=label)
        return
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=1, label=label)
    axes.plot(steps, running_mean(values, len(values) // NUM_WINDOWS), color=color, label=f"{label}, running mean")


def draw_cut(axes: Axes, plan: Plan, unit: str) -> None:
    """A bar a microbatch: real tokens below, padding above, the number of samples on top."""
    microbatches = [rows for rows in plan.microbatches if rows]
    real = [sum(plan.lengths_of(rows)) for rows in microbatches]
    padded = [plan.tokens_of(rows) for rows in microbatches]
    if unit == "samples":
        real = padded = [len(rows) for rows in microbatches]
    places = range(1, len(microbatches) + 1)
    axes.bar(places, real, color=BLUE, label=f"real {unit}" if unit == "tokens" else unit)
    padding = [whole - own for whole, own in zip(padded, real, strict=True)]
    axes.bar(places, padding, bottom=real, color=SAND, label="padding")
    if len(microbatches) <= NUM_LABELLED:
        for place, rows, height in zip(places, microbatches, padded, strict=True):
            axes.annotate(
                f"{len(rows)}", (place, height), xytext=(0, 3), textcoords="offset points", ha="center", color=MUTED
            )
    share = f", {plan.padding:.1%} padding" if unit == "tokens" else ""
    axes.set(
        title=f"the last update as rank 0 cut it: samples {len(plan.lengths)}, microbatches {len(microbatches)}{share}",
        xlabel="microbatch, with its number of samples on top",
        ylabel=unit,
        xlim=(0.4, max(len(microbatches), 1) + 0.6),
        ylim=(0, max(padded, default=1) * 1.25),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(axis="x", visible=False)
    if unit == "tokens":
        axes.legend(loc="upper right", ncols=2)


def points_of(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """Steps, and what the rows that have a finite number under the key have there."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None and math.isfinite(row[key])]
    return [step for step, _ in points], [value for _, value in points]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those before it, ``window`` at most."""
    sums = [0.0, *accumulate(values)]
    firsts = [max(0, last - window) for last in range(1, len(sums))]
    return [(sums[last] - sums[first]) / (last - first) for last, first in enumerate(firsts, start=1)]


def set_scales(axes: Axes, title: str, rows: Sequence[Row]) -> None:
    """Title and scales: every update of the run, and values from zero where none is below it."""
    values = [value for line in axes.lines for value in cast(Sequence[float], line.get_ydata())]
    axes.set(title=title, xlabel="update")
    axes.set_xlim(0, max([2, *(row["step"] for row in rows)]) * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(number_text))
    if values and min(values) >= 0:
        axes.set_ylim(0, max(values) * 1.08 or 1)
    if not values:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=MUTED)
        axes.set(xticks=[], yticks=[])


def number_text(value: float, _: int | None) -> str:
    """A number at a tick, without an offset that stands elsewhere."""
    return f"{value:.6g}"

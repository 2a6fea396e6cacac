"""Table: the rows for a person, the best on top; what to set, and why the next one loses."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console as RichConsole
from rich.table import Table

from megabatch.train.config import Config
from megabatch.train.config.batch_size import sizes_of
from megabatch.train.config.byte_sizes import GB, GIB, gb_text, gib_text
from megabatch.train.plan.asked import Asked
from megabatch.train.plan.lines import command_line, keys_of, toml_lines
from megabatch.train.plan.rows import NO, RUN, TIGHT, YES, Row
from megabatch.train.plan.subject import Subject

WIDTH = 160  # where there is no terminal to ask
MOST_ROWS = 16  # of those that fit; --json has all
NUM_TOO_LARGE = 6  # rows that do not fit, the nearest of them
STYLES = {YES: "green", TIGHT: "yellow", NO: "red"}
GROUPS = {  # column → categories
    "states": ("parameters", "buffers", "optimizer states"),
    "gradients": ("gradients", "unsharded gradients"),
    "gathered": ("unsharded parameters", "communication"),
    "activations": ("activations", "temporaries"),
}
LEFT = ("fits", "sync", "bound by")


def show(rows: Sequence[Row], subject: Subject, asked: Asked, recipe: Path) -> None:
    """Print the plan."""
    console = RichConsole(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
    console.print(heading(subject, asked), markup=False)
    console.print(table_of(rows), soft_wrap=False)
    console.print(conclusion(rows, subject.config, asked, recipe), markup=False)


def heading(subject: Subject, asked: Asked) -> str:
    """What is planned, on what."""
    config, device, axes = subject.config, asked.device, subject.axes or {}
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in axes.items())
    ranks = f"{asked.world} ranks ({mesh})" if asked.world > 1 else "1 rank"
    num_parameters = subject.sizes.num_parameters * axes.get("tp", 1)
    return (
        f"{num_parameters:,} parameters in {config.model.dtype}, {subject.wrapper.name} on {ranks}; {device.name} with "
        f"{gib_text(asked.memory_bytes)}, {gib_text(asked.limit_bytes)} of it for tensors\n"
        f"an update of {size_text(config)}, {subject.grid.samples_per_rank} a rank, all as long "
        f"as the longest: {subject.sample.length_tokens:,} tokens ({subject.sample.source})\n"
        f"{lowered_text(config, subject.grid.samples_per_rank)}"
    )


def lowered_text(config: Config, samples_per_rank: int) -> str:
    """What is to be said where the recipe states a microbatch that no rank can fill; "" elsewhere."""
    stated = config.update.micro_batch_size
    if stated is None or stated <= samples_per_rank:
        return ""
    return f"update.micro_batch_size {stated} is lowered: a rank has no more samples of an update\n"


def size_text(config: Config) -> str:
    """How many samples the update has that is planned."""
    sizes = sizes_of(config.update)
    return f"{sizes.largest} samples{', the largest of update.global_batch_size' if len(sizes.sizes) > 1 else ''}"


def table_of(rows: Sequence[Row]) -> Table:
    """The rows that fit, and the nearest that do not."""
    memory, memory_unit = (GIB, "GiB") if rows[0].peak_bytes >= GIB else (2**20, "MiB")
    wire, wire_unit = (GB, "GB") if max(row.sent_bytes for row in rows) >= GB else (10**6, "MB")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    in_memory = [f"{name}\n{memory_unit}" for name in (*GROUPS, "peak", "reserved")]
    names = ["fits", "samples\nat once", "micro-\nbatches", "sync", "recom-\npute", "optimizer", *in_memory]
    for name in (*names, f"sent\n{wire_unit}", "time\ns", "bound by"):
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True)
    for row in shown(rows):
        table.add_row(*cells(row, memory, wire), style=STYLES[row.fits] if sys.stdout.isatty() else None)
    return table


def shown(rows: Sequence[Row]) -> list[Row]:
    """Those that a person wants to see."""
    too_large = sorted((row for row in rows if row.fits == NO), key=lambda row: row.peak_bytes)
    return [*[row for row in rows if row.fits != NO][:MOST_ROWS], *too_large[:NUM_TOO_LARGE]]


def cells(row: Row, memory: float, wire: float) -> list[str]:
    """A row as text; "~" is of the closed form."""
    choice, about = row.choice, "" if row.by == RUN else "~"
    groups = [sum(row.at_peak.get(name, 0) for name in names) for names in GROUPS.values()]
    return [
        row.fits,
        str(choice.micro_batch_size),
        str(choice.num_microbatches),
        choice.sync + ("" if choice.reshard else ", kept gathered"),
        "yes" if choice.recompute else "no",
        "fused" if choice.fused else "foreach",
        *(f"{size / memory:,.1f}" if row.at_peak else "" for size in groups),
        *(f"{about}{size / memory:,.1f}" for size in (row.peak_bytes, row.reserved_bytes)),
        f"{about}{row.sent_bytes / wire:,.1f}",
        f"{about}{row.seconds:.3g}",
        row.bound,
    ]


def conclusion(rows: Sequence[Row], config: Config, asked: Asked, recipe: Path) -> str:
    """The recipe's lines and why they are these; or that nothing fits."""
    num_hidden = len(rows) - len(shown(rows))
    more = [f"and {num_hidden} more, which --json has"] if num_hidden else []
    best, *others = rows
    if best.fits == NO:
        smallest = min(rows, key=lambda row: row.peak_bytes)
        return "\n".join([*more, f"nothing fits: the least is {gib_text(smallest.peak_bytes)} ({named(smallest)})"])
    keys = keys_of(best, config)
    closed = ["~ by the closed form: no run could make it the best"] if any(row.by != RUN for row in rows) else []
    lines = [*more, *closed, f"best: {named(best)}: {best.why}"]
    if others:
        lines.append(f"runner-up: {named(others[0])}: {loss_of(others[0], best)}")
    return "\n".join([*lines, "", toml_lines(keys), "", f"or: {command_line(keys, recipe, asked)}"])


def named(row: Row) -> str:
    """A row in words."""
    choice, n = row.choice, row.choice.num_microbatches
    microbatches = "1 microbatch" if n == 1 else f"{n} microbatches"
    recompute = "activations recomputed" if choice.recompute else "activations kept"
    gathered = "" if choice.reshard else ", weights kept gathered"
    optimizer = "fused" if choice.fused else "foreach"
    return (
        f"{microbatches} of {choice.micro_batch_size}, sync {choice.sync}, {recompute}{gathered}, {optimizer} optimizer"
    )


def loss_of(row: Row, best: Row) -> str:
    """Why a row is not the best, in words."""
    if row.fits != best.fits:
        return row.why
    slower = row.seconds / best.seconds - 1
    if slower < 0:  # see with_best_first
        return f"{gb_text(row.sent_bytes)} sent instead of {gb_text(best.sent_bytes)}"
    if slower >= 0.001:
        sent = f"{gb_text(row.sent_bytes)} sent instead of {gb_text(best.sent_bytes)}"
        return f"{slower:.1%} slower, {sent}, bound by {row.bound}"
    more = row.reserved_bytes - best.reserved_bytes
    return f"as fast, and takes {gib_text(more)} more" if more > 0 else "as fast, and takes as much"

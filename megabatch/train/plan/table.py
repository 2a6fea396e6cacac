"""Table: `megabatch plan` prints its rows, the keys of the best one and why the next one loses."""

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import tomli_w
from rich import box
from rich.console import Console as RichConsole
from rich.measure import Measurement
from rich.table import Table

from megabatch.train.config import Config
from megabatch.train.config.batch_size import sizes_of
from megabatch.train.config.byte_sizes import GB, GIB, gb_text, gib_text
from megabatch.train.config.contradictions import problems
from megabatch.train.config.recipe import load_config
from megabatch.train.model.architecture import architecture_of, outline, silence
from megabatch.train.parallel.pipeline_stages import stages_text
from megabatch.train.parallel.utilization import arithmetic_of, utilization_of
from megabatch.train.plan.layouts import build_layouts, layout_text
from megabatch.train.plan.request import UNITS, PlanRequest
from megabatch.train.plan.search import MAX_SIMULATIONS, NO, SIMULATION, TIGHT, YES, PlanRow, search_choices, sort_rows
from megabatch.train.plan.simulation import Simulator, build_simulator
from megabatch.train.runtime.console import Console, count

# In seconds.
DAY = 24 * 3600.0
# By section and key, the value.
Keys = dict[str, dict[str, Any]]
# Width without a terminal.
WIDTH = 160
# Width of a table, whose longest line is measured.
MOST_WIDTH = 1000
# Rows that fit. --json has all.
MAX_ROWS = 16
MAX_LAYOUT_ROWS = 10
# Rows that do not fit, the nearest ones.
MAX_TOO_LARGE = 6
STYLES = {YES: "green", TIGHT: "yellow", NO: "red"}
# By column, its categories.
GROUPS = {
    "states": ("parameters", "buffers", "optimizer states"),
    "gradients": ("gradients", "unsharded gradients"),
    "gathered": ("unsharded parameters", "communication"),
    "activations": ("activations", "temporaries"),
}
LEFT = ("layout", "fits", "sync", "bound by")
# HOST is one of the machines.
RENDEZVOUS = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500", "--rdzv-id", "megabatch")


def plan_recipe(recipe: Path, request: PlanRequest) -> list[PlanRow]:
    """Plan a recipe and print the result. Return the rows, the best first. Raises `MegabatchError`."""
    config = load_config(recipe, list(request.overrides))
    console = Console(enabled=not request.as_json, loss_digits=4)
    with silence():
        layouts, left_out = build_layouts(config, request, console) if request.layouts else ([], [])
        simulators = layouts or [build_simulator(config, request, console)]
        num_choices = sum(len(simulator.grid.choices()) for simulator in simulators)
        num_simulations = min(num_choices, MAX_SIMULATIONS)
        with console.progress(f"planning {num_choices:,} choices", num_simulations, "simulations or so") as advance:
            rows = search_choices(simulators, request.limit_bytes, advance)
            if request.layouts and rows[0].fits == NO and not config.parallel.cpu_offload:
                rows = _with_offload(rows, simulators, request, advance)
    if request.as_json:
        print(json.dumps([row.as_json() for row in rows], indent=2))
    else:
        rich = RichConsole(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
        rich.print(_heading(simulators, request), markup=False)
        _print_table(rich, rows, has_layouts=request.layouts)
        rich.print("\n".join([*left_out, _conclusion(rows, simulators[0], request, recipe)]), markup=False)
    return rows


def _with_offload(
    rows: list[PlanRow], simulators: Sequence[Simulator], request: PlanRequest, advance: Callable[[int], None]
) -> list[PlanRow]:
    """Return the rows with those of each FSDP2 layout without tensor parallelism, offloaded to the host."""
    offloaded: list[Simulator] = []
    for simulator in simulators:
        parallel = simulator.config.parallel.model_copy(update={"cpu_offload": True})
        config = simulator.config.model_copy(update={"parallel": parallel})
        if "parallel.cpu_offload" not in request.stated_keys and next(problems(config), None) is None:
            sizes = replace(simulator.sizes, offloads=True)
            offloaded.append(replace(simulator, config=config, sizes=sizes))
    return sort_rows([*rows, *search_choices(offloaded, request.limit_bytes, advance)]) if offloaded else rows


def _heading(simulators: Sequence[Simulator], request: PlanRequest) -> str:
    simulator, *further = simulators
    config, device, axes = simulator.config, request.device, simulator.axes or {}
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in axes.items())
    ranks = f"{request.world} ranks ({mesh})" if request.world > 1 else "1 rank"
    how = f"{len(simulators)} layouts of {request.world} ranks" if further else f"{simulator.wrapper.name} on {ranks}"
    num_parameters = simulator.sizes.num_parameters * axes.get("tp", 1)
    sizes = sizes_of(config.update)
    samples_per_rank = simulator.grid.samples_per_rank // simulator.sample.num_chunks
    largest = ", the largest of update.global_batch_size" if len(sizes.sizes) > 1 else ""
    per_rank = "" if further else f", {samples_per_rank} a rank"
    text = (
        f"{num_parameters:,} parameters in {config.model.dtype}, {how}; {device.name} "
        f"with {gib_text(request.memory_bytes)}, {gib_text(request.limit_bytes)} of it for tensors, "
        f"with a margin of {device.margin:.1%}\n"
        f"an update of {sizes.largest} samples{largest}{per_rank}, {_lengths_text(simulator)}\n"
    )
    stated = config.update.micro_batch_size
    if simulator.ends and not further:
        text += (
            f"{stages_text(config.parallel)}; memory is that of the first rank or of the last, whichever needs more\n"
        )
    if stated is not None and stated > samples_per_rank and not further:
        text += f"update.micro_batch_size {stated} is lowered: a rank has no more samples of an update\n"
    return text


def _lengths_text(simulator: Simulator) -> str:
    sample, lengths = simulator.sample, simulator.grid.lengths
    longest = f"{sample.whole_tokens:,} tokens ({sample.source})"
    if sample.uncut_tokens is not None:
        longest += f" in chunks of {sample.length_tokens:,}"
    if lengths is None:
        return f"all as long as the longest: {longest}"
    return (
        f"memory for the longest: {longest}; time by {len(lengths.updates)} updates of {lengths.num_tokens:,.0f} tokens"
    )


def _print_table(rich: RichConsole, rows: Sequence[PlanRow], *, has_layouts: bool) -> None:
    """Print the rows, without the parts of the peak where the terminal is too narrow for them; no cell is cut."""
    tables = [_table(rows, has_layouts=has_layouts, has_parts=has_parts) for has_parts in (not has_layouts, False)]
    options = rich.options.update(max_width=MOST_WIDTH)
    widths = [Measurement.get(rich, options, table).maximum for table in tables]
    is_narrow = sys.stdout.isatty() and widths[0] > rich.width
    table, width = (tables[1], widths[1]) if is_narrow else (tables[0], widths[0])
    # Without a height, rich takes 80 columns for a terminal that it calls dumb, whatever the width.
    wide = RichConsole(highlight=False, width=max(width, rich.width), height=rich.height)
    wide.print(table, crop=False)


def _table(rows: Sequence[PlanRow], *, has_layouts: bool, has_parts: bool) -> Table:
    memory, memory_unit = (GIB, "GiB") if rows[0].peak_bytes >= GIB else (2**20, "MiB")
    wire, wire_unit = (GB, "GB") if max(row.sent_bytes for row in rows) >= GB else (10**6, "MB")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    parts = tuple(GROUPS) if has_parts else ()
    in_memory = [f"{name}\n{memory_unit}" for name in (*parts, "peak", "reserved", "needed")]
    layout = ["layout"] * has_layouts
    unit = "samples" if rows[0].choice.limit_tokens is None else "tokens"
    names = [*layout, "fits", f"{unit}\nat once", "micro-\nbatches", "sync", "recom-\npute", *in_memory]
    for name in (*names, f"sent\n{wire_unit}", "time\ns", "bound by"):
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True)
    for row in _best_of_layouts(rows) if has_layouts else _shown(rows):
        cells = _cells(row, memory, wire)
        if not has_parts:
            cells = [*cells[:5], *cells[5 + len(GROUPS) :]]
        if has_layouts:
            cells = [layout_text(row.parallel), *cells]
        table.add_row(*cells, style=STYLES[row.fits] if sys.stdout.isatty() else None)
    return table


def _shown(rows: Sequence[PlanRow]) -> list[PlanRow]:
    too_large = sorted((row for row in rows if row.fits == NO), key=lambda row: row.peak_bytes)
    return [*[row for row in rows if row.fits != NO][:MAX_ROWS], *too_large[:MAX_TOO_LARGE]]


def _best_of_layouts(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Return the best row of each layout, and the next best ones up to as many as are printed."""
    best_rows: dict[str, PlanRow] = {}
    for row in rows:
        best_rows.setdefault(layout_text(row.parallel), row)
    firsts = list(best_rows.values())[:MAX_LAYOUT_ROWS]
    ids = {id(row) for row in [*firsts, *rows][:MAX_LAYOUT_ROWS]}
    return [row for row in rows if id(row) in ids]


def _cells(row: PlanRow, memory: float, wire: float) -> list[str]:
    choice, about = row.choice, "" if row.by == SIMULATION else "~"
    at_least = ">=" if row.is_least else about
    groups = [sum(row.at_peak.get(name, 0) for name in names) for names in GROUPS.values()]
    return [
        row.fits,
        f"{choice.limit_tokens or choice.micro_batch_size:,}",
        str(choice.num_microbatches),
        choice.sync + ("" if choice.reshard else ", kept gathered"),
        {True: "yes", False: "no", "selective": "selective"}[choice.recompute],
        *(f"{size / memory:,.1f}" if row.at_peak else "" for size in groups),
        *(f"{at_least}{size / memory:,.1f}" for size in (row.peak_bytes, row.reserved_bytes, row.margined_bytes)),
        f"{about}{row.sent_bytes / wire:,.1f}",
        f"{about}{row.seconds:.3g}",
        row.bound,
    ]


def _conclusion(rows: Sequence[PlanRow], simulator: Simulator, request: PlanRequest, recipe: Path) -> str:
    """Return the keys of the best row, the command that runs it and why the next row loses; or that nothing fits."""
    shown = _best_of_layouts(rows) if request.layouts else _shown(rows)
    num_hidden = len(rows) - len(shown)
    lines = [f"and {num_hidden} more, which --json has"] if num_hidden else []
    best, *further = rows
    if best.fits == NO:
        smallest = min(rows, key=lambda row: row.peak_bytes)
        bound = "at least " if smallest.is_least else ""
        smallest_text = f"the least is {bound}{gib_text(smallest.peak_bytes)} ({_name(smallest, request)})"
        return "\n".join([*lines, f"nothing fits: {smallest_text}"])
    if any(row.by != SIMULATION for row in rows):
        lines.append(
            "~ by the closed form, calibrated by the simulations; >= a lower bound: no run could make it the best"
        )
    if best.host_bytes:
        lines.append(f"on the host: {gib_text(best.host_bytes)} of each rank")
    if best.is_least:
        lines.append(">= at least: the kernels of this optimizer's step are not simulated")
    lines.append(f"best: {_name(best, request)}: {best.why}; {best.tokens_per_second:,.0f} tokens/s")
    lines += _speed_lines(best, simulator, request)
    if request.layouts:
        lines += [f"{number}. {_name(row, request)}: {_why_not(row, best)}" for number, row in enumerate(shown[1:], 2)]
    elif further:
        lines.append(f"runner-up: {_name(further[0], request)}: {_why_not(further[0], best)}")
    if not request.layouts:
        lines += _balance_lines(best, simulator)
    keys = keys_of(best, simulator.config)
    return "\n".join([*lines, "", tomli_w.dumps(keys).rstrip(), "", f"or: {command_line(keys, recipe, request)}"])


def _speed_lines(best: PlanRow, simulator: Simulator, request: PlanRequest) -> list[str]:
    """Return the speed of a device and of a day, the utilization and the days of a training, with their error."""
    rate, device = best.tokens_per_second, request.device
    words = [f"{rate / request.world:,.0f} tokens/s per device", f"{_large(rate * DAY)} tokens a day"]
    dtype, model = simulator.sizes.dtype, simulator.config.model
    uncounted = next((key for key in ("function", "lora", "freeze") if getattr(model, key)), None)
    if uncounted is not None:
        arithmetic = f"model.{uncounted} is not counted in plans"
    elif simulator.sample.uncut_tokens is not None:
        arithmetic = "chunks compute half of the attention that MFU counts"
    else:
        arithmetic = arithmetic_of(outline(model, architecture_of(model)))
    utilization = utilization_of(arithmetic, device, dtype)
    mean_tokens = simulator.update_tokens / sizes_of(simulator.config.update).largest
    mfu = utilization.mfu(rate / request.world, mean_tokens)
    words.append(utilization.words if mfu is None else f"MFU {mfu:.0%} of {utilization.words}")
    if request.num_tokens is not None:
        days = request.num_tokens / (rate * DAY)
        words.append(f"{days:,.3g} days for {_large(request.num_tokens)} tokens")
    return [f"speed: {', '.join(words)}; times are predicted, +-20 %, no update measured on a GPU"]


def _large(number: float) -> str:
    unit = next((name for name, size in reversed(UNITS.items()) if number >= size), "")
    return f"{number / UNITS[unit]:,.3g}{unit}"


def _balance_lines(best: PlanRow, simulator: Simulator) -> list[str]:
    """Return a line about padding and the busiest rank, where the lengths of the samples are known."""
    grid = simulator.grid
    if grid.lengths is None or simulator.config.parallel.pp > 1:
        return []
    padding, busiest = grid.lengths.balance(best.choice.limit, grid.dp_degree)
    if grid.dp_degree == 1:
        return [f"dealing: {padding:.1%} of the computed tokens are padding"]
    return [
        f"dealing: {padding:.1%} of the computed tokens are padding; the busiest of {grid.dp_degree} data ranks "
        f"computes {busiest:.2f} times an even share without padding"
    ]


def _name(row: PlanRow, request: PlanRequest) -> str:
    layout = f"{layout_text(row.parallel)}: " if request.layouts else ""
    choice = row.choice
    extent = ", not all of them" * (choice.recompute == "selective")
    recompute = f"activations recomputed{extent}" if choice.recompute else "activations kept"
    gathered = "" if choice.reshard else ", weights kept gathered"
    memory = f"{recompute}{gathered}, {'fused' if choice.fused else 'foreach'} optimizer"
    size = choice.micro_batch_size if choice.limit_tokens is None else f"{choice.limit_tokens:,} tokens"
    return f"{layout}{count(choice.num_microbatches, 'microbatch')} of {size}, sync {choice.sync}, {memory}"


def _why_not(row: PlanRow, best: PlanRow) -> str:
    if row.fits != best.fits:
        return row.why
    slower = row.seconds / best.seconds - 1
    here, there = gb_text(row.sent_bytes), gb_text(best.sent_bytes)
    if slower < 0:
        return f"{here} sent instead of {there}"
    if slower >= 0.001:
        about = "" if row.by == SIMULATION else "about "
        sent = f"{here} sent instead of {there}, " if here != there else ""
        return f"{about}{slower:.1%} slower, {sent}bound by {row.bound}"
    more = row.reserved_bytes - best.reserved_bytes
    if more == 0:
        return "as fast, and takes as much"
    return f"as fast, and takes {gib_text(abs(more))} {'more' if more > 0 else 'less'}"


def keys_of(row: PlanRow, config: Config) -> Keys:
    """Return the keys that choose a row; the recipe's kind of limit bounds the microbatch."""
    choice = row.choice
    limit: dict[str, Any] = {"micro_batch_size": choice.micro_batch_size}
    if choice.limit_tokens is not None:
        limit = {"max_microbatch_tokens": choice.limit_tokens}
    keys: Keys = {"update": {**limit, "sync": choice.sync}, "model": {"activation_checkpointing": choice.recompute}}
    chosen, stated = row.parallel.model_dump(), config.parallel.model_dump()
    parallel = {key: value for key, value in chosen.items() if value != stated[key] and key != "reshard_after_forward"}
    if choice.reshard != config.parallel.reshard_after_forward:
        parallel["reshard_after_forward"] = choice.reshard
    return {**keys, "parallel": parallel} if parallel else keys


def command_line(keys: Keys, recipe: Path, request: PlanRequest) -> str:
    """Return the command that trains with these keys; an override of the same key is left out."""
    chosen = override_words(keys)
    names = {word.partition("=")[0] for word in chosen}
    words = [word for word in request.overrides if word.partition("=")[0] not in names]
    return shlex.join([*launcher_words(request), "train", str(recipe), *words, *chosen])


def launcher_words(request: PlanRequest) -> Sequence[str]:
    """Return the command that starts the processes."""
    if request.world == 1:
        return ["megabatch"]
    limit = min(request.world, request.device.ranks_per_node)
    per_node = next(number for number in range(limit, 0, -1) if request.world % number == 0)
    words = ["--nproc-per-node", str(per_node)]
    if request.world > per_node:
        words = ["--nnodes", str(request.world // per_node), *words, *RENDEZVOUS]
    return ["torchrun", *words, "-m", "megabatch"]


def override_words(keys: Mapping[str, Any], prefix: str = "") -> list[str]:
    words: list[str] = []
    for name, value in keys.items():
        if isinstance(value, dict):
            words += override_words(cast(dict[str, Any], value), f"{prefix}{name}.")
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            words.append(f"--{prefix}{name}={text}")
    return words

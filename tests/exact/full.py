"""The full table: `python -m tests.exact.full` runs it and writes result.json beside this file; it is committed.

bits            plain, DDP and FSDP2: every world size x sync x case x loss; the other axes are drawn, with a fixed seed
language        plain, DDP and FSDP2: every precision x world size x sync x case; the other axes are drawn
other bits      the other wrappers: every world size x sync x case; the other axes are drawn
opened          every cell; of float64 the other axes are drawn
other language  the other wrappers: every precision x world size x sync x case of a few; the other axes are drawn
odd, refused    every cell
"""

import ast
import hashlib
import io
import json
import platform
import random
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers

import megabatch
from tests.exact.cells import TABLES, WHOLE, Cell, valid
from tests.exact.launch import Result, launch

LIBRARY = Path(megabatch.__file__).parent
RESULT = Path(__file__).with_name("result.json")
LONGEST_FIRST, AT_ONCE = (4, 3, 8, 2, 1), 2  # world sizes
SOURCES = (  # the library files that decide the numbers
    "gradient_accumulator.py",
    "experts.py",
    "batching/context_parallel.py",
    "planning/stretches.py",
    "pipeline/pad_to_shape.py",
    "core/accumulator.py",
    "core/agreement.py",
    "core/call.py",
    "losses/coupled_loss.py",
    "guards/call_watch.py",
    "guards/divided_loss.py",
    "inspection/checksum.py",
    "core/divisors.py",
    "core/guard.py",
    "inspection/random_state.py",
    "core/update.py",
    "pipeline/run.py",
    "pipeline/stages.py",
    "pipeline/tied.py",
    "planners/same_bits.py",
    "planners/fill_up.py",
    "planners/cut_sequences.py",
    "batching/stretch_planner.py",
    "core/wrapper.py",
    "wrappers/checks.py",
    "wrappers/collective_order.py",
    "wrappers/ddp.py",
    "wrappers/detect.py",
    "wrappers/exact_gradients.py",
    "wrappers/fsdp1.py",
    "wrappers/fsdp2.py",
    "core/gradients.py",
    "core/mesh.py",
    "inspection/mesh_axes.py",
    "core/messages.py",
    "wrappers/multi_model.py",
    "wrappers/pipeline_wrapper.py",
    "wrappers/rank_agreement.py",
    "wrappers/rank_sums.py",
    "wrappers/wide_gradients.py",
)
VERSIONS = {
    "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
}  # fmt: skip
ALWAYS = ("evidence", "wrapper", "world", "sync", "case")
CROSSED = {name: tuple(axes) if name in WHOLE else ALWAYS for name, axes in TABLES.items()}
CROSSED |= {"bits": (*ALWAYS, "loss"), "opened": (*ALWAYS, "loss", "way"), "opened language": (*ALWAYS, "loss", "way")}


def cells() -> list[Cell]:
    """Every cell of the full table, in a fixed order."""
    numbers = random.Random(1)
    return [cell for name in TABLES for cell in _crossed(TABLES[name], CROSSED[name], numbers)]


def _crossed(axes: dict[str, tuple[Any, ...]], crossed: Iterable[str], numbers: random.Random) -> Iterable[Cell]:
    crossed = tuple(crossed)
    for values in product(*(axes[name] for name in crossed)):
        fixed = dict(zip(crossed, values, strict=True))
        if valid(fixed):
            yield Cell(**_drawn(fixed, axes, numbers))


def _drawn(fixed: dict[str, Any], axes: dict[str, tuple[Any, ...]], numbers: random.Random) -> dict[str, Any]:
    while True:
        row = {name: fixed[name] if name in fixed else numbers.choice(axes[name]) for name in axes}
        if valid(row):
            return row


def digest(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def source_hashes() -> dict[str, str]:
    """Return a hash of the code of each library file that decides the numbers, as it is now."""
    return {name: hashlib.sha256(code_of((LIBRARY / name).read_text()).encode()).hexdigest() for name in SOURCES}


def code_of(source: str) -> str:
    """Return a source without comments, docstrings and blank lines, which decide no number."""
    lines = source.splitlines()
    for kind, _, (row, column), _, _ in tokenize.generate_tokens(io.StringIO(source).readline):
        if kind == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            first = node.body[0]
            lines[first.lineno - 1 : first.end_lineno] = [""] * (first.end_lineno - first.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def run(table: list[Cell]) -> dict[str, list[Result]]:
    """Results of all cells, two world sizes at once: ranks wait for each other most of the time."""
    with ProcessPoolExecutor(AT_ONCE, get_context("spawn")) as processes:
        found = processes.map(partial(run_world, table), LONGEST_FIRST)
        return {name: ranks for results in found for name, ranks in results.items()}


def run_world(table: list[Cell], world: int) -> dict[str, list[Result]]:
    """Results of the cells of one world size."""
    names = [cell.name for cell in table if cell.world == world]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = launch(world, "tests.exact.harness:run_cell", names, Path(folder), timeout_seconds=7200)
    print(f"world size {world}: {len(names)} cells in {time.perf_counter() - started:.0f} s", flush=True)
    return found


def failure(cell: Cell, ranks: list[Result]) -> str:
    """Why a cell does not pass, in a line; empty if it does."""
    for result in ranks:
        if "error" in result:
            return result["error"].strip().splitlines()[-1]
        value = result["value"]
        if value["wrong"] or value["gradient"] > cell.tolerance:
            return f"gradient {value['gradient']:.2e} of {value['parameter']}; {'; '.join(value['wrong'])}"
    return ""


def report(table: list[Cell], found: dict[str, list[Result]], seconds: float) -> dict[str, Any]:
    """The committed result: the worst gradient error of each cell, over ranks and updates; zeros are only counted."""
    failures = {cell.name: text for cell in table if (text := failure(cell, found[cell.name]))}
    errors = {name: max(r["value"]["gradient"] for r in ranks) for name, ranks in found.items() if name not in failures}
    return {
        "command": "python -m tests.exact.full",
        "versions": VERSIONS,
        "sources": source_hashes(),
        "num_cells": len(table),
        "cells_sha256": digest(cell.name for cell in table),
        "seconds": round(seconds),
        "summary": {kind: _summary(kind, table, errors) for kind in ("bits", "odd", "float64", "float32", "refused")},
        "failures": failures,
        "errors": {name: float(f"{error:.3g}") for name, error in sorted(errors.items()) if error},
    }


def _summary(kind: str, table: list[Cell], errors: dict[str, float]) -> dict[str, float]:
    mine = [cell for cell in table if cell.evidence == kind and cell.name in errors]
    groups = {"": [c for c in mine if not c.averages], "_averaged_more_than_once": [c for c in mine if c.averages]}
    found: dict[str, float] = {}
    for name, group in groups.items():
        found[f"num_cells{name}"] = len(group)
        found[f"num_equal_bits{name}"] = sum(errors[cell.name] == 0 for cell in group)
        found[f"worst{name}"] = max((errors[cell.name] for cell in group), default=0.0)
    return found


def main() -> int:
    table, before = cells(), source_hashes()
    started = time.perf_counter()
    found = run(table)
    if source_hashes() != before:
        print("the sources changed while the table ran; nothing is written, run it again")
        return 1
    result = report(table, found, time.perf_counter() - started)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))
    for name, text in result["failures"].items():
        print(f"FAILED {name}: {text}")
    print(f"{len(result['failures'])} of {len(table)} cells failed; {RESULT}")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())

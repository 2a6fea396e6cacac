"""The path of a plain update: its tests of optional features, the share that runs of its files, and its lines.

`python -m tests.plain_path` prints these, and what a plain update imports. An update is two calls of `forward_backward`
and a `finalize` with a clip, on a small Llama without a wrapper. A first update runs before, so checks of a new model
and a new loss are not counted.

feature tests     `if` statements and conditional expressions that ask for an optional feature, in the functions that
                  the update enters. A feature is an option of the accumulator, a wrapper or a batching by name.
executed share    statements that run, of all statements in the functions of the files that the update enters
lines             lines of the library that run for one more microbatch of a call: the host's work, counted
"""

import ast
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import megabatch
from megabatch import GradientAccumulator, losses

ROOT = Path(megabatch.__file__).parent
FEATURES = re.compile(
    r"same_bits|_shapes\b|\.shapes\b|tuner|\b_?meter\b|\bearly\b|_sharing\b|is_packed|is_pipeline"
    r"|JointLoss|_loop\b|context_groups|deferred|\btold\b|is_held|takes_mask|OneRow|SharedPrefix|prepared\.parts"
    r"|outgrown|takes_divisor|\.shared\b|learned|self\.fit\b|compares_order|wide\.dtype|is_new|_part\b"
    r"|forwards_meet|is_shared|\.expect\b|\btried\b|runs_alone|_tuner"
)
LENGTHS = (9, 7, 8, 5)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class PlainPath:
    """What a plain update entered: the lines that ran, by code object."""

    lines: dict[CodeType, set[int]]

    def feature_tests(self) -> list[str]:
        """Return the place of each conditional that asks for an optional feature."""
        places: list[str] = []
        for code in self.lines:
            function = _function_at(code)
            if function is None:
                continue
            conditionals = [node for node in ast.walk(function) if isinstance(node, ast.If | ast.IfExp)]
            asking = [node for node in conditionals if FEATURES.search(ast.unparse(node.test))]
            places += [f"{_name(code)}:{node.lineno} {ast.unparse(node.test)}" for node in asking]
        return sorted(places)

    def executed(self) -> dict[str, tuple[int, int]]:
        """Return the statements that ran and all statements, by file. Docstrings and definitions do not count."""
        ran: dict[str, set[int]] = {}
        for code, lines in self.lines.items():
            ran.setdefault(code.co_filename, set()).update(lines)
        counts: dict[str, tuple[int, int]] = {}
        for name, lines in ran.items():
            statements = _statements_of(name)
            num_ran = sum(bool(lines.intersection(span)) for span in statements)
            counts[str(Path(name).relative_to(ROOT))] = num_ran, len(statements)
        return counts

    def executed_share(self) -> float:
        """Return the share of the opened files' statements that ran, in [0, 1]."""
        counts = self.executed().values()
        return sum(ran for ran, _ in counts) / sum(statements for _, statements in counts)


def trace_plain_update() -> PlainPath:
    """Run a plain update and note every line of the library that it enters."""
    batch = _samples(LENGTHS)
    gradient = GradientAccumulator(_model(), micro_batch_size=2)

    def update() -> None:
        gradient.forward_backward(batch[:2], losses.next_token)
        gradient.forward_backward(batch[2:], losses.next_token)
        gradient.finalize(max_norm=1.0)

    update()
    lines: dict[CodeType, set[int]] = {}
    _trace(update, lambda frame: lines.setdefault(frame.f_code, set()).add(frame.f_lineno))
    return PlainPath(lines)


def imported_lines() -> dict[str, int]:
    """Return the lines of each module of the library that this process has imported."""
    names = [name for name in sys.modules if name.partition(".")[0] == "megabatch"]
    files = {name: Path(str(sys.modules[name].__file__)) for name in names}
    return {name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in files.items()}


def count_lines_per_microbatch() -> int:
    """Return the lines of the library that run for one more microbatch of a call."""
    gradient = GradientAccumulator(_model(), micro_batch_size=1)
    gradient.forward_backward(_samples((8,)), losses.next_token)  # which checks a new loss
    gradient.discard()
    counts: list[int] = []
    for num_microbatches in (2, 3):
        batch, ran = _samples((8,) * num_microbatches), list[None]()
        _trace(
            lambda batch=batch: gradient.forward_backward(batch, losses.next_token), lambda _, ran=ran: ran.append(None)
        )
        gradient.discard()
        counts.append(len(ran))
    return counts[1] - counts[0]


def _model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _samples(lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.arange(length), "labels": torch.arange(length)} for length in lengths]


def _trace(run: Callable[[], object], note_line: Callable[[FrameType], object]) -> None:
    """Call ``note_line`` for each line of the library that ``run`` executes."""

    def note(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(str(ROOT)):
            return None
        if event == "line":
            note_line(frame)
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        run()
    finally:
        sys.settrace(before)


@cache
def _tree(name: str) -> ast.Module:
    return ast.parse(Path(name).read_text(encoding="utf-8"))


@cache
def _functions(name: str) -> dict[int, Function]:
    """Return the functions of a file by their first line, which is that of a decorator if there is one."""
    functions = [node for node in ast.walk(_tree(name)) if isinstance(node, Function)]
    return {min([node.lineno, *(each.lineno for each in node.decorator_list)]): node for node in functions}


def _function_at(code: CodeType) -> Function | None:
    """Return the function of a code object. None for a comprehension or a lambda, which stands in another one."""
    return _functions(code.co_filename).get(code.co_firstlineno)


@cache
def _statements_of(name: str) -> list[range]:
    """Return the lines of each statement in the functions of a file; of a compound one, those of its head."""
    spans: list[range] = []
    for function in _functions(name).values():
        for statement in _inside(function):
            body = getattr(statement, "body", None)
            last = body[0].lineno - 1 if isinstance(body, list) and body else statement.end_lineno
            spans.append(range(statement.lineno, max(last or 0, statement.lineno) + 1))
    return spans


def _inside(function: Function) -> list[ast.stmt]:
    """Return the statements of a function, without docstrings and without those of functions inside it."""
    found: list[ast.stmt] = []
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.ClassDef):
            continue
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not is_docstring and not isinstance(node, ast.Try):
            found.append(node)
        waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler)]
    return found


def _name(code: CodeType) -> str:
    return f"{Path(code.co_filename).relative_to(ROOT)} {code.co_qualname}"


def main() -> None:
    path = trace_plain_update()
    tests = path.feature_tests()
    print(*tests, sep="\n")
    for name, (ran, statements) in sorted(path.executed().items()):
        print(f"{ran:5} of {statements:5} statements  {name}")
    print(
        f"{len(tests)} feature tests; {path.executed_share():.1%} of the statements of {len(path.executed())} files "
        f"run; {count_lines_per_microbatch()} lines a microbatch"
    )
    imported = imported_lines()
    print(f"imported: {len(imported)} modules of {sum(imported.values()):,} lines")


if __name__ == "__main__":
    main()

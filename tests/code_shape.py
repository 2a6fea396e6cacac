"""The size and the density of the code: `python -m tests.code_shape` prints both, by chapter.

lines           of the files, with docstrings, comments and blank lines
decisions       in 100 lines of code: branches, loops, handlers, `and`, `or`, and the parts of comprehensions
comprehensions  in 100 statements
captions        comments at the end of a line of code, in 100 statements; shapes such as [B, T] do not count
vague names     bound names and arguments that are pronouns or participles, in 100
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megabatch"
VAGUE = {
    "asked", "each", "found", "given", "kept", "least", "left", "lone", "made", "mine", "most", "one", "other",
    "others", "own", "rest", "seen", "theirs", "told", "what", "who", "whole",
}  # fmt: skip
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler)
LAYOUT = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
)  # fmt: skip
DIRECTIVE = re.compile(r"#\s*(noqa|pyright|type:|fmt:|pragma)")
SHAPE = re.compile(r"#\s*(\(\)|\[)")


@dataclass(frozen=True)
class CodeShape:
    """The counts of some files."""

    files: int
    lines: int
    decisions: float
    comprehensions: float
    captions: float
    vague_names: float


def shape_of(paths: Iterable[Path]) -> CodeShape:
    """Measure files together."""
    files = lines = code_lines = decisions = comprehensions = statements = captions = vague = names = 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text)))
        files += path.name != "__init__.py"
        lines += len(text.splitlines())
        code_lines += len(lines_of_code(text, nodes))
        decisions += sum(map(count_decisions, nodes))
        comprehensions += sum(isinstance(node, ast.comprehension) for node in nodes)
        statements += sum(isinstance(node, ast.stmt) for node in nodes)
        captions += count_captions(text)
        bound = bound_names(nodes)
        vague += sum(name in VAGUE for name in bound)
        names += len(bound)
    hundred_statements = max(statements, 1) / 100
    return CodeShape(
        files,
        lines,
        decisions / (max(code_lines, 1) / 100),
        comprehensions / hundred_statements,
        captions / hundred_statements,
        vague / (max(names, 1) / 100),
    )


def lines_of_code(text: str, nodes: Iterable[ast.AST]) -> set[int]:
    """Return the lines with a token, without comments and strings that stand alone."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def count_decisions(node: ast.AST) -> int:
    """Return the number of decisions of one node."""
    if isinstance(node, BRANCHES):
        return 1
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return 0


def count_captions(text: str) -> int:
    """Return the number of comments behind code on their line, without shapes and directives."""
    captions = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_behind_code = token.type == tokenize.COMMENT and token.line[: token.start[1]].strip()
        if is_behind_code and not DIRECTIVE.match(token.string) and not SHAPE.match(token.string):
            captions += 1
    return captions


def bound_names(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the names that are assigned, and the arguments."""
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
    return names


def parts() -> dict[str, list[Path]]:
    """Return the files of each chapter of the library, of the library, the trainer and the tests."""
    library: dict[str, list[Path]] = {}
    trainer: list[Path] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        chapter = path.relative_to(PACKAGE).parts[0]
        if chapter == "train":
            trainer.append(path)
        else:
            library.setdefault(chapter, []).append(path)
    every = [path for paths in library.values() for path in paths]
    return library | {"library": every, "trainer": trainer, "tests": sorted((ROOT / "tests").rglob("*.py"))}


def main() -> None:
    print(f"{'':26}{'files':>6}{'lines':>8}{'decisions':>11}{'comprehensions':>16}{'captions':>10}{'vague names':>13}")
    for name, paths in parts().items():
        shape = shape_of(paths)
        print(
            f"{name:26}{shape.files:6}{shape.lines:8,}{shape.decisions:11.1f}{shape.comprehensions:16.1f}"
            f"{shape.captions:10.1f}{shape.vague_names:13.1f}"
        )


if __name__ == "__main__":
    main()

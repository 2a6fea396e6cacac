"""Stdlib: the functions of Python's standard library, a data set that every machine has."""

import ast
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

# Raise it where other functions, or other parts of them, come out.
VERSION = 1
# Bytes of a function, with signature and docstring.
MIN_BYTES = 400
# With its end it fits into a microbatch of recipes/stdlib.toml.
MAX_BYTES = 13_000
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Function:
    """A function: signature and docstring are the prompt, its body is the response."""

    name: str  # "json/decoder.py:343"
    prompt: str
    response: str


def stdlib_root() -> Path:
    """Return the folder of the standard library."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_functions(root: Path) -> Iterator[Function]:
    """Yield functions and methods below a folder, each text once, in an order that does not change."""
    names: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(name.parts):
            for function in functions_of(path.read_text(encoding="utf-8", errors="replace"), name.as_posix()):
                text = function.prompt + function.response
                if MIN_BYTES <= len(text.encode()) <= MAX_BYTES and text not in names:
                    names.add(text)
                    yield function


def functions_of(source: str, name: str) -> Iterator[Function]:
    """Yield the functions of a module that are not inside another one, so that no text is in two samples."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = lines_of(source)
    for node in outermost_functions(tree):
        first, has_docstring = node.body[0], ast.get_docstring(node, clean=False) is not None
        if len(node.body) > has_docstring and first.lineno > node.lineno:
            split = cast(int, first.end_lineno) if has_docstring else first.lineno - 1
            text = lines_of(textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])))
            head = split - node.lineno + 1
            yield Function(f"{name}:{node.lineno}", "".join(text[:head]), "".join(text[head:]))


def lines_of(text: str) -> list[str]:
    """Return the lines as ast counts them, ends kept; splitlines() also splits at form feeds and U+2028."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def outermost_functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from outermost_functions(child)

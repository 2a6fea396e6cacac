"""The map of the code is the code: its picture, its files and the functions that it names."""

import ast
import re
import runpy
from typing import Any

import pytest

from tests.exact import proofs, test_context, test_joint, test_memory, test_pipeline, test_tied, test_windows
from tests.exact.mutations import MUTATIONS
from tests.integrations import test_torchft_planted
from tests.test_docs import DOCS, PAGES, ROOT
from tests.test_imports import CHAPTERS, FILES, TREES
from tests.trainer.mutations import BUGS

PAGE = PAGES["docs/architecture.md"]
SCRIPT: dict[str, Any] = runpy.run_path(str(DOCS / "architecture.py"))
NAMED = re.findall(r"`([\w/]+\.py)`(?:,| \|) `([\w.]+)`", PAGE)


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def names_of(tree: ast.AST) -> set[str]:
    """Functions, classes and their methods at the top of a file."""
    tops = [node for node in ast.iter_child_nodes(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    inner = {f"{top.name}.{each.name}" for top in tops for each in top.body if isinstance(each, ast.FunctionDef)}
    return {top.name for top in tops} | inner


def test_the_picture_is_what_the_script_draws() -> None:
    drawn = (ROOT / "docs" / "assets" / "architecture.svg").read_text(encoding="utf-8")
    assert drawn == SCRIPT["draw"](), "python docs/architecture.py writes it"


def test_the_picture_has_every_chapter_in_order() -> None:
    assert list(SCRIPT["CHAPTERS"]) == CHAPTERS


def test_the_map_names_every_chapter_in_order() -> None:
    chapters = [f"{each}.py" if f"{each}.py" in FILES else f"{each}/" for each in CHAPTERS]
    assert re.findall(r"^\| `([\w/.]+)` \|", section("The map"), re.MULTILINE) == chapters


def test_the_page_names_functions() -> None:
    assert len(NAMED) > 20


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)))
def test_a_function_that_is_named_is_there(file: str, name: str) -> None:
    assert name in names_of(TREES[file])


def test_the_page_counts_the_planted_bugs() -> None:
    tables = [
        MUTATIONS, test_joint.BUGS, test_memory.PLANTED, test_pipeline.OWN, test_context.BUGS, test_windows.PLANTED,
        test_tied.PLANTED, BUGS, test_torchft_planted.PLANTED, *proofs.FAULTS.values(),
    ]  # fmt: skip
    assert f"Ten tests plant {sum(map(len, tables))} bugs" in section("Planted bugs")

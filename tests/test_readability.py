"""The README and the docs read no worse than the docs of equinox, accelerate and torchtitan. Names are nouns."""

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.readability import OTHERS, ROOT, groups, score, sentences

VAGUE = {
    "asked", "each", "found", "given", "kept", "least", "left", "lone", "made", "mine", "most", "one", "other",
    "others", "own", "rest", "seen", "theirs", "told", "what", "who", "whole",
}  # fmt: skip
MOST_VAGUE_SHARE = {"library": 0.005, "trainer": 0.013}  # of the bound names; it only goes down


@pytest.mark.parametrize("name", ["README", "docs"])
def test_the_docs_read_like_those_of_others(name: str) -> None:
    found = score(path.read_text(encoding="utf-8") for path in groups()[name])
    for measure in ("mean", "p90", "semicolons", "relative"):
        assert getattr(found, measure) <= max(getattr(each, measure) for each in OTHERS.values()), measure
    assert found.you >= min(each.you for each in OTHERS.values())


def test_what_is_counted() -> None:
    page = (
        "# A title\n\nYou run `a; b`. It works: see [the page](x.md).\n\n| a | table |\n\n```\ncode that is out\n```\n"
    )
    found = score([page])
    assert (found.words, found.mean, found.semicolons) == (8, 4.0, 0)
    assert sentences("You run this, e.g. here.\n- And that.") == [
        ["You", "run", "this", "e.g", "here"],
        ["And", "that"],
    ]
    assert (round(found.you, 1), round(found.relative, 1)) == (12.5, 12.5)


def vague_share(paths: Iterable[Path]) -> float:
    """Return the share of bound names and arguments that are pronouns or participles."""
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    names += [node.arg for node in nodes if isinstance(node, ast.arg)]
    return sum(name in VAGUE for name in names) / len(names)


@pytest.mark.parametrize("part", MOST_VAGUE_SHARE)
def test_few_names_are_pronouns(part: str) -> None:
    paths = [path for path in (ROOT / "megabatch").rglob("*.py") if ("train" in path.parts) == (part == "trainer")]
    assert vague_share(paths) <= MOST_VAGUE_SHARE[part], vague_share(paths)


def test_vague_names_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text("def add(first, other):\n    each = first\n    return each + other\n")
    assert vague_share([path]) == pytest.approx(2 / 3)

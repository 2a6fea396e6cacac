"""The README and the docs read no worse than the docs of equinox, accelerate and torchtitan. Names are nouns."""

from pathlib import Path

import pytest

from tests.code_shape import parts, shape_of
from tests.readability import OTHERS, groups, score, sentences

MOST_VAGUE_NAMES = {"core": 0.05, "library": 0.3, "trainer": 0.1}  # in 100 bound names; it only goes down
MOST_DECISIONS = {"core": 20.0, "library": 28.4, "trainer": 31.25}  # in 100 lines of code; it only goes down
MOST_CAPTIONS = {"core": 0.9, "library": 3.1, "trainer": 1.8}  # comments behind code in 100 statements, as well


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


@pytest.mark.parametrize("part", MOST_VAGUE_NAMES)
def test_the_code_reads_no_worse(part: str) -> None:
    shape = shape_of(parts()[part])
    assert shape.vague_names <= MOST_VAGUE_NAMES[part], shape
    assert shape.decisions <= MOST_DECISIONS[part], shape
    assert shape.captions <= MOST_CAPTIONS[part], shape


def test_the_core_stays_small() -> None:
    core = shape_of(parts()["core"])
    assert core.files <= 21
    assert core.lines <= 4_000


def test_what_is_counted_of_code(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(
        '"""A docstring."""\n\n\ndef add(first, other):\n    """Add."""\n    # A reason.\n'
        "    each = first  # a caption\n"
        "    if each and other:  # [B, T]\n        return [one for one in other if one]\n    return each + other\n"
    )
    shape = shape_of([path])
    assert (shape.files, shape.lines) == (1, 10)
    assert shape.decisions == pytest.approx(100 * 4 / 5)  # if, and, for, if in 5 lines of code
    assert shape.vague_names == pytest.approx(100 * 3 / 4)  # other, each, one of first, other, each, one
    assert shape.captions == pytest.approx(100 / 7)

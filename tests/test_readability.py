"""The README and the docs read no worse than the docs of equinox, accelerate and torchtitan."""

import pytest

from tests.readability import OTHERS, groups, score, sentences


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

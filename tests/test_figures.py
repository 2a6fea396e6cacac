"""The figures of the README are those of the newest results."""

import re

import pytest

from benchmarks import figures
from tests.test_docs import READ

CASES = [(figure, theme) for figure in figures.FIGURES for theme in figures.THEMES]


@pytest.mark.parametrize(("figure", "theme"), CASES, ids=lambda each: getattr(each, "name", each))
def test_a_figure_is_drawn_from_the_newest_results(figure: figures.Figure, theme: str) -> None:
    drawn = (figures.ASSETS / f"{figure.name}-{theme}.svg").read_text()
    named = dict(re.findall(r"^(\S+\.json) sha256:(\w+)", drawn, re.MULTILINE))
    newest = {path.name: figures.digest(path) for path in map(figures.newest, figure.sources)}
    assert named == newest, "a result is newer than its figure; run make figures"
    assert drawn == figures.draw(figure, theme), "run make figures"


def test_the_readme_shows_every_picture_in_light_and_dark() -> None:
    shown = re.findall(r'(?:srcset|src)="(docs/assets/[^"]+)"', READ["README.md"])
    assert {f"docs/assets/{figure.name}-{theme}.svg" for figure, theme in CASES} <= set(shown)
    assert all((figures.result.ROOT / each).is_file() for each in shown)
    for picture in re.findall(r"<picture>.*?</picture>", READ["README.md"], re.DOTALL):
        assert re.search(r'media="\(prefers-color-scheme: dark\)" srcset="[^"]+-dark\.\w+"', picture)
        assert re.search(r'<img src="[^"]+-light\.\w+" alt="[^"]{20,}"', picture)

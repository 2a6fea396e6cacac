"""The figures of the README and the docs are those of the newest results."""

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


SHOWN = {"README.md": "docs/assets/", "docs/benchmarks.md": "assets/"}  # page → where its pictures are


@pytest.mark.parametrize("page", SHOWN)
def test_a_picture_is_shown_in_light_and_dark(page: str) -> None:
    pictures = re.findall(r"<picture>.*?</picture>", READ[page], re.DOTALL)
    assert pictures
    for picture in pictures:
        assert re.search(r'media="\(prefers-color-scheme: dark\)" srcset="[^"]+-dark\.\w+"', picture)
        assert re.search(r'<img src="[^"]+-light\.\w+" alt="[^"]{20,}"', picture)
        for path in re.findall(r'(?:srcset|src)="([^"]+)"', picture):
            assert path.startswith(SHOWN[page])
            assert (figures.ASSETS / path.removeprefix(SHOWN[page])).is_file()


def test_every_figure_is_shown() -> None:
    shown = {name for page in SHOWN for name in re.findall(r'(?:srcset|src)="[^"]*assets/([^"]+)"', READ[page])}
    assert {f"{figure.name}-{theme}.svg" for figure, theme in CASES} <= shown

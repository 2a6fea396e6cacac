"""The trainer's folders are chapters: each imports only those before it."""

import pytest

from tests.test_imports import TRAINER, at_the_top, edges

CHAPTERS = [
    "config", "trust", "runtime", "data", "parallel", "model", "classification", "context", "checkpoints", "autotune",
    "records", "callbacks", "plan", "report", "replicas", "loop", "init", "preview", "cli",
]  # fmt: skip
MODULES = [module for module in TRAINER if module != "train"]


def chapter_of(module: str) -> str:
    return module.split(".")[1]


def test_every_module_belongs_to_a_chapter() -> None:
    assert {chapter_of(module) for module in MODULES} == set(CHAPTERS)


@pytest.mark.parametrize("module", MODULES)
def test_a_chapter_imports_only_chapters_before_it(module: str) -> None:
    own = chapter_of(module)
    found = {chapter_of(edge) for edge in edges(module, at_the_top(module)) if edge.startswith("train.")}
    assert not [chapter for chapter in found if CHAPTERS.index(chapter) > CHAPTERS.index(own)]

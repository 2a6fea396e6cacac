"""Folders are chapters: the order in which they import each other, and how large they may be."""

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import megabatch

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megabatch"

CHAPTERS = [  # a chapter imports only chapters above it
    "errors", "torch_private", "planning", "batching", "losses", "wrappers", "engine", "pipeline", "autotune",
    "accumulator", "learner", "verification", "experts", "simulate", "integrations",
]  # fmt: skip
LARGE = {"engine": 12}  # files of a chapter; of any other 9 at most
WITHOUT_TORCH = ("errors", "planning.partition", "planning.cost", "planning.plan", "planning.limits")
OUTSIDE = {"environ", "getenv", "putenv", "open", "read_text", "read_bytes", "write_text", "write_bytes"}
READS_FILES = {"autotune.memory"}  # what the kernel says of a process

FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
MODULES = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in FILES} - {"__init__"}
LIBRARY = sorted(module for module in MODULES if module.partition(".")[0] not in ("train", "__main__"))


def file_of(module: str) -> str:
    folder = f"{module.replace('.', '/')}/__init__.py"
    return folder if folder in FILES else f"{module.replace('.', '/')}.py"


def imported(tree: ast.AST) -> set[str]:
    """Full names of what is imported under ``tree``: ``a.b`` for ``import a.b`` and for ``from a import b``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def edges(module: str, tree: ast.AST | None = None) -> set[str]:
    """Modules of the package that ``module`` imports; "" is the package itself."""
    found: set[str] = set()
    for name in imported(tree or TREES[file_of(module)]):
        top, *parts = name.split(".")
        if top == "megabatch":
            while parts and ".".join(parts) not in MODULES:
                parts.pop()
            found.add(".".join(parts))
    return found


def chapter_of(module: str) -> str:
    return module.partition(".")[0]


def at_the_top(module: str) -> ast.Module:
    """The imports that stand at the top of a file; the others are made when they are needed."""
    tree = TREES[file_of(module)]
    return ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])


def test_every_file_belongs_to_a_chapter():
    assert {chapter_of(module) for module in LIBRARY} == set(CHAPTERS)


@pytest.mark.parametrize("module", LIBRARY)
def test_a_chapter_imports_only_chapters_above_it(module):
    place = CHAPTERS.index(chapter_of(module))
    above = {"", *CHAPTERS[: place + 1]} if module.startswith("integrations") else set(CHAPTERS[: place + 1])
    assert {chapter_of(edge) for edge in edges(module, at_the_top(module))} <= above


def test_there_is_no_circle():
    graph = {module: edges(module, at_the_top(module)) - {module, chapter_of(module)} for module in LIBRARY}
    TopologicalSorter(graph).prepare()


def test_the_trainer_has_no_circle():
    # __main__ stands above all, and what imports the package itself imports the library as a whole.
    trainer = {module: edges(module) - {"train"} for module in MODULES if module.startswith("train.")}
    TopologicalSorter(trainer).prepare()
    assert not any(edge == "__main__" for found in trainer.values() for edge in found)


@pytest.mark.parametrize("module", LIBRARY)
def test_the_library_knows_no_trainer(module):
    assert not any(chapter_of(edge) in ("train", "__main__") for edge in edges(module))


def test_the_package_has_sixteen_entries_at_most():
    entries = {Path(name).parts[0] for name in FILES} - {"__init__.py", "__main__.py"}
    assert len(entries) <= 16, sorted(entries)


@pytest.mark.parametrize("chapter", [each for each in CHAPTERS if f"{each}/__init__.py" in FILES])
def test_a_chapter_has_few_files(chapter):
    files = [name for name in FILES if name.startswith(f"{chapter}/") and not name.endswith("__init__.py")]
    assert len(files) <= LARGE.get(chapter, 9), files


def test_no_file_name_occurs_twice():
    names = Counter(module.rpartition(".")[2] for module in LIBRARY)
    assert not [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_planning_knows_no_torch(module):
    assert not [name for name in imported(TREES[file_of(module)]) if name.partition(".")[0] == "torch"]


def test_the_names_of_the_package_are_imported_when_they_are_asked_for_and_listed_for_type_checkers():
    """Decision 31: the one place where TYPE_CHECKING is used, so that what needs no torch does not wait for it."""
    listed = [node for node in ast.walk(TREES["__init__.py"]) if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: str(node.module) for node in listed for alias in node.names if alias.asname == alias.name}
    imported_later = {name: f"megabatch.{module}" for name, module in megabatch._HOME.items()}
    assert seen == imported_later | {"losses": "megabatch"}
    assert set(megabatch.__all__) == set(seen)
    checking = [path for path, tree in TREES.items() if "typing.TYPE_CHECKING" in imported(tree)]
    assert checking == ["__init__.py"]


@pytest.mark.parametrize("module", ["__init__", *LIBRARY])
def test_the_library_reads_no_file_and_no_environment_variable(module):
    if module in READS_FILES or module.startswith("integrations"):
        return
    names = {node.attr for node in ast.walk(TREES[file_of(module)]) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(TREES[file_of(module)]) if isinstance(node, ast.Name)}
    assert not names & OUTSIDE
    assert not {name.partition(".")[0] for name in imported(TREES[file_of(module)])} & {"os", "io", "pathlib"}

"""Folders are chapters: the order in which they import each other, and how large they may be."""

import ast
import inspect
import re
from collections import Counter
from graphlib import TopologicalSorter
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

from megabatch.errors import PlanError

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megabatch"

FOUNDATION = ("lazy", "errors", "torch_private", "planning", "inspection")
BESIDE = ("optim", "batching", "losses", "wrappers", "guards", "loops", "pipeline", "autotune")  # of the core
COMPOSITION = ("planners", "gradient_accumulator", "learner")
APPLICATIONS = ("verification", "experts", "simulate", "integrations")
FLOORS = (FOUNDATION, ("core",), BESIDE, COMPOSITION, APPLICATIONS)
CHAPTERS = [chapter for floor in FLOORS for chapter in floor]  # a chapter imports only chapters before it
# Files of a chapter; of any other 9 at most.
LARGE = {"planning": 15, "inspection": 12, "core": 21, "batching": 17, "simulate": 11, "integrations": 12,
         "torch_private": 15, "verification": 12, "guards": 10, "wrappers": 13, "train/runtime": 10}  # fmt: skip
WITHOUT_TORCH = (
    "errors", "planning.balancing", "planning.limit_search", "planning.limits", "planning.packing",
    "planning.partition", "planning.plan", "planning.plan_numbers", "planning.plan_text", "planning.settings",
)  # fmt: skip
OUTSIDE = {"environ", "getenv", "putenv", "open", "read_text", "read_bytes", "write_text", "write_bytes"}
READS_FILES = {"autotune.memory"}  # what the kernel says of a process

FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
MODULES = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in FILES} - {"__init__"}
LIBRARY = sorted(module for module in MODULES if module.partition(".")[0] not in ("train", "__main__"))
TRAINER = sorted(module for module in MODULES if module.partition(".")[0] == "train")
HOMES = ["megabatch", *(f"megabatch.{chapter}" for chapter in CHAPTERS)]
PUBLIC = {home: set(names) for home in HOMES if (names := getattr(import_module(home), "__all__", None))}
LAZY = [home for home in PUBLIC if hasattr(import_module(home), "_HOME")]


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


def init_of(package: str) -> str:
    return "/".join([*package.split(".")[1:], "__init__.py"])


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


@pytest.mark.parametrize("module", LIBRARY)
def test_a_floor_imports_the_floors_below_it_and_no_neighbour(module):
    """Imports inside of functions count: the core is complete without what stands beside it, and each part alone."""
    chapter = chapter_of(module)
    (floor,) = (number for number, chapters in enumerate(FLOORS) if chapter in chapters)
    allowed = {chapter, *(below for chapters in FLOORS[:floor] for below in chapters)}
    allowed |= set(FLOORS[floor]) if FLOORS[floor] in (FOUNDATION, COMPOSITION) else set()
    allowed |= {""} if chapter == "integrations" else set()
    assert {chapter_of(edge) for edge in edges(module)} <= allowed


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


def test_the_package_has_few_entries():
    entries = {Path(name).parts[0] for name in FILES} - {"__init__.py", "__main__.py"}
    assert len(entries) <= 22, sorted(entries)


@pytest.mark.parametrize("folder", sorted({str(Path(name).parent) for name in FILES} - {"."}))
def test_a_chapter_has_few_files(folder):
    files = [name for name in FILES if str(Path(name).parent) == folder and not name.endswith("__init__.py")]
    assert len(files) <= LARGE.get(folder, 9), files


def test_no_file_name_occurs_twice():
    names = Counter(module.rpartition(".")[2] for module in LIBRARY)
    assert not [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize("is_trainer", [False, True])
def test_no_class_name_occurs_twice(is_trainer):
    trees = [tree for path, tree in TREES.items() if path.startswith("train/") == is_trainer]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert not [name for name, count in names.items() if count > 1 and not name.startswith("_")]


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_planning_knows_no_torch(module):
    assert not [name for name in imported(TREES[file_of(module)]) if name.partition(".")[0] == "torch"]


@pytest.mark.parametrize("package", LAZY)
def test_the_names_of_a_package_are_imported_when_they_are_asked_for_and_listed_for_type_checkers(package):
    """Decision 31: what needs no torch does not wait for it, and an import of one module not for its whole chapter."""
    found, path = import_module(package), init_of(package)
    listed = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: str(node.module) for node in listed for alias in node.names if alias.asname == alias.name}
    modules = dict.fromkeys(set(found.__all__) - set(found._HOME), package)
    homes = {name: home if home.startswith("megabatch.") else f"{package}.{home}" for name, home in found._HOME.items()}
    assert seen == homes | modules
    assert all(inspect.ismodule(getattr(found, name)) for name in modules)
    assert set(found.__all__) == set(seen) <= set(dir(found))
    top = [node for node in TREES[path].body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imported(ast.Module(top, [])) == {"typing.TYPE_CHECKING", "megabatch.lazy.export_lazily"}


@pytest.mark.parametrize("package", [home for home in LAZY if hasattr(import_module(home), "_REMOVED")])
def test_a_name_of_the_last_version_says_what_to_use_instead(package):
    found = import_module(package)
    for name, instead in found._REMOVED.items():
        assert name not in dir(found)
        with pytest.raises(PlanError) as caught:
            getattr(found, name)
        assert str(caught.value) == f"{package}.{name} is removed; {instead}"


def test_type_checking_is_asked_for_nowhere_else():
    checking = {path for path, tree in TREES.items() if "typing.TYPE_CHECKING" in imported(tree)}
    places = ("model/build", "parallel/pipeline_stages", "parallel/wrap")  # which import pipelines when they are used
    pipelines = {f"train/{place}.py" for place in places}
    removed = "gradient_accumulator.py"  # whose removed methods say what to do instead
    assert checking == {*map(init_of, LAZY), "train/__init__.py", removed, *pipelines}


@pytest.mark.parametrize("module", TRAINER)
def test_the_trainer_imports_public_names_alone(module):
    """It is an application of the library, as anybody could write one."""
    nodes = list(ast.walk(TREES[file_of(module)]))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if chapter_of(alias.name) == "megabatch"}
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("megabatch."):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    found = {name for name in found if not name.startswith("megabatch.train.")}
    found -= {"megabatch.lazy.export_lazily"} if module == "train" else set()
    elastic = {"megabatch.integrations.torchft.Replicas", "megabatch.integrations.lighthouse.LighthouseError"}
    found -= elastic if module == "train.replicas" else set()
    assert found <= {"megabatch", *(f"{home}.{name}" for home, names in PUBLIC.items() for name in names)}
    if "megabatch" in found:
        used = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
        assert {node.attr for node in used if node.value.id == "megabatch"} == {"__version__"}


def test_the_reference_lists_every_public_name():
    listed = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    expected = {f"{home}.{name}" for home, names in PUBLIC.items() for name in names}
    elsewhere = {f"{home}.{name}" for home in PUBLIC for name in PUBLIC["megabatch"] if home != "megabatch"}
    assert sorted(listed) == sorted(expected - elsewhere)  # an error that both have is listed once


@pytest.mark.parametrize("home", PUBLIC)
def test_a_public_name_has_a_docstring(home):
    objects = {name: getattr(import_module(home), name) for name in PUBLIC[home]}
    documented = {name: each for name, each in objects.items() if inspect.isclass(each) or inspect.isroutine(each)}
    assert not [name for name, each in documented.items() if not (each.__doc__ or "").strip()]


def test_a_public_constant_has_a_docstring():
    """A string behind its assignment, which the reference shows."""
    objects = {name: getattr(import_module(home), name) for home in PUBLIC for name in PUBLIC[home]}
    are_defined = (inspect.isclass, inspect.isroutine, inspect.ismodule)
    constants = {name for name, each in objects.items() if not any(check(each) for check in are_defined)}
    bodies = [TREES[file_of(module)].body for module in LIBRARY]
    documented = {
        ast.unparse(node.targets[0])
        for body in bodies
        for node, after in pairwise(body)
        if isinstance(node, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
    assert constants <= documented


@pytest.mark.parametrize("module", ["__init__", *LIBRARY])
def test_the_library_reads_no_file_and_no_environment_variable(module):
    if module in READS_FILES or module.startswith("integrations"):
        return
    names = {node.attr for node in ast.walk(TREES[file_of(module)]) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(TREES[file_of(module)]) if isinstance(node, ast.Name)}
    assert not names & OUTSIDE
    assert not {name.partition(".")[0] for name in imported(TREES[file_of(module)])} & {"os", "io", "pathlib"}

"""The order of imports, the size of files, and the map of them in the README."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import megabatch

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megabatch"
MAX_LINES = 300
MAX_LINES_OF = {"accumulator.py": 252}  # the heart

LIBRARY = [  # a module imports only modules above it
    "errors", "partition", "cost", "cut", "fit", "leaves", "batch", "contract", "masks", "vocabulary", "losses", "rng",
    "rows", "context", "mesh", "alarm", "foreign", "hooks", "fusing", "precision", "wrapped", "plain", "ddp", "fsdp1",
    "fsdp2", "several", "shapes", "schedules", "stages", "sync", "gradient",
    "sampler", "memory", "share", "run", "stepping", "update", "pause", "kept", "copies", "probe", "taken", "recovery",
    "representations", "joint", "pipeline",
    "simulate.devices", "simulate.allocator", "simulate.traffic", "simulate.roofline", "simulate.record",
    "simulate.ledger", "simulate.shards", "simulate.replica", "simulate.fake", "simulate.simulated", "simulate.world",
    "simulate.update", "simulate", "apart", "way", "accumulator",
    "learner", "mixing", "double", "finite_difference", "proof", "experts",
]  # fmt: skip
WITHOUT_TORCH = LIBRARY[:5]
OUTSIDE = {"environ", "getenv", "putenv", "open", "read_text", "read_bytes", "write_text", "write_bytes"}

FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
MODULES = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in FILES} - {"__init__"}
INTEGRATIONS = sorted(module for module in MODULES if module.startswith("integrations."))


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


def edges(module: str) -> set[str]:
    """Modules of the package that ``module`` imports; "" is the package itself."""
    found: set[str] = set()
    for name in imported(TREES[file_of(module)]):
        top, *parts = name.split(".")
        if top == "megabatch":
            while parts and ".".join(parts) not in MODULES:
                parts.pop()
            found.add(".".join(parts))
    return found


def test_the_list_names_every_module_of_the_library():
    on_disk = {module for module in MODULES if module.partition(".")[0] not in ("train", "integrations", "__main__")}
    assert on_disk == set(LIBRARY)


@pytest.mark.parametrize("module", LIBRARY)
def test_a_module_imports_only_modules_above_it(module):
    assert edges(module) <= set(LIBRARY[: LIBRARY.index(module)])


def test_the_package_imports_only_the_library():
    assert edges("__init__") <= set(LIBRARY) | {""}


def test_the_trainer_has_no_circle():
    # __main__ stands above all, and what imports the package itself imports the library as a whole.
    trainer = {module: edges(module) - {"train"} for module in MODULES if module.startswith("train.")}
    TopologicalSorter(trainer).prepare()
    assert not any(edge == "__main__" for found in trainer.values() for edge in found)


@pytest.mark.parametrize("module", INTEGRATIONS)
def test_an_integration_imports_the_library_alone_and_is_imported_by_no_other_part(module):
    assert edges(module) <= {*LIBRARY, *INTEGRATIONS, "integrations"}
    assert not [other for other in MODULES - set(INTEGRATIONS) if module in edges(other)]


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_the_ground_floor_knows_no_torch(module):
    assert not [name for name in imported(TREES[file_of(module)]) if name.partition(".")[0] == "torch"]


@pytest.mark.parametrize("module", LIBRARY)
def test_imports_stand_at_the_top(module):
    tree = TREES[file_of(module)]
    at_the_top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imported(tree) == imported(ast.Module(at_the_top, []))


def test_the_names_of_the_package_are_imported_when_they_are_asked_for_and_listed_for_type_checkers():
    """Decision 31: the one place where TYPE_CHECKING is used, so that what needs no torch does not wait for it."""
    listed = [node for node in ast.walk(TREES["__init__.py"]) if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: str(node.module) for node in listed for alias in node.names if alias.asname == alias.name}
    imported_later = {name: f"megabatch.{module}" for name, module in megabatch._HOME.items()}
    assert seen == imported_later | {"losses": "megabatch"}
    assert set(megabatch.__all__) == set(seen)
    checking = [path for path, tree in TREES.items() if "typing.TYPE_CHECKING" in imported(tree)]
    assert checking == ["__init__.py"]


@pytest.mark.parametrize("module", ["__init__", *(each for each in LIBRARY if each != "memory")])
def test_the_library_reads_no_file_and_no_environment_variable(module):
    names = {node.attr for node in ast.walk(TREES[file_of(module)]) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(TREES[file_of(module)]) if isinstance(node, ast.Name)}
    assert not names & OUTSIDE
    assert not {name.partition(".")[0] for name in imported(TREES[file_of(module)])} & {"os", "io", "pathlib"}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_short(name):
    assert len(FILES[name].read_text().splitlines()) <= MAX_LINES_OF.get(name, MAX_LINES)


def mapped_files(readme: str) -> list[str]:
    """Files that the README's map names below megabatch/, in its order; a folder's files stand deeper than it."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if re.search(r"^ *errors\.py ", block, re.MULTILINE)]
    found: list[str] = []
    folders: list[tuple[int, str]] = []  # open ones, with their depth
    for spaces, name in re.findall(r"^( *)(\S+)", block, re.MULTILINE):
        while folders and folders[-1][0] >= len(spaces):
            folders.pop()
        if name.endswith("/") and len(spaces):
            folders.append((len(spaces), name))
        elif name.endswith(".py"):
            found.append("".join(folder for _, folder in folders) + name)
    return found


def test_the_map_of_the_readme_is_the_package():
    mapped = mapped_files((ROOT / "README.md").read_text())
    assert sorted(mapped) == sorted(name for name in FILES if not name.endswith("__init__.py"))
    library = [file for file in map(file_of, LIBRARY) if not file.endswith("__init__.py")]
    assert [name for name in mapped if name in library] == library

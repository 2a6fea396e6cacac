"""The wheel and the sdist: what is in them, what they need, and what a program outside sees of them."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packaging.environment import environment

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "every_name.py"
SOURCES = ("megabatch", "recipes", "tests", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in", "pyproject.toml")
BUILD = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"  # what PEP 517 calls

pytestmark = pytest.mark.full


def ran(*command: object, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command that sees nothing of this checkout."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "RANK")}
    words = [str(word) for word in command]
    environ = clean | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environ
    return subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both, built from a copy."""
    folder = tmp_path_factory.mktemp("sources")
    for name in (*SOURCES, "constraints.txt"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    done = ran(sys.executable, "-c", BUILD, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter where the library is installed, and nothing but what it needs."""
    return environment(tmp_path_factory.mktemp("alone"), wheel, set())


@pytest.fixture(scope="module")
def trainer(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter where megabatch[train] is installed."""
    return environment(tmp_path_factory.mktemp("train"), wheel, {"train"})


def test_the_wheel_is_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    package = [name for name in names if not name.startswith("megabatch-")]
    sources = [path for path in (ROOT / "megabatch").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sorted(package) == sorted(path.relative_to(ROOT).as_posix() for path in sources)
    assert "megabatch/py.typed" in package
    assert [name for name in names if name.endswith("/LICENSE")]


def test_the_sdist_builds_and_has_no_tests(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "constraints.txt", "pyproject.toml"} <= names
    assert {"megabatch/py.typed", "megabatch/train/cli/commands.py", "recipes/stdlib.toml"} <= names
    assert {name.partition("/")[0] for name in names} <= {
        "", "LICENSE", "README.md", "CHANGELOG.md", "MANIFEST.in", "PKG-INFO", "constraints.txt", "pyproject.toml",
        "setup.cfg", "megabatch", "megabatch.egg-info", "recipes",
    }  # fmt: skip


def test_the_library_runs_on_torch_and_numpy_alone(alone: Path, tmp_path: Path) -> None:
    done = ran(alone, PROGRAM, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    proof, version, size, contract = done.stdout.splitlines()
    assert proof.startswith("True 2 ")
    assert version == "0.1.0"
    assert size == "micro_batch_size is 0; it counts things and must be a whole number of at least 1"
    assert "total" in contract
    missing = ran(alone, "-m", "megabatch", "train", "recipe.toml", folder=tmp_path)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.endswith('checkout, pip install "megabatch[train]" elsewhere\n')


def test_a_type_checker_outside_understands_every_public_name(alone: Path, tmp_path: Path) -> None:
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict", "pythonVersion": "3.11"}')
    program = PROGRAM.read_text()
    wrong = program.replace("proof.ok", "proof.okay").replace("    verify,", "    verfy,")
    programs = {"strict": program, "basic": f"# pyright: basic\n{program}", "wrong": f"# pyright: basic\n{wrong}"}
    for name, text in programs.items():
        (tmp_path / f"{name}.py").write_text(text)
    checked = ran(sys.executable, "-m", "pyright", "--pythonpath", alone, folder=tmp_path)
    errors = [line for line in checked.stdout.splitlines() if " - error: " in line]
    assert [line for line in errors if "wrong.py" not in line] == []
    assert [line for line in errors if '"verfy" is unknown import symbol' in line]
    assert [line for line in errors if '"okay"' in line]


def test_megabatch_with_its_trainer_runs_a_recipe_that_init_has_written(trainer: Path, tmp_path: Path) -> None:
    script = trainer.with_name("megabatch")
    script.write_text(f"#!{trainer}\nfrom megabatch.__main__ import main\n\nmain()\n")
    script.chmod(0o755)
    (tmp_path / "data.txt").write_text("".join(f"line {number} of some\n" for number in range(200)))
    words = ("--model", "small", "--data", "data.txt", "--hardware", "cpu")
    written = ran(script, "init", *words, folder=tmp_path)
    assert (written.returncode, written.stderr) == (0, "")
    home = dict.fromkeys(("XDG_CACHE_HOME", "HF_HOME", "MPLCONFIGDIR"), str(tmp_path / "cache"))
    short = ("--run.max_steps=2", "--update.global_batch_size=2")
    trained = ran(script, "train", "recipe.toml", *short, folder=tmp_path, **home)
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "runs/recipe/checkpoints/step-2").is_dir()

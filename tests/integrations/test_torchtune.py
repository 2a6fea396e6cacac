"""torchtune's recipe for one device, as it is and with the lines of examples/torchtune.diff, against plain torch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
TUNE_PYTHON = os.environ.get("TUNE_PYTHON", sys.executable)
NO_TUNE = (
    "torchtune is not installed; it wants an older torchao than torchtitan, so an environment of its own: python -m "
    "venv tune, tune/bin/pip install torch==2.13.0 torchtune==0.6.1 torchao==0.15.0, TUNE_PYTHON=tune/bin/python"
)
RECIPE = "full_finetune_single_device.py"
FIND = "import importlib.util as util, torchtune; print(util.find_spec('recipes').submodule_search_locations[0])"


def patched(recipe: Path, folder: Path) -> Path:
    """The recipe with the lines of examples/torchtune.diff."""
    lines = (ROOT / "examples/torchtune.diff").read_text()
    command = ["patch", "--output", str(folder / RECIPE), str(recipe), "-"]
    subprocess.run(command, input=lines, text=True, check=True, capture_output=True)
    return folder / RECIPE


def find_recipe(folder: Path) -> Path:
    found = subprocess.run([TUNE_PYTHON, "-c", FIND], cwd=folder, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(NO_TUNE)
    return Path(found.stdout.strip()) / RECIPE


def run_tune(recipe: Path, folder: Path, *mode: str) -> dict[str, Any]:
    """Return what tune_runs.py writes."""
    command = [TUNE_PYTHON, "-m", "tests.integrations.tune_runs", str(recipe), str(folder / "out.json"), *mode]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environ, check=True, capture_output=True)
    return json.loads((folder / "out.json").read_text())


def test_the_lines_of_the_example_make_the_recipe_exact(tmp_path: Path) -> None:
    recipe = find_recipe(tmp_path)
    theirs, ours = (run_tune(each, tmp_path) for each in (recipe, patched(recipe, tmp_path)))
    assert len(theirs["errors"]) == 1  # the tail is left out
    assert theirs["errors"][0] > 0.1  # labels are counted before the shift
    assert len(ours["errors"]) == 2
    assert max(ours["errors"]) < 1e-6  # torchtune's norms are in float32
    assert theirs["without_targets"] == "1 updates"  # of NaN
    assert "is nan" in ours["without_targets"]

"""torchtitan's own Trainer beside ExactTrainer, on two gloo ranks, against plain torch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
TITAN_PYTHON = os.environ.get("TITAN_PYTHON", sys.executable)
NO_TITAN = (
    "torchtitan is not installed; it wants older datasets than the rest, so an environment of its own: python -m venv "
    "titan, titan/bin/pip install torch==2.13.0 triton torchtitan==0.3.0, TITAN_PYTHON=titan/bin/python"
)
EXACT = 1e-6  # titan's model computes its rotations in float32
UNITS = 4  # of FSDP: two layers, the embedding, and the norm with the head


def run_titan(folder: Path, *mode: str) -> dict[str, Any]:
    """Return what titan_runs.py writes on two ranks."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DUMP_FOLDER": str(folder)}
    environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 20_000)}
    command = [TITAN_PYTHON, "-m", "tests.integrations.titan_runs", str(folder / "runs.json"), *mode]
    with (folder / "log").open("w") as log:
        ranks = [
            subprocess.Popen(
                command, cwd=ROOT, env=environ | {"RANK": rank, "LOCAL_RANK": rank}, stdout=log, stderr=log
            )
            for rank in ("0", "1")
        ]
        codes = [rank.wait(600) for rank in ranks]
    assert codes == [0, 0], (folder / "log").read_text()[-4000:]
    return json.loads((folder / "runs.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if subprocess.run([TITAN_PYTHON, "-c", "import torchtitan"], capture_output=True, check=False).returncode:
        pytest.skip(NO_TITAN)
    return run_titan(tmp_path_factory.mktemp("titan"))


@pytest.mark.parametrize("name", ["titan", "auto", "last", "last, no chunks", "titan, HSDP", "HSDP"])
def test_the_gradient_is_that_of_plain_torch(runs: dict[str, Any], name: str) -> None:
    assert runs["errors"][name] < EXACT


def test_it_is_titans_bit_for_bit_where_titan_reduces(runs: dict[str, Any]) -> None:
    """In the second update, which also needs equal weights."""
    assert runs["apart"]["auto"] == 0.0
    assert max(runs["apart"].values()) < EXACT


def test_gradients_are_reduced_once_per_update(runs: dict[str, Any]) -> None:
    """Four microbatches: titan reduces the unit with the head twice in each."""
    collectives = runs["collectives"]
    assert collectives["titan"]["reduce_scatter"] == collectives["auto"]["reduce_scatter"] == 4 * (UNITS + 1)
    assert collectives["last"]["reduce_scatter"] == collectives["last, no chunks"]["reduce_scatter"] == UNITS
    assert collectives["titan, HSDP"]["all_reduce"] == 4 * (UNITS + 1)
    assert collectives["HSDP"]["all_reduce"] == UNITS


def test_the_tail_of_an_epoch_is_stepped(runs: dict[str, Any]) -> None:
    """One rank has two batches left, the other one of a single row; titan drops two of each."""
    assert runs["tail"]["updates"] == [2, 1]
    assert runs["tail"]["error"] == ""
    assert runs["errors"]["tail"] < EXACT
    seen, given = runs["tail"]["tokens"]
    assert seen == given


def test_a_tail_that_only_one_rank_has_is_stepped(runs: dict[str, Any]) -> None:
    """The other rank has no batch left, and repeats its last one without targets."""
    found = runs["one rank"]
    assert (found["updates"], found["error"]) == (2, "")
    assert runs["errors"]["one rank"] < EXACT
    seen, given = found["tokens"]
    assert seen == given


def test_an_update_without_targets_is_passed_over(runs: dict[str, Any]) -> None:
    """The second of three: the weights at the end are those of a run without it, and titan stops there."""
    error, of_titan = runs["void"]["errors"]
    assert error == ""
    assert "Loss is not finite" in of_titan
    assert (runs["void"]["updates"], runs["void"]["steps"], runs["void"]["weights"]) == (2, 3, 0.0)


def test_a_cuda_graph_reduces_with_every_microbatch(runs: dict[str, Any]) -> None:
    assert "set training.disable_cuda_graphs" in runs["refused"]

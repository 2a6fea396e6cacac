"""Bugs planted in `Replicas`, tried with a replica that is killed and one that joins: each is seen by a check."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import elastic_torchft, result
from tests.exact.mutations import Mutation
from tests.exact.test_mutations import plant

ROOT, FILE = Path(__file__).parents[2], "integrations/torchft.py"
needs_torchft = pytest.mark.skipif(result.version("torchft") is None, reason=elastic_torchft.MISSING)
PLANTED = {  # bugs, and what replicas say of each
    Mutation("count microbatches of a dead replica as done", FILE,
             "if index not in held]", "if index not in held and not self._terms]"): "microbatches are held [(",
    Mutation("start a joiner at the samples of the update before", FILE,
             'self._sampler.load_state_dict(state["sampler"])',
             'self._sampler.load_state_dict({**state["sampler"], "samples": state["sampler"]["samples"] - 24})'):
    "has other samples, limits, clip, seed",
    Mutation("leave the optimizer of a joiner as it is", FILE,
             'self._optimizer.load_state_dict(state["optimizer"])', "pass"):
    "has other weights or learning rates on replicas that made the same updates",
}  # fmt: skip
PROGRAM = """
import sys
from pathlib import Path
from benchmarks import elastic_torchft
from benchmarks.elastic_torchft import Case, Fault

if __name__ == "__main__":
    elastic_torchft.RUN_LIMIT_SECONDS = 40  # attempts that fail for ever
    case = Case("killed, and one joins", (Fault(1, 1, "reduction"),), join_after=1)
    with elastic_torchft.lighthouse() as address:
        elastic_torchft.run(case, 0, address, Path(sys.argv[1]))
    row = elastic_torchft.judge(Path(sys.argv[1]), case, elastic_torchft.undisturbed())
    print("right" if row["right"] else "wrong")
"""


def run(folder: Path) -> tuple[str, str]:
    """Return "right" or "wrong", and what the replicas said."""
    (folder / "run").mkdir()
    (folder / "program.py").write_text(PROGRAM)
    environ = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(folder / "program.py"), str(folder / "run")]
    # A forkserver imports from its working folder first.
    finished = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.split()[-1], "".join(path.read_text() for path in (folder / "run").glob("*.*l*"))


@pytest.mark.full
@needs_torchft
def test_the_library_as_it_is_passes(tmp_path):
    judgement, said = run(tmp_path)
    assert judgement == "right", said[-4000:]
    assert not [text for text in PLANTED.values() if text in said]


@pytest.mark.full
@needs_torchft
@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_a_planted_bug_is_seen_by_replicas_that_compare(tmp_path, bug):
    plant(bug, tmp_path)
    judgement, said = run(tmp_path)
    assert judgement == "wrong"
    assert PLANTED[bug] in said

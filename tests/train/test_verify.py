"""`megabatch verify` under torchrun, and `megabatch plan --measure`."""

from pathlib import Path

import pytest

from megabatch import MegabatchError
from megabatch.train.cli.measure import check_device_path
from megabatch.train.cli.verification import check_versions
from megabatch.train.plan.device_file import read_device
from tests.train.conftest import Bench
from tests.train.processes import Run

MEAN_LOSS = """
from megabatch import Term

def mean(model, microbatch):
    labels = microbatch["labels"]
    return Term(model(input_ids=microbatch["input_ids"], labels=labels).loss.clone(), (labels[:, 1:] != -100).sum())
"""


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_ranks_verify_the_wrapper_of_the_recipe(bench: Bench, tmp_path: Path, wrapper: str) -> None:
    command = ["verify", str(bench.recipe), f"--parallel.wrapper={wrapper}"]
    finished = Run(command, tmp_path / "logs", 2).wait()
    assert [rank.status for rank in finished] == [0, 0], finished[0].err
    assert finished[1].out == ""
    assert f"cut in several ways on 2 ranks ({wrapper})" in finished[0].out
    assert "exact: worst relative error" in finished[0].out


@pytest.mark.slow
def test_a_wrong_loss_ends_with_status_1_on_every_rank(bench: Bench, tmp_path: Path) -> None:
    (bench.path / "mean_loss.py").write_text(MEAN_LOSS)
    command = ["verify", str(bench.recipe), f"--loss.function={bench.path}/mean_loss.py:mean"]
    finished = Run(command, tmp_path / "logs", 2).wait()
    assert [rank.status for rank in finished] == [1, 1], finished[0].err
    assert "NOT exact" in finished[0].out


@pytest.mark.slow
def test_ranks_that_share_samples_are_refused(bench: Bench, tmp_path: Path) -> None:
    finished = Run(["verify", str(bench.recipe), "--parallel.tp=2"], tmp_path / "logs", 2).wait()
    assert [rank.status for rank in finished] == [2, 2]
    (line,) = [line for rank in finished for line in rank.err.splitlines()]
    assert line == (
        "megabatch: verify compares ranks with samples of their own, and parallel.tp is 2; add --parallel.tp=1, or "
        "start verify without torchrun"
    )


def test_versions_are_the_same_everywhere() -> None:
    check_versions([{"torch": "2.13"}, {"torch": "2.13"}])
    with pytest.raises(MegabatchError, match=r"rank 1 has torch 2\.12, and rank 0 has 2\.13; install the same on all"):
        check_versions([{"torch": "2.13"}, {"torch": "2.12"}])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_this_machine_is_measured_into_a_file(tmp_path: Path, num_ranks: int) -> None:
    """Ranks on one host measure their link; a single rank has the one of the known device."""
    path = tmp_path / "here.toml"
    finished = Run(["plan", "--measure", str(path)], tmp_path / "logs", num_ranks).wait()
    assert [rank.status for rank in finished] == [0] * num_ranks, finished[0].err
    assert [rank.out for rank in finished[1:]] == [""] * (num_ranks - 1)
    assert finished[0].out.splitlines()[-1] == f"wrote {path}; plan with --device {path}"
    assert ("[all_gather]" in path.read_text()) == (num_ranks > 1)
    assert read_device(path).launch_seconds > 0
    assert [file.name for file in tmp_path.glob("*.toml*")] == ["here.toml"]


def test_a_file_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[update]")
    with pytest.raises(MegabatchError, match="which is there and no device file; name another"):
        check_device_path(recipe)
    with pytest.raises(MegabatchError, match=r"name a \.toml file in a folder that is there"):
        check_device_path(tmp_path / "none" / "here.toml")
    check_device_path(tmp_path / "here.toml")

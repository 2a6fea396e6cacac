"""docs/checkpoints.md: what was saved goes on as if it had never stopped, to the bit."""

from pathlib import Path

import pytest

from tests.comm import resumed
from tests.exact.launch import launch, values


def test_one_process_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    assert resumed.run_job(f"train:{tmp_path / 'checkpoint.pt'}") == 0.0


@pytest.mark.slow
def test_ranks_go_on_with_the_same_bits(tmp_path: Path) -> None:
    jobs = [f"train_ddp:{tmp_path / 'checkpoint.pt'}", f"train_fsdp2:{tmp_path / 'checkpoint'}"]
    for results in launch(2, "tests.comm.resumed:run_job", jobs, tmp_path).values():
        assert list(values(results)) == [0.0, 0.0]

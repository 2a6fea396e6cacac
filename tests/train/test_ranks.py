"""What becomes of the other ranks where one fails alone."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megabatch import MegabatchError
from megabatch.train import cli
from megabatch.train.config import Config
from megabatch.train.ranks import join
from tests.train.processes import CONTEXT, rank_environment, run_rank

pytestmark = pytest.mark.slow


def fail_on_rank_1(error: Exception, environment: dict[str, str], logs: list[str]) -> None:
    """A rank's life; the first one waits in the rendezvous of a process group for the second one, which fails."""

    def command(_: Any, met: Any) -> None:
        if met.rank == 1:
            raise error
        config: Config = cli.EXAMPLE
        join(met, config.model_copy(update={"run": config.run.model_copy(update={"device": "cpu"})}))

    cli.command = command
    run_rank([], environment, logs)


@pytest.mark.parametrize(("error", "status"), [(ZeroDivisionError("of one rank"), 1), (MegabatchError("of one"), 2)])
def test_the_others_end_within_seconds(tmp_path: Path, error: Exception, status: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [[str(tmp_path / f"{rank}.{stream}") for stream in ("out", "err")] for rank in range(2)]
    processes = [
        CONTEXT.Process(target=fail_on_rank_1, args=(error, rank_environment(rank, 2, store.port), logs[rank]))
        for rank in range(2)
    ]
    start = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    assert time.monotonic() - start < 40  # most of it imports, on a busy machine
    assert [process.exitcode for process in processes] == [2, status]
    silent, said = (Path(err).read_text() for _, err in logs)
    assert silent == ""
    assert said.splitlines()[-1] == ("ZeroDivisionError: of one rank" if status == 1 else "megabatch: of one")

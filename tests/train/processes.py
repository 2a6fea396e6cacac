"""Runs of the command line in real processes, one a rank, forked from a server that has imported it once.

Ranks find each other as torchrun's do: through a store that outlives them, on a port that the system chose.
"""

import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

SECONDS = 120  # for a run; none here takes a quarter of it
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([
    "megabatch.train.cli.commands", "megabatch.train.loop", "torch.utils.tensorboard",
    "torch.distributed.checkpoint.format_utils",
    "torch.distributed.tensor.parallel", "torch.profiler._cupti_monitor", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama", "tyro._backends", "typeguard",
])  # fmt: skip


@dataclass(frozen=True)
class Finished:
    """The status and the output of a process."""

    status: int | None
    out: str
    err: str


class Run:
    """A command line on some ranks, while it runs; or a script in place of it."""

    def __init__(self, arguments: Sequence[str], logs: Path, ranks: int, script: Path | None = None) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs, self._script = logs, script
        # More than one run may live in a process, so the store is held by the test and not by rank 0.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
        self.processes = [self._start(list(arguments), rank, ranks) for rank in range(ranks)]

    def wait(self, seconds: float = SECONDS) -> list[Finished]:
        """Every rank's end."""
        for process in self.processes:
            process.join(seconds)
            if process.is_alive():
                self.kill()
        return [
            Finished(process.exitcode, *(self._log(rank, stream).read_text() for stream in ("out", "err")))
            for rank, process in enumerate(self.processes)
        ]

    def kill_when(self, reached: Callable[[], bool]) -> None:
        """SIGKILL every rank as soon as something is so."""
        deadline = time.monotonic() + SECONDS
        while not reached() and time.monotonic() < deadline and any(process.is_alive() for process in self.processes):
            time.sleep(0.005)
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()

    def _start(self, arguments: list[str], rank: int, ranks: int) -> BaseProcess:
        environment = {} if self._store is None else rank_environment(rank, ranks, self._store.port)
        logs = [str(self._log(rank, stream)) for stream in ("out", "err")]
        process = CONTEXT.Process(target=run_rank, args=(arguments, environment, logs, self._script))
        process.start()
        return process

    def _log(self, rank: int, stream: str) -> Path:
        return self._logs / f"rank{rank}.{stream}"


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def run_rank(arguments: list[str], environment: dict[str, str], logs: list[str], script: Path | None = None) -> None:
    """The whole life of a rank; its exit status is that of the command line, or of a script."""
    import torch

    from megabatch.train.cli import commands as cli

    for descriptor, log in zip((1, 2), logs, strict=True):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ |= environment
    torch.set_num_threads(1)
    sys.argv = [str(script or "megabatch"), *arguments]
    if script is None:
        cli.main()
    else:
        runpy.run_path(str(script), run_name="__main__")


def overrides(values: dict[str, Any]) -> list[str]:
    """Keyword arguments as the command line writes them: ``update__sync="every"`` → ``--update.sync=every``."""
    return [f"--{key.replace('__', '.')}={value}" for key, value in values.items()]

"""One spawn of some ranks that run many jobs; results are files that are written as soon as a job ends.

A job is a name given to a function `job(name)` that every rank calls and that returns something JSON can hold.
A job that raises is reported with its traceback: the ranks leave their process group (so that peers that wait for
them fail too instead of hanging), meet in a file, and go on with the next job in a new group.
"""

import contextlib
import importlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest

Result = dict[str, Any]  # {"value": ...} or {"error": traceback}
GROUP_TIMEOUT_SECONDS = 60.0
SECONDS_PER_JOB = 15.0  # of a launch of many jobs, on a busy machine
IMPORTED = (
    "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel", "torch.optim.adamw", "torch.utils._python_dispatch",
    "transformers.models.gpt2.modeling_gpt2",
)  # fmt: skip
MAX_FAILURES = 12  # a broken library should not take an hour to say so


@dataclass
class Run:
    """Some ranks and their jobs, with what they import from first."""

    world: int
    names: list[str]
    folder: Path
    python_path: list[str] = field(default_factory=list)
    max_failures: int = MAX_FAILURES
    group_timeout_seconds: float = GROUP_TIMEOUT_SECONDS


def launch(world: int, function: str, names: Iterable[str], folder: Path, *,
           timeout_seconds: float = 600) -> dict[str, list[Result]]:  # fmt: skip
    """Run `function` ("module:name") for every name on `world` ranks; the results by name, one per rank."""
    return launch_all(function, [Run(world, list(names), folder)], folder, timeout_seconds=timeout_seconds)[0]


def values(ranks: Iterable[Result]) -> Iterator[Any]:
    """Return the result of a job on each rank; fail with the traceback of one on which it raised."""
    for result in ranks:
        assert "error" not in result, result["error"]
        yield result["value"]


def of_ranks(function: str, jobs: Mapping[int, Iterable[str]] | Iterable[str], **options: Any) -> Any:
    """A module's fixture: `found(job)` is what a job returned on each rank.

    Args:
        jobs: Their names by the number of ranks; without one, each name says it as its last but one part.
        options: Of every `Run`.
    """
    by_world: dict[int, list[str]] = {}
    if isinstance(jobs, Mapping):
        by_world = {world: list(names) for world, names in jobs.items()}
    else:
        for name in jobs:
            by_world.setdefault(int(name.split(":")[-2]), []).append(name)

    @pytest.fixture(scope="module")
    def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
        mine = (item for item in request.session.items if item.path == request.path)
        params = [value for item in mine if hasattr(item, "callspec") for value in item.callspec.params.values()]
        asked = {getattr(value, "name", value) for value in params if isinstance(getattr(value, "name", value), str)}
        return Found(function, by_world, asked, tmp_path_factory.mktemp("ranks"), options)

    return found


class Found:
    """Results of a module's jobs. Those of a number of ranks run together when the first of them is asked for."""

    def __init__(
        self, function: str, by_world: dict[int, list[str]], asked: set[str], folder: Path, options: dict[str, Any]
    ) -> None:
        self._function, self._by_world, self._asked, self._folder = function, by_world, asked, folder
        self._options, self._results, self._launches = options, dict[tuple[int, str], list[Result]](), itertools.count()

    def __call__(self, job: str, world: int | None = None) -> list[Any]:
        """The job's values, one per rank; fails with the traceback of a rank on which it raised."""
        return list(values(self.results(job, world)))

    def results(self, job: str, world: int | None = None) -> list[Result]:
        """The same with what a rank raised."""
        if world is None:
            world = next(each for each, names in self._by_world.items() if job in names)
        if (world, job) not in self._results:
            # Those that a selected test names, or all where tests name none of them.
            names = [name for name in self._by_world[world] if name in self._asked] or self._by_world[world]
            names = [name for name in names if (world, name) not in self._results]
            run = Run(
                world, names if job in names else [job], self._folder / str(next(self._launches)), **self._options
            )
            limit = max(600.0, SECONDS_PER_JOB * len(run.names))
            (found,) = launch_all(self._function, [run], run.folder, timeout_seconds=limit)
            self._results |= {(world, name): ranks for name, ranks in found.items()}
        return self._results[world, job]


def launch_all(
    function: str, runs: list[Run], folder: Path, *, timeout_seconds: float = 600
) -> list[dict[str, list[Result]]]:
    """One run after the other, from one process."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs.json").write_text(json.dumps([function, [asdict(run) for run in runs]], default=str))
    _server().launch(folder.resolve(), timeout_seconds)
    tail = (folder / "log.txt").read_text()[-2000:]
    return [_collected(run, f"{folder}/log.txt ends:\n{tail}") for run in runs]


class Server:
    """A process that has imported what jobs need, once, and forks every launch from itself."""

    def __init__(self) -> None:
        root = Path(__file__).resolve().parents[2]
        quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(root), "TORCH_CPP_LOG_LEVEL": "FATAL"}
        # Not in the repository: what is imported is what the path says.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.exact.launch"], env=os.environ | quiet, cwd=root.root,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def launch(self, folder: Path, timeout_seconds: float) -> None:
        """Run what the folder's runs.json says, to its end or for so long."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answers is not None
        print(folder, file=asked)
        leader = int(answers.readline())
        if not select.select([answers], [], [], timeout_seconds)[0]:
            os.killpg(leader, signal.SIGKILL)
        answers.readline()  # it has ended
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)  # and now the ranks that it has left


_server = cache(Server)  # of this process of pytest


def _collected(run: Run, log: str) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {name: [] for name in run.names}
    for rank in range(run.world):
        file = run.folder / f"rank{rank}.jsonl"
        results = dict(json.loads(line) for line in file.read_text().splitlines()) if file.exists() else {}
        lost = {"error": f"rank {rank} of {run.world} ended or was stopped before this job; {log}"}
        for name in run.names:
            found[name].append(results.get(name, lost))
    return found


class Ranks:
    """This process as a rank: its process group, and the file in which ranks meet after every job."""

    def __init__(self, run: Run, rank: int) -> None:
        import torch.distributed as dist

        self.run, self.rank, self.meetings, self.groups = run, rank, 0, 0
        self._store = dist.FileStore(str(run.folder / "meet"), run.world)

    def join(self) -> None:
        """A process group, where there is none; a job may have left it. A rank that is alone has one too."""
        import torch.distributed as dist

        if dist.is_initialized():
            return
        self.groups += 1
        store = dist.FileStore(str(self.run.folder / f"group{self.groups}"), self.run.world)
        timeout = timedelta(seconds=self.run.group_timeout_seconds)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.run.world, timeout=timeout)

    def leave(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def all_well(self, well: bool) -> bool:
        """Return True if the job ended well on every rank."""
        self.meetings += 1
        self._store.set(f"{self.meetings}/{self.rank}", "1" if well else "0")
        return all(self._store.get(f"{self.meetings}/{rank}") == b"1" for rank in range(self.run.world))


def _run(run: Run, rank: int, job: Callable[[str], Any]) -> None:
    ranks, failures = Ranks(run, rank), 0
    with (run.folder / f"rank{rank}.jsonl").open("w") as results:
        for name in run.names:
            ranks.join()
            started = time.perf_counter()
            try:
                result = {"value": job(name)}
            except Exception:
                result = {"error": f"rank {rank}: {traceback.format_exc()}"}
                ranks.leave()
            result["seconds"] = round(time.perf_counter() - started, 3)
            results.write(json.dumps([name, result]) + "\n")
            results.flush()
            if not ranks.all_well("value" in result):
                failures += 1
                if failures == run.max_failures:
                    return
                ranks.leave()


def _lead(run: Run, function: str) -> None:
    """Import what is run, then fork the ranks."""
    sys.path[:0] = run.python_path
    run.folder.mkdir(parents=True, exist_ok=True)
    module, _, name = function.partition(":")
    job = getattr(importlib.import_module(module), name)
    _wait([_fork(lambda rank=rank: _run(run, rank, job)) for rank in range(run.world)])


def _fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(0)  # gloo can abort while an interpreter closes, after all work is done


def _wait(children: list[int]) -> None:
    for child in children:
        os.waitpid(child, 0)


def _launch(folder: Path, function: str, runs: list[Run]) -> None:
    """The process that one launch asks for; its ranks are its group."""
    import torch

    os.setsid()
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(file, descriptor)
    os.chdir(folder)
    torch.set_num_threads(1)
    for run in runs:
        _wait([_fork(lambda run=run: _lead(run, function))])


def _serve(folder: Path, function: str, runs: list[Run]) -> None:
    leader = _fork(lambda: _launch(folder, function, runs))
    print(leader, flush=True)
    _wait([leader])
    print("ended", flush=True)


def _serve_warm(read: int, write: int) -> None:
    """The part of the server that imports the library and the jobs themselves, each once."""
    os.close(write)
    for folder, function, runs in map(_asked, os.fdopen(read)):
        with contextlib.suppress(Exception):  # whoever runs it imports it again, and reports the error
            importlib.import_module(function.partition(":")[0])
        _serve(folder, function, runs)


def _asked(line: str) -> tuple[Path, str, list[Run]]:
    folder = Path(line.rstrip("\n"))
    function, runs = json.loads((folder / "runs.json").read_text())
    return folder, function, [Run(**each | {"folder": Path(each["folder"])}) for each in runs]


def main() -> None:
    """Import what all runs share, once; then a launch for every folder that is asked for."""
    for name in IMPORTED:
        importlib.import_module(name)
    assert "megabatch" not in sys.modules, "a planted run has a copy of its own"
    warm = None
    for line in sys.stdin:
        asked = _asked(line)
        if any(run.python_path for run in asked[2]):
            _serve(*asked)
            continue
        if warm is None:
            read, write = os.pipe()
            _fork(lambda read=read, write=write: _serve_warm(read, write))
            os.close(read)
            warm = os.fdopen(write, "w", buffering=1)
        print(line, end="", file=warm)


if __name__ == "__main__":
    main()

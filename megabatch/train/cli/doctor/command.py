"""Command: `megabatch doctor`, alone or on all ranks of torchrun: a line for each thing that was looked at."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.cli.doctor.deadline import Deadline
from megabatch.train.cli.doctor.facts import findings_of, gathered
from megabatch.train.cli.doctor.finding import Finding
from megabatch.train.cli.doctor.places import folder_finding, hub_finding
from megabatch.train.cli.doctor.proof import proof_of, wrappers
from megabatch.train.cli.help import EXAMPLE
from megabatch.train.cli.usage import parted
from megabatch.train.config import ParallelConfig
from megabatch.train.runtime.exit import CRASHED, PEER_GONE, FailedError, fail
from megabatch.train.runtime.ranks import Ranks, init_ranks
from megabatch.train.runtime.rendezvous import Rendezvous

Result = TypeVar("Result")
SECONDS = 60.0  # for a stage; a GPU's first sum over ranks of many nodes takes a few


def examine(arguments: list[str], met: Rendezvous, seconds: float = SECONDS) -> None:
    """Print what is found; one rank speaks. Raises `FailedError` with status 1 where something fails, `MegabatchError`
    for arguments that cannot be read."""
    folder = read_folder(arguments)
    levels: list[str] = []
    for each in Examination(met, folder, Deadline(met, seconds)).findings():
        levels.append(each.level)
        if met.rank == 0:
            print(each, flush=True)
    if "fail" in levels:
        raise FailedError(CRASHED)


def read_folder(arguments: list[str]) -> Path:
    """Where runs are written."""
    words = parted(arguments)
    if words and (len(words) != 2 or words[0] != "--folder" or not words[1]):
        raise MegabatchError(
            f"cannot read the arguments {' '.join(arguments)!r}; write: megabatch doctor [--folder runs]"
        )
    return Path(words[1] if words else "runs")


class Examination:
    """Stage after stage, in the same order on every rank; what a rank cannot do ends all of them, and it is named."""

    def __init__(self, met: Rendezvous, folder: Path, deadline: Deadline) -> None:
        self._met, self._folder, self._deadline = met, folder, deadline

    def findings(self) -> Iterator[Finding]:
        """Everything that is looked at; collective."""
        ranks = self._stage("taking a device and joining the others", self._join)
        facts = self._stage("telling each other what is here", lambda: gathered(ranks))
        yield from findings_of(facts, ranks.device)
        if ranks.is_main:
            yield folder_finding(self._folder)
            yield hub_finding()
        for name, wrap in wrappers(ranks).items():
            yield self._stage(f"an update through {name}", partial(proof_of, name, wrap, ranks))

    def _join(self) -> Ranks:
        return init_ranks(self._met, EXAMPLE.model_copy(update={"parallel": ParallelConfig(wrapper="ddp")}))

    def _stage(self, name: str, work: Callable[[], Result]) -> Result:
        with self._deadline.of(name):
            try:
                return work()
            except Exception as error:
                if isinstance(error, MegabatchError | FailedError) or any(sign in str(error) for sign in PEER_GONE):
                    raise
                fail(self._met, f"megabatch: doctor: {name}: {in_one_line(error)}; {advice(error)}", CRASHED)


def advice(error: Exception) -> str:
    """What to change."""
    if "invalid device ordinal" in str(error):
        return "start no more processes on a host than it has GPUs"
    return "look at that rank's device and network, or try another version of torch"

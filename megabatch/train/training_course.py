"""Course: a run from update to update, as its signals and the other ranks see it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megabatch import Learner, MegabatchError
from megabatch.train.runtime.heartbeat import Heartbeat
from megabatch.train.runtime.ranks import Ranks
from megabatch.train.runtime.signals import StopSignal


class Course:
    """Hands out updates until the run is over, or a signal has come and the ranks have agreed on it."""

    def __init__(self, stop: StopSignal, pulse: Heartbeat, ranks: Ranks) -> None:
        self._stop, self._pulse, self._ranks = stop, pulse, ranks

    @property
    def is_stopped(self) -> bool:
        """Whether it ended before its end."""
        return self._stop.agreed is not None

    def updates(
        self, updates: Iterable[Sequence[Any]], learner: Learner, is_over: Callable[[], bool]
    ) -> Iterator[Sequence[Any]]:
        """This rank's samples of each update, until the run is over. Collective."""
        rest = iter(updates)
        while not is_over() and not self.is_stopped:
            self._pulse.wait_for_samples(learner.step + 1)
            try:
                batch = next(rest, None)
            except MegabatchError:
                self._stop.check()  # a signal to a whole job ends those that load samples, too
                raise
            if batch is None:
                return
            self._stop.has_begun = True
            self._pulse.start_update(learner.step + 1)
            yield batch
            if not is_over():
                self._stop.agree(self._ranks)

    def is_asked(self) -> bool:
        """Whether a signal has come to any rank; collective."""
        return self._stop.agree(self._ranks)

    def words(self, step: int, folder: Path) -> str:
        """Why it ended, and how it goes on."""
        assert self._stop.agreed is not None
        return f"stopped by {self._stop.agreed.name} after update {step}; `megabatch train {folder}` goes on"

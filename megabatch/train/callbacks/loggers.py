"""Loggers: the numbers of metrics.jsonl for TensorBoard and for trackers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megabatch.train.config import Config
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks


class Logger(Protocol):
    """A place where a run's numbers are shown, by their tags."""

    def log(self, row: Mapping[str, float], step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files. The first row makes the file, and drops what earlier ones have from its step on."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._events = folder, None

    def log(self, row: Mapping[str, float], step: int) -> None:
        if self._events is None:
            from megabatch.train.callbacks.tensorboard import Events  # takes a second

            self._events = Events(self._folder, purge_step=step if self._folder.exists() else None)
        self._events.add(row, step)

    def flush(self) -> None:
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        self.flush()


class Trackers:
    """Weights & Biases and MLflow, each in a thread of its own."""

    def __init__(self, config: Config, ranks: Ranks, console: Console) -> None:
        from megabatch.train.callbacks.tracking import Tracking

        self._tracking: Any = Tracking(config, ranks, console)

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._tracking.add(row, step)

    def flush(self) -> None:
        """Threads send when they can."""

    def close(self) -> None:
        self._tracking.close()


def make_loggers(config: Config, ranks: Ranks, console: Console) -> list[Logger]:
    """Return the loggers of a run, on the main rank. Collective."""
    trackers: list[Logger] = [Trackers(config, ranks, console)] if config.tracking.trackers else []
    tensorboard: list[Logger] = [TensorBoard(Path(config.run.folder) / "tensorboard")] if config.run.tensorboard else []
    return [*tensorboard, *trackers] if ranks.is_main else []

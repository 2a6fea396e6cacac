"""Sending: rows wait in a thread for each tracker, so that a slow or broken service never holds up or ends a run."""

import json
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megabatch.errors import in_one_line
from megabatch.train.callbacks.tracker import Told, Tracker
from megabatch.train.checkpoints.run_folder import TRACKING
from megabatch.train.config import Config
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.files import replace_text
from megabatch.train.runtime.ranks import Ranks

TRACKERS = {  # name → what is imported for it, the class that knows it, and what installs it
    "wandb": ("wandb", "megabatch.train.callbacks.wandb_tracker:Wandb", "wandb"),
    "mlflow": ("mlflow", "megabatch.train.callbacks.mlflow_tracker:Mlflow", "mlflow-skinny"),
}
SECONDS_TO_FINISH = 20.0  # at the end of a run, for what is still to be sent

Scalars = tuple[Mapping[str, float], int]  # numbers by their tags, and their step


class Tracking:
    """What a run tells its trackers; the main rank does. Begins with the first numbers, when the folder is there.

    Raises `MegabatchError` on every rank where a tracker is not installed.
    """

    def __init__(self, config: Config, ranks: Ranks, console: Console) -> None:
        self._config, self._console, self._folder = config, console, Path(config.run.folder)
        self._names = list(dict.fromkeys(config.tracking.trackers)) if ranks.is_main else []
        self._sendings: list[Sending] | None = None
        ranks.agree(problem_of(self._names))

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Tell it to each tracker, some time."""
        self._sendings = self._begin() if self._sendings is None else self._sendings
        for sending in self._sendings:
            sending.add((scalars, step))
        self._warn()

    def close(self) -> None:
        """Let trackers finish, for as long as that may take."""
        for sending in self._sendings or ():
            sending.end()
        for sending in self._sendings or ():
            sending.join(SECONDS_TO_FINISH)
        self._warn()

    def _begin(self) -> list["Sending"]:
        ids = Ids(self._folder / TRACKING) if self._names else None
        return [] if ids is None else [Sending(name, self._told(), ids) for name in self._names]

    def _told(self) -> Told:
        name = self._config.tracking.name or self._folder.absolute().name
        return Told(self._config.tracking.project, name, self._folder, self._config.model_dump(mode="json"))

    def _warn(self) -> None:
        for sending in self._sendings or ():
            problem = sending.problem_to_say()
            if problem is not None:
                self._console.warn(f"{sending.name} is told no more ({problem}); the run goes on without it")


class Ids:
    """Which run it is for each tracker, kept in the run's folder; used by several threads."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # none yet, or not to be read: then they are other runs there
            found = {}
        self._ids: dict[str, Any] = found if isinstance(found, dict) else {}

    def get(self, name: str) -> str | None:
        """The one that was saved."""
        found = self._ids.get(name)
        return found if isinstance(found, str) else None

    def keep(self, name: str, number: str) -> None:
        """Save one. Raises `OSError` where that cannot be done."""
        with self._lock:
            self._ids[name] = number
            replace_text(self._path, json.dumps(self._ids, indent=1) + "\n")


class Sending(threading.Thread):
    """The thread of one tracker, from its beginning to its end; after a problem it tells nothing more."""

    def __init__(self, name: str, told: Told, ids: Ids) -> None:
        super().__init__(name=name, daemon=True)
        self._told, self._ids, self._rows = told, ids, queue.SimpleQueue[Scalars | None]()
        self._problem: str | None = None
        self._is_said = False
        self.start()

    def add(self, scalars: Scalars) -> None:
        """Let it wait for the thread."""
        if self._problem is None:
            self._rows.put(scalars)

    def end(self) -> None:
        """Nothing comes after this."""
        self._rows.put(None)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end, which may not come in time."""
        super().join(timeout)
        if self.is_alive() and self._problem is None:
            self._problem = f"it has not taken all in {timeout:g} s"

    def problem_to_say(self) -> str | None:
        """What has gone wrong, once."""
        if self._problem is None or self._is_said:
            return None
        self._is_said = True
        return self._problem

    def run(self) -> None:
        """In the thread."""
        try:
            self._send()
        except BaseException as error:  # of a library that is not ours: whatever it is, the run goes on
            self._problem = in_one_line(error)

    def _send(self) -> None:
        tracker = class_of(self.name)(self._told, self._ids.get(self.name))
        self._ids.keep(self.name, tracker.id)
        while (row := self._rows.get()) is not None:
            tracker.log(*row)
        tracker.finish()


def problem_of(names: Sequence[str]) -> str | None:
    """What is missing for a tracker, in one line; None: nothing."""
    for name in names:
        module, _, package = TRACKERS[name]
        if find_spec(module) is None:
            return f"tracking.trackers has {name!r}, which is not installed; pip install {package}, or leave it out"
    return None


def holds_the_end() -> bool:
    """Whether a tracker's library is here, which would hold a process at its end until a service answers."""
    return any(module in sys.modules for module, *_ in TRACKERS.values())


def class_of(name: str) -> Callable[[Told, str | None], Tracker]:
    """The tracker's class; importing it takes a second, and is done in its thread."""
    module, _, attribute = TRACKERS[name][1].partition(":")
    return getattr(import_module(module), attribute)

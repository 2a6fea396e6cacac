"""Loggers: the numbers of metrics.jsonl for TensorBoard, Weights & Biases, MLflow and trackio.

metrics.jsonl is the record of a run. Loggers show it elsewhere, and a run does without any of them: one that fails is
left out for the rest of this start.
"""

import io
import json
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from megabatch.errors import in_one_line
from megabatch.train.checkpoints.run_folder import TRACKING
from megabatch.train.config import Config
from megabatch.train.config.secrets import mask
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.files import check_own_path, flat, read_file, replace_text
from megabatch.train.runtime.ranks import Ranks

# By tracker and its module, its package.
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny", "trackio": "trackio"}
TENSORBOARD = "tensorboard"
# Seconds for wandb's service to answer, when a run begins there and when it ends.
SECONDS_TO_ANSWER = 20.0
# wandb asks nobody for a key in the middle of a run.
SECONDS_TO_LOG_IN = 1.0
# An MLflow store takes at least these, of a parameter and of a call.
MAX_CHARACTERS, PARAMETERS_AT_ONCE = 500, 100


class Logger(Protocol):
    """A place where a run's numbers are shown, by their tags."""

    def log(self, row: Mapping[str, float], step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def make_loggers(config: Config, ranks: Ranks, console: Console) -> list[Logger]:
    """Return the loggers of a run, on the main rank; none on the others. Collective.

    Raises:
        MegabatchError: On every rank, where a tracker is not installed.
    """
    trackers = list(dict.fromkeys(config.tracking.trackers)) if ranks.is_main else []
    problems = [
        f"tracking.trackers has {name!r}, which is not installed; pip install {PACKAGES[name]}, or leave it out"
        for name in trackers
        if find_spec(name) is None
    ]
    ranks.agree(problems[0] if problems else None)
    tensorboard = [TENSORBOARD] if config.run.tensorboard and ranks.is_main else []
    return [OptionalLogger(name, config, console) for name in (*tensorboard, *trackers)]


def holds_the_end() -> bool:
    """Return True where a tracker's library may keep the process from ending until its service answers."""
    return not sys.modules.keys().isdisjoint(PACKAGES)


class OptionalLogger:
    """A logger that opens with its first row, and is left out with one warning where it fails.

    A run that ends before its first row leaves nothing in its folder, nor at a tracker.
    """

    def __init__(self, name: str, config: Config, console: Console) -> None:
        self._name, self._config, self._console = name, config, console
        self._logger: Logger | None = None
        self._has_failed = False

    def log(self, row: Mapping[str, float], step: int) -> None:
        with self._left_out_on_failure():
            if self._logger is None and not self._has_failed:
                self._logger = OPENERS[self._name](self._config, step)
            if self._logger is not None:
                self._logger.log(row, step)

    def flush(self) -> None:
        with self._left_out_on_failure():
            if self._logger is not None:
                self._logger.flush()

    def close(self) -> None:
        with self._left_out_on_failure():
            if self._logger is not None:
                self._logger.close()
        self._logger = None

    @contextmanager
    def _left_out_on_failure(self) -> Generator[None, None, None]:
        try:
            yield
        except Exception as error:
            # The library is not ours: whatever it raises, the run continues.
            self._logger, self._has_failed = None, True
            self._console.warn(f"{self._name} is left out ({in_one_line(error)}); the run continues without it")


class TensorBoard:
    """Files of events in the run's folder; those of a resumed run hide what earlier starts have from its step on."""

    def __init__(self, config: Config, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(config.run.folder) / TENSORBOARD
        check_own_path(folder)
        self._writer = SummaryWriter(str(folder), purge_step=first_step if any(folder.glob("events.*")) else None)
        self.flush, self.close = self._writer.flush, self._writer.close
        threading.excepthook = partial(_print_unless_writer, threading.excepthook)

    def log(self, row: Mapping[str, float], step: int) -> None:
        for tag, number in row.items():
            self._writer.add_scalar(tag, number, step)


def _print_unless_writer(hook: Callable[[Any], object], failed: Any) -> None:
    """Print no traceback of TensorBoard's thread: the next call to the writer raises the error, too."""
    if type(failed.thread).__name__ != "_AsyncWriterThread":
        hook(failed)


class Tracker(ABC):
    """The run at a tracker, whose id stands in tracking.json, so that a resumed run continues in it."""

    def __init__(self, config: Config, first_step: int) -> None:
        self._name = config.tracking.name or Path(config.run.folder).absolute().name
        path = Path(config.run.folder) / TRACKING
        tracker, ids = type(self).__name__.lower(), dict[str, str]()
        # A tracker begins a new run where the file is missing or damaged.
        with suppress(OSError, ValueError, TypeError):
            ids = dict(json.loads(read_file(path)))
        self._module: Any = import_module(tracker)
        self._saved = ids.get(tracker)
        replace_text(path, json.dumps(ids | {tracker: self._open(config)}, indent=1) + "\n")

    @abstractmethod
    def _open(self, config: Config) -> str:
        """Start a run there, or resume the saved one. Return its id."""

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._module.log(dict(row), step=step)

    def flush(self) -> None:
        """Do nothing: trackers send in processes or threads of their own."""
        return

    def close(self) -> None:
        self._module.finish()


class Wandb(Tracker):
    """wandb drops the rows of a step that it has."""

    def _open(self, config: Config) -> str:
        settings = self._module.Settings(
            console="off", silent=True, login_timeout=SECONDS_TO_LOG_IN, init_timeout=SECONDS_TO_ANSWER,
            finish_timeout=SECONDS_TO_ANSWER, finish_timeout_raises=True,
        )  # fmt: skip
        run = self._module.init(
            project=config.tracking.project, name=self._name, config=mask(config.model_dump(mode="json")),
            dir=config.run.folder, id=self._saved, resume=self._saved and "allow", settings=settings,
        )  # fmt: skip
        return str(run.id)


class Trackio(Tracker):
    """trackio knows a run by its name: each has its time in it."""

    def _open(self, config: Config) -> str:
        name = self._saved or f"{self._name}-{time.strftime('%Y%m%d-%H%M%S')}"
        with redirect_stdout(io.StringIO()):
            self._module.init(
                project=config.tracking.project, name=name, config=mask(config.model_dump(mode="json")),
                resume="allow" if self._saved else "never", embed=False, auto_log_cpu=False, auto_log_gpu=False,
            )  # fmt: skip
        return name

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):
            self._module.finish()


class Mlflow(Tracker):
    """MLflow keeps every number, so that no step is logged twice."""

    def _open(self, config: Config) -> str:
        # Of each tag, the last step that MLflow has from earlier starts.
        self._last_steps: dict[str, int] = {}
        self._module.set_experiment(config.tracking.project)
        self._id = str(self._module.start_run(run_id=self._saved, run_name=self._name).info.run_id)
        table = {} if self._saved else dict(flat(mask(config.model_dump(mode="json"))))
        parameters = [(key, str(value)[:MAX_CHARACTERS]) for key, value in table.items()]
        for start in range(0, len(parameters), PARAMETERS_AT_ONCE):
            self._module.log_params(dict(parameters[start : start + PARAMETERS_AT_ONCE]))
        return self._id

    def log(self, row: Mapping[str, float], step: int) -> None:
        new = {tag: number for tag, number in row.items() if step > self._last_step(tag)}
        self._module.log_metrics(new, step=step, synchronous=False)

    def close(self) -> None:
        self._module.flush_async_logging()
        self._module.end_run()

    def _last_step(self, tag: str) -> int:
        if self._saved and tag not in self._last_steps:
            history = self._module.MlflowClient().get_metric_history(self._id, tag)
            self._last_steps[tag] = max((metric.step for metric in history), default=-1)
        return self._last_steps.get(tag, -1)


OPENERS: dict[str, Callable[[Config, int], Logger]] = {
    TENSORBOARD: TensorBoard, "wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio,
}  # fmt: skip

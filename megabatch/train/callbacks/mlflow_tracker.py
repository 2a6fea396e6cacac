"""MLflow. It keeps every number that it is told, so that a resumed run tells it no step twice."""

import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, cast

from megabatch.train.callbacks.tracker import Told

MAX_CHARACTERS, PARAMETERS_AT_ONCE = 500, 100  # of a parameter, and of a call: the least that its stores take


class Mlflow:
    """A run of an experiment, at MLFLOW_TRACKING_URI."""

    def __init__(self, told: Told, saved: str | None) -> None:
        self._client: Any = import_module("mlflow").MlflowClient()
        self._entities: Any = import_module("mlflow.entities")
        self._last: dict[str, int] | None = None if saved is None else {}
        self.id = saved or self._begin(told)
        if saved is not None:
            self._client.update_run(saved, status="RUNNING")

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        now_ms = int(1000 * time.time())
        new = {tag: number for tag, number in scalars.items() if not self._has(tag, step)}
        metrics = [self._entities.Metric(tag, number, now_ms, step) for tag, number in new.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def finish(self) -> None:
        self._client.set_terminated(self.id)

    def _begin(self, told: Told) -> str:
        found = self._client.get_experiment_by_name(told.project)
        experiment = self._client.create_experiment(told.project) if found is None else found.experiment_id
        run = str(self._client.create_run(experiment, run_name=told.name).info.run_id)
        parameters = [self._entities.Param(key, value[:MAX_CHARACTERS]) for key, value in flat(told.recipe)]
        for start in range(0, len(parameters), PARAMETERS_AT_ONCE):
            self._client.log_batch(run, params=parameters[start : start + PARAMETERS_AT_ONCE])
        return run

    def _has(self, tag: str, step: int) -> bool:
        """Whether a resumed run has told that before; asked once for each tag."""
        if self._last is None:
            return False
        if tag not in self._last:
            history = self._client.get_metric_history(self.id, tag)
            self._last[tag] = max((each.step for each in history), default=-1)
        return step <= self._last[tag]


def flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys of a table and of those in it, with their values as text."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from flat(cast(dict[str, Any], value), f"{above}{key}.")
        else:
            yield f"{above}{key}", str(value)

"""Weights & Biases. What it has of a step it keeps: rows that a resumed run makes again are the same, and dropped."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from megabatch.train.callbacks.tracker import Told

SECONDS_TO_LOG_IN = 1.0  # nobody is asked for a key in the middle of a run


class Wandb:
    """A run of wandb, whose files are in the run's own folder, wandb/."""

    def __init__(self, told: Told, saved: str | None) -> None:
        wandb: Any = import_module("wandb")
        self._run: Any = wandb.init(
            project=told.project,
            name=told.name,
            dir=str(told.folder),
            config=dict(told.recipe),
            id=saved,
            resume=None if saved is None else "allow",
            settings=wandb.Settings(console="off", silent=True, login_timeout=SECONDS_TO_LOG_IN),
        )
        self.id = str(self._run.id)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def finish(self) -> None:
        self._run.finish()

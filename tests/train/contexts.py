"""A `RunContext` of parts made by hand, for tests of callbacks and of the loop."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megabatch import Learner
from megabatch.losses import LossFunction
from megabatch.train.config import Config
from megabatch.train.context import RunContext
from megabatch.train.data.updates import Dealing, NumUpdates
from megabatch.train.model.build import ParallelModel
from megabatch.train.parallel.wrap import WrapperChoice
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.heartbeat import Heartbeat
from megabatch.train.runtime.ranks import Ranks
from megabatch.train.runtime.rendezvous import Rendezvous
from megabatch.train.runtime.signals import StopSignal

ALONE = Ranks(0, 1, torch.device("cpu"))
SILENT = Console(enabled=False, loss_digits=4)


def config_of(folder: Path | str = "nowhere", **sections: dict[str, Any]) -> Config:
    given: dict[str, dict[str, Any]] = {
        "model": {"config": {}}, "update": {"global_batch_size": 2, "micro_batch_size": 1}, "run": {},
    }  # fmt: skip
    given["run"]["folder"] = str(folder)
    return Config.model_validate(
        {name: {**given.get(name, {}), **sections.get(name, {})} for name in {**given, **sections}}
    )


def context_of(
    learner: Learner, loss_fn: LossFunction, *, ranks: Ranks = ALONE, config: Config | None = None,
    parallel_model: Any = None, wrapper: str = "plain", num_updates: int | None = None,
) -> RunContext:  # fmt: skip
    """The context of a run whose samples come from elsewhere; it has no callbacks."""
    data: Any = SimpleNamespace(sets={}, counts_tokens=True, epoch_size=None, words=[])
    updates: Any = SimpleNamespace(
        ids=[], names=[], size=0, num_updates=NumUpdates(num_updates, num_updates), dealing=Dealing()
    )
    model = parallel_model or ParallelModel(
        learner.gradient.model, learner.model, WrapperChoice(wrapper, ""), [], [], {}
    )
    return RunContext(
        config or config_of(), ranks, SILENT, StopSignal(speaks=False),
        Heartbeat(Rendezvous(), None), None, data, updates, model, learner, loss_fn,
        None, {},
    )  # fmt: skip

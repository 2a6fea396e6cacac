"""A real run whose checkpoints are damaged again and again, and gone on from: what comes of it, on every rank."""

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megabatch import MegabatchError
from megabatch.train.callbacks.checkpointing import restore
from megabatch.train.checkpoints.retention import resumed_from
from megabatch.train.config.parallel_layout import layout_of
from megabatch.train.config.recipe import load_config
from megabatch.train.context import Callback, Callbacks, RunContext
from megabatch.train.loop import prepare_run, train
from megabatch.train.records.metrics import MetricsFile
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.files import METRICS, read_rows
from megabatch.train.runtime.heartbeat import Heartbeat
from megabatch.train.runtime.ranks import Ranks
from megabatch.train.runtime.rendezvous import Rendezvous
from megabatch.train.runtime.signals import StopSignal
from tests.elastic.damages import KINDS, step_to_expect
from tests.train.conftest import RECIPE, some_pairs, write_pairs

REFUSED, EXACT = "refused in one line", "exact"


@dataclass(frozen=True)
class Trial:
    """The outcome of one damage."""

    kind: str
    outcome: str  # REFUSED, EXACT, or what went wrong
    step: int | None = None  # that it went on from
    newest: int | None = None  # that no byte has changed of


def trials(ranks: Ranks, folder: Path, overrides: list[str], kinds: list[str], seed: int) -> list[Trial]:
    """Train three checkpoints, then damage them in each of these ways in turn; what this rank saw."""
    if ranks.is_main:
        data = write_pairs(folder / "data.jsonl", some_pairs())
        (folder / "recipe.toml").write_text(RECIPE.format(data=data, folder=folder / "run"))
    ranks.barrier()
    given = [f"--data.cache={folder / 'cache'}", "--run.save_every=2", "--run.keep_best=true", *overrides]
    config = load_config(folder / "recipe.toml", given)
    there = Ranks(ranks.rank, ranks.size, ranks.device, layout_of(config.parallel, ranks.size))
    context = prepare_run(config, there, StopSignal(speaks=False), Heartbeat(Rendezvous(), None))
    states: dict[int, Any] = {}
    context.callbacks = Callbacks([Remember(states), *context.callbacks.all])
    train(context)
    if ranks.is_main:
        shutil.copytree(folder / "run", folder / "pristine")
    ranks.barrier()
    resumed = load_config(folder / "recipe.toml", [*given, "--run.resume=true"])
    return [one_trial(context, resumed, states, kind, seed + number, folder) for number, kind in enumerate(kinds)]


class Remember(Callback):
    """Keeps the state after each update."""

    def __init__(self, states: dict[int, Any]) -> None:
        self._states = states

    def after_update(self, context: RunContext) -> None:
        self._states[context.step] = state_of(context)


def one_trial(context: RunContext, config: Any, states: dict[int, Any], kind: str, seed: int, folder: Path) -> Trial:
    """Damage a copy, and go on from it."""
    ranks, newest = context.ranks, None
    if ranks.is_main:
        newest = damage(kind, seed, folder)
    spoil(context)
    ranks.barrier()
    try:
        path = resumed_from(config.run, ranks, Console(enabled=False, loss_digits=4))
        if path is None:
            return Trial(
                kind, REFUSED if newest is None else f"begins anew, from {newest} it could go on", None, newest
            )
        restore(context, path)
    except MegabatchError as error:
        text = str(error)
        fine = "\n" not in text and (newest is None)
        return Trial(kind, REFUSED if fine or not ranks.is_main else f"refused: {text}", None, newest)
    except Exception as error:
        return Trial(kind, f"{type(error).__name__}: {error}", None, newest)
    step = context.learner.step
    wrong = differences(state_of(context), states[step])
    if ranks.is_main:
        wrong += rows_beyond(folder / "run", step)
    ranks.barrier()
    return Trial(kind, ", ".join(wrong) or EXACT, step, newest)


def damage(kind: str, seed: int, folder: Path) -> int | None:
    """Put the run back as it was, and damage it; the newest step that is still whole."""
    shutil.rmtree(folder / "run")
    shutil.copytree(folder / "pristine", folder / "run")
    checkpoints = folder / "run" / "checkpoints"
    KINDS[kind](checkpoints, Random(seed))
    return step_to_expect(checkpoints, folder / "pristine" / "checkpoints")


def rows_beyond(run: Path, step: int) -> list[str]:
    """The rows of the metrics beyond a step to which they were cut."""
    MetricsFile(run, enabled=True, eval_every=2).cut(step)
    rows = [row["step"] for row in read_rows(run / METRICS) if "set" not in row]
    return [] if rows == list(range(1, step + 1)) else ["the metrics do not follow"]


def state_of(context: RunContext) -> dict[str, Any]:
    """All that a run goes on with: copies of this rank's tensors, and everything else by its text."""
    found: dict[str, Any] = {}
    flatten("learner", context.learner.state_dict(), found)
    return found | {"updates": repr(context.updates.state_dict())}


def flatten(name: str, value: Any, found: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key in value:
            flatten(f"{name}.{key}", value[key], found)
    elif isinstance(value, Tensor):
        found[name] = (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
    else:
        found[name] = repr(value)


def differences(now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """Names under which two states differ, by a bit."""
    if now.keys() != then.keys():
        return ["other names"]
    return [f"{name} is wrong" for name in now if not is_equal(now[name], then[name])]


def is_equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def spoil(context: RunContext) -> None:
    """Let nothing be left of the state before: what is not brought back is seen."""

    def fill(value: Any) -> None:
        for part in value.values() if isinstance(value, dict) else ():
            fill(part)
        if isinstance(value, Tensor):
            value.fill_(77)

    with torch.no_grad():
        fill(context.learner.state_dict())


def counts_of(found: list[list[Trial]]) -> dict[str, dict[str, int]]:
    """Count the outcomes of each kind of damage; one that ranks saw differently has none."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for each in zip(*found, strict=True):
        counts[each[0].kind][outcome_of(each)] += 1
    return {kind: dict(sorted(counts[kind].items())) for kind in counts if counts[kind]}


def outcome_of(seen: tuple[Trial, ...]) -> str:
    """The outcome of a damage, as all ranks saw it."""
    if len({(trial.outcome, trial.step) for trial in seen}) > 1:
        return f"the ranks differ: {sorted({f'{trial.outcome} {trial.step}' for trial in seen})}"
    trial = seen[0]
    if trial.outcome != EXACT:
        return trial.outcome
    if trial.newest is not None and (trial.step or 0) < trial.newest:
        return f"older than need be: {trial.step} in place of {trial.newest}"
    return f"goes on from step {trial.step}, exactly"

"""Partial: an update in several calls, so that a signal can stop it between two of them, saved, and it goes on there.

``checkpoints/open`` has what each rank has of it: its sums, its part of the gradient, and the samples that are left. It
belongs to the checkpoint of the update before, and goes on exactly, on as many ranks that are laid out alike; on others
the update begins again, exact too.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megabatch import Learner, MegabatchError, Plan, Term
from megabatch.errors import in_one_line
from megabatch.losses import LossFunction
from megabatch.train.callbacks.ema import local
from megabatch.train.checkpoints.metadata import (
    DIGEST,
    FileDigest,
    Meta,
    describe_conditions,
    digest_of,
    find_changed_file,
    first_difference,
    hash_written_files,
)
from megabatch.train.checkpoints.paths import UNFINISHED, checkpoints_of
from megabatch.train.config import Config
from megabatch.train.data.updates import Updates
from megabatch.train.data.worker_transfer import part_of
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.files import write_synced
from megabatch.train.runtime.ranks import Ranks

MICROBATCHES_A_CALL = 8  # of a rank; in each call gradients are reduced as in an update of its own
OPEN, META = "open", "open.json"
PARTS = ("model_config", "parameters", "data")  # of what makes a run this one, beside its settings
DEALT = "the tokens at which attention counts as much as the rest"  # by which samples were dealt
Call = Callable[[Sequence[Any], int], Mapping[str, Term]]  # adds samples to the open update, as the call of that number
InCalls = Callable[[Sequence[Any], Call], Plan]  # makes the calls of an update; how it was cut


class PausedError(Exception):
    """All ranks stop between two calls of an update."""


@dataclass
class Calls:
    """This rank's samples of every call of an update, and what has become of those that were made."""

    parts: list[list[int]]  # samples of each call, by their places in the update
    num_made: int = 0
    ran: list[list[int]] = field(default_factory=list[list[int]])  # microbatches
    num_split: int = 0  # of them, that did not fit in memory

    def left(self, batch: Sequence[Any]) -> Iterator[tuple[int, Sequence[Any]]]:
        """The number and the samples of each call that is still to be made."""
        for number in range(self.num_made, len(self.parts)):
            yield number, part_of(batch, self.parts[number])

    def note(self, plan: Plan) -> None:
        """Take in how the call that was just made was cut."""
        places = self.parts[self.num_made]
        self.ran += [[places[row] for row in rows] for rows in plan.microbatches]
        self.num_split += plan.num_split
        self.num_made += 1

    @property
    def is_whole(self) -> bool:
        """Whether every call was made."""
        return self.num_made == len(self.parts)

    def as_run(self, plan: Plan) -> Plan:
        """The plan of the whole update, as it was run."""
        return replace(plan, microbatches=tuple(map(tuple, self.ran)), num_split=self.num_split)


class Partial:
    """Makes the calls of an update; saves one that a signal stops inside, and goes on with it.

    Args:
        identity: What makes the run this one; see `keeper.identity_of`.
        is_asked: Whether the run is to stop; collective.
    """

    def __init__(
        self, config: Config, identity: Meta, learner: Learner, loss_fn: LossFunction, updates: Updates, ranks: Ranks,
        console: Console, is_asked: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._is_used = config.checkpoint.partial
        if self._is_used:
            check_config(config)
        self._learner, self._updates, self._ranks, self._console = learner, updates, ranks, console
        self._loss_fn, self._is_asked = loss_fn, is_asked
        self._circumstances = describe_conditions(config, ranks)
        self._identity = {**identity["settings"], **{part: identity[part] for part in PARTS}}
        self._folder = checkpoints_of(Path(config.run.folder)) / OPEN
        self._left: dict[str, Any] = {}  # of the update that a former start of the run has left open
        self._calls = Calls([])
        self._buffers: dict[str, Tensor] = {}  # of the model, before the update

    def run(self, batch: Sequence[Any], call: Call) -> Plan:
        """Make an update's calls; how it was cut. Raises `PausedError` where it is to be saved; collective."""
        gradient = self._learner.gradient
        if not self._is_used:
            call(batch, 0)
            return cast(Plan, gradient.last_plan)
        gradient.tune(batch, self._loss_fn)  # of a stream it may have longer samples than any before
        plan = gradient.plan(batch)
        left, self._left = self._left, {}
        gradient.load_state_dict(left.get("update", {}))
        self._buffers = {name: each.clone() for name, each in self._own_buffers()}
        self._put(left.get("buffers", {}))
        self._calls = calls = Calls(**left["calls"]) if left else calls_of(plan, self._ranks)
        for number, part in calls.left(batch):
            call(part, number)
            calls.note(cast(Plan, gradient.last_plan))
            if not calls.is_whole and self._is_asked():
                raise PausedError
        return calls.as_run(plan)

    @contextlib.contextmanager
    def saving(self) -> Generator[None, None, None]:
        """Surrounds the updates of a run; the one that is stopped inside is saved, and is still to come; collective."""
        try:
            yield
        except PausedError:
            try:
                self._save()
            except MegabatchError as error:
                self._console.warn(f"{error}; the update that was stopped begins again")
                self._forget(self._folder.with_name(OPEN + UNFINISHED))  # which would take the checkpoint's room
            self._put(self._buffers)  # the checkpoint is of the update before
            self._learner.optimizer.zero_grad(set_to_none=True)
            self._updates.give_back()
        else:
            self._forget(self._folder)

    def resume(self) -> None:
        """Take up what was left open after the update that the run goes on from; collective."""
        step = self._learner.step + 1
        problem = self._problem()
        if problem is None:
            with (self._folder / file_of(self._ranks)).open("rb") as file:
                self._left = torch.load(file, map_location="cpu", weights_only=True)
            self._console.say(f"update {step} goes on after {calls_text(Calls(**self._left['calls']))}")
        elif problem:
            self._console.warn(f"update {step} begins again, which was left open: {problem}")

    def _problem(self) -> str | None:
        """Why there is nothing to go on with, "" where nothing was left open; None: there is; collective."""
        problem, meta = json.loads(self._ranks.gather(json.dumps(read_meta(self._folder / META)))[0])
        if not problem and meta and not (self._is_used and meta["step"] == self._learner.step):
            self._forget(self._folder)  # of another update: it would be taken for one of this number later on
            meta = {}
        if problem or not meta:
            return problem
        if (difference := first_difference(meta["made_for"], self._made_for())) is not None:
            key, there, now = difference
            return f"{key} was {there} and is {now}"
        digests = {name: FileDigest(**each) for name, each in meta["files"].items()}
        return find_changed_file(self._folder, digests, self._ranks)

    def _made_for(self) -> dict[str, Any]:
        """What must be the same for the update to go on; as JSON. A call's samples are places in what was dealt.

        The run's identity, too: one that has no checkpoint may be begun again as another one, by another recipe.
        """
        return json.loads(json.dumps({**self._circumstances, DEALT: self._updates.even_tokens, **self._identity}))

    def _own_buffers(self) -> list[tuple[str, Tensor]]:
        """What a forward may move besides; this rank's parts."""
        return [(name, local(each)) for name, each in self._learner.model.named_buffers()]

    def _put(self, buffers: Mapping[str, Tensor]) -> None:
        """Let the model's buffers be these."""
        with torch.no_grad():
            for name, each in self._own_buffers():
                if name in buffers:
                    each.copy_(buffers[name])

    def _forget(self, folder: Path) -> None:
        self._ranks.on_main(lambda: shutil.rmtree(folder, ignore_errors=True), str(folder))

    def _save(self) -> None:
        state = {"update": compact(self._learner.gradient.state_dict()), "calls": asdict(self._calls),
                 "buffers": dict(self._own_buffers())}  # fmt: skip
        here = self._folder.with_name(OPEN + UNFINISHED)

        def begin() -> None:
            shutil.rmtree(here, ignore_errors=True)
            here.mkdir(parents=True)

        def finish() -> None:
            files = {name: each._asdict() for name, each in sums.items()}
            meta = {"step": self._learner.step, "made_for": self._made_for(), "files": files}
            write_synced(here / META, json.dumps({**meta, DIGEST: digest_of(meta)}, indent=1))
            shutil.rmtree(self._folder, ignore_errors=True)
            here.replace(self._folder)

        self._ranks.on_main(begin, str(here))
        problem = problem_of_writing(lambda: torch.save(state, here / file_of(self._ranks)))
        if (told := self._ranks.first_problem(problem)) is not None:
            raise MegabatchError(f"cannot write {here} ({told}); make room for it")
        sums = hash_written_files(here, self._ranks)
        self._ranks.on_main(finish, str(self._folder))
        self._console.say(f"update {self._learner.step + 1} is saved after {calls_text(self._calls)}")


def calls_text(calls: Calls) -> str:
    """How far an update has come."""
    return f"{calls.num_made} of {len(calls.parts)} parts"


def check_config(config: Config) -> None:
    """Raise `MegabatchError` for what does not go together with an update in several calls."""
    if config.parallel.pp > 1:
        raise MegabatchError(
            f"checkpoint.partial is true and parallel.pp is {config.parallel.pp}; an open update of a pipeline cannot "
            "be saved: leave one of them out"
        )
    if config.update.on_nonfinite != "raise":
        raise MegabatchError(
            f'checkpoint.partial is true and update.on_nonfinite is "{config.update.on_nonfinite}", which begins an '
            "update again from where it began; leave one of them out"
        )


def calls_of(plan: Plan, ranks: Ranks) -> Calls:
    """The calls of an update that is to be cut so; as many on every rank. Collective."""
    cut = [rows for rows in plan.microbatches if rows]
    parts = [
        [row for rows in cut[first : first + MICROBATCHES_A_CALL] for row in rows]
        for first in range(0, len(cut), MICROBATCHES_A_CALL)
    ]
    most = max(map(int, ranks.gather(str(len(parts)))))
    return Calls(parts + [[] for _ in range(most - len(parts))])


def compact(state: dict[str, Any]) -> dict[str, Any]:
    """The state with no tensor that is a part of a larger one, all of which a file would hold."""
    gradients = {
        name: each if each.untyped_storage().nbytes() == each.nbytes else each.clone()
        for name, each in state["gradients"].items()
    }
    return {**state, "gradients": gradients}


def file_of(ranks: Ranks) -> str:
    """What a rank writes of an open update."""
    return f"__{ranks.rank}_open.pt"


def problem_of_writing(write: Callable[[], object]) -> str | None:
    """What the system has against it; None where it has written."""
    try:
        write()
    except (OSError, RuntimeError) as error:  # RuntimeError: how torch says that a disk is full
        return in_one_line(error)
    return None


def read_meta(path: Path) -> tuple[str, dict[str, Any]]:
    """What is wrong with the file, "" where nothing is, and what it says; nothing where there is none."""
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "", {}
    except (OSError, ValueError, RecursionError) as error:
        return f"{path.name}: {in_one_line(error)}", {}
    if not isinstance(meta, dict) or meta.get(DIGEST) != digest_of(cast(Meta, meta)):
        return f"{path.name} is not what was written: its SHA-256 is another", {}
    return "", cast(Meta, meta)

"""Make an update in several calls, so that a signal can stop it between two of them, saved, and it is resumed there.

``checkpoints/open`` has what each rank has of it: its sums, its part of the gradient, and the samples that are left. It
belongs to the checkpoint of the update before. The update is resumed exactly on as many ranks with the same layout. On
others it begins again, exact too.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from megabatch import MegabatchError, Plan
from megabatch.errors import in_one_line
from megabatch.train.autotune.sync_policy import MICROBATCHES_A_CALL
from megabatch.train.callbacks.ema import local
from megabatch.train.checkpoints.metadata import (
    FileDigest,
    describe_conditions,
    find_changed_file,
    first_difference,
    hash_written_files,
)
from megabatch.train.checkpoints.paths import OPEN, UNFINISHED, checkpoints_of
from megabatch.train.context import Callback, ForwardBackward, RunContext, UpdatePausedError, check_whole
from megabatch.train.data.updates import part_of
from megabatch.train.runtime.files import read_sealed, sealed_text, write_synced
from megabatch.train.runtime.ranks import Ranks

META = "open.json"
PARTS = ("model_config", "parameters", "data")  # of what makes a run this one, beside its settings
DEALT = "the tokens at which attention counts as much as the rest"  # by which samples were dealt


@dataclass
class Calls:
    """This rank's samples of every call of an update, and the microbatches of the calls made."""

    parts: list[list[int]]  # samples of each call, by their places in the update
    num_made: int = 0
    ran: list[list[int]] = field(default_factory=list[list[int]])  # microbatches
    num_split: int = 0  # of them, that did not fit in memory

    def left(self, batch: Sequence[Any]) -> Iterator[tuple[int, Sequence[Any]]]:
        """Yield the number and the samples of each call that is still to be made."""
        for number in range(self.num_made, len(self.parts)):
            yield number, part_of(batch, self.parts[number])

    def note(self, plan: Plan) -> None:
        """Take in how the call that was just made was cut."""
        places = self.parts[self.num_made]
        self.ran += [[places[row] for row in rows] for rows in plan.microbatches]
        self.num_split += plan.num_split
        self.num_made += 1

    def as_run(self, plan: Plan) -> Plan:
        """Return the plan of the whole update, as it was run."""
        return replace(plan, microbatches=tuple(map(tuple, self.ran)), num_split=self.num_split)


class MidUpdateCheckpoint(Callback):
    """Make an update in several calls, save one that a signal stops inside, and resume it. Collective."""

    splits_updates = True

    def __init__(self, context: RunContext) -> None:
        self._is_used = context.config.checkpoint.partial
        self._identity = {**context.identity["settings"], **{part: context.identity[part] for part in PARTS}}
        self._folder = checkpoints_of(context.folder) / OPEN
        self._left: dict[str, Any] = {}  # of the update that a former start of the run has left open
        self._calls, self._is_paused = Calls([]), False
        self._buffers: dict[str, Tensor] = {}  # of the model, before the update

    def start(self, context: RunContext) -> None:
        """Take up what was left open after the update that the run resumes from."""
        problem = self._problem(context)
        if problem is None:
            with (self._folder / file_of(context.ranks)).open("rb") as file:
                self._left = torch.load(file, map_location="cpu", weights_only=True)
            made = calls_text(Calls(**self._left["calls"]))
            context.console.say(f"update {context.step + 1} resumes after {made}")
        elif problem:
            context.console.warn(f"update {context.step + 1} begins again, which was left open: {problem}")

    def around_backward(self, context: RunContext, batch: Sequence[Any], forward_backward: ForwardBackward) -> None:
        """Make the calls of the update, unless a signal comes between two of them: then save it open."""
        check_whole(context)
        if not self._is_used:
            forward_backward(batch)
            return
        gradient = context.learner.gradient
        with context.model.losses():
            gradient.tune(batch, context.loss_fn)  # a stream may have longer samples than any before
        plan = gradient.plan(batch)
        left, self._left = self._left, {}
        gradient.load_state_dict(left.get("update", {}))
        self._buffers = {name: each.clone() for name, each in own_buffers(context)}
        put_buffers(context, left.get("buffers", {}))
        self._calls = calls = Calls(**left["calls"]) if left else calls_of(plan, context.ranks)
        for number, part in calls.left(batch):
            context.num_calls = number
            forward_backward(part)
            calls.note(context.plan)
            if calls.num_made < len(calls.parts) and context.stop.agree(context.ranks):
                self._pause(context)
        context.plan = calls.as_run(plan)

    def end(self, context: RunContext) -> None:
        """Delete what was left of an earlier update."""
        if not self._is_paused:
            forget(self._folder, context.ranks)

    def _pause(self, context: RunContext) -> NoReturn:
        """Save the open update, and bring the run back to the end of the update before."""
        try:
            self._save(context)
        except MegabatchError as error:
            context.console.warn(f"{error}; the update that was stopped begins again")
            forget(self._folder.with_name(OPEN + UNFINISHED), context.ranks)  # it would take the checkpoint's room
        put_buffers(context, self._buffers)
        context.learner.optimizer.zero_grad(set_to_none=True)
        context.updates.give_back()
        self._is_paused = True
        raise UpdatePausedError

    def _problem(self, context: RunContext) -> str | None:
        """Return why nothing can be resumed, "" if nothing was left open, None if it can be resumed."""
        problem, meta = context.ranks.broadcast(read_meta(self._folder / META))
        if not problem and meta and not (self._is_used and meta["step"] == context.step):
            forget(self._folder, context.ranks)  # of another update: it would be taken for one of this number later on
            meta = {}
        if problem or not meta:
            return problem
        if (difference := first_difference(meta["made_for"], self._made_for(context))) is not None:
            key, there, now = difference
            return f"{key} was {there} and is {now}"
        files = {name: FileDigest(**each) for name, each in meta["files"].items()}
        return find_changed_file(self._folder, files, context.ranks)

    def _made_for(self, context: RunContext) -> dict[str, Any]:
        """Return what must be the same for the update to be resumed; as JSON.

        A call's samples are places in what was dealt. The run's identity counts too: a run without a checkpoint may
        start again with another recipe.
        """
        here = describe_conditions(context.config, context.ranks)
        return json.loads(json.dumps({**here, DEALT: context.updates.even_tokens, **self._identity}))

    def _save(self, context: RunContext) -> None:
        ranks, update = context.ranks, context.learner.gradient.state_dict()
        update["gradients"] = {  # a file would hold all of the larger tensor that one is a part of
            name: each if each.untyped_storage().nbytes() == each.nbytes else each.clone()
            for name, each in update["gradients"].items()
        }
        state = {"update": update, "calls": asdict(self._calls), "buffers": dict(own_buffers(context))}
        here, made_for = self._folder.with_name(OPEN + UNFINISHED), self._made_for(context)

        def begin() -> None:
            shutil.rmtree(here, ignore_errors=True)
            here.mkdir(parents=True)

        def finish() -> None:
            files = {name: each._asdict() for name, each in sums.items()}
            meta = {"step": context.step, "made_for": made_for, "files": files}
            write_synced(here / META, sealed_text(meta))
            shutil.rmtree(self._folder, ignore_errors=True)
            here.replace(self._folder)

        ranks.on_main(begin, str(here))
        problem = None
        try:
            torch.save(state, here / file_of(ranks))
        except (OSError, RuntimeError) as error:  # RuntimeError: how torch says that a disk is full
            problem = in_one_line(error)
        if (told := ranks.first_problem(problem)) is not None:
            raise MegabatchError(f"cannot write {here} ({told}); make room for it")
        sums = hash_written_files(here, ranks)
        ranks.on_main(finish, str(self._folder))
        context.console.say(f"update {context.step + 1} is saved after {calls_text(self._calls)}")


def own_buffers(context: RunContext) -> list[tuple[str, Tensor]]:
    """Return this rank's parts of the model's buffers, which a forward may change."""
    return [(name, local(each)) for name, each in context.learner.model.named_buffers()]


def put_buffers(context: RunContext, buffers: Mapping[str, Tensor]) -> None:
    """Let the model's buffers be these."""
    with torch.no_grad():
        for name, each in own_buffers(context):
            if name in buffers:
                each.copy_(buffers[name])


def forget(folder: Path, ranks: Ranks) -> None:
    """Delete the folder of an open update. Collective."""
    ranks.on_main(lambda: shutil.rmtree(folder, ignore_errors=True), str(folder))


def calls_text(calls: Calls) -> str:
    """Format how many calls of an update were made."""
    return f"{calls.num_made} of {len(calls.parts)} parts"


def calls_of(plan: Plan, ranks: Ranks) -> Calls:
    """Return the calls of an update with this plan, as many on every rank. Collective."""
    cut = [rows for rows in plan.microbatches if rows]
    parts = [
        [row for rows in cut[first : first + MICROBATCHES_A_CALL] for row in rows]
        for first in range(0, len(cut), MICROBATCHES_A_CALL)
    ]
    most = max(ranks.gather(len(parts)))
    return Calls(parts + [[] for _ in range(most - len(parts))])


def file_of(ranks: Ranks) -> str:
    """Return the name of the file that a rank writes of an open update."""
    return f"__{ranks.rank}_open.pt"


def read_meta(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the fault of the file, "" without one, and its content, empty without a file."""
    try:
        return "", read_sealed(path)
    except FileNotFoundError:
        return "", {}
    except ValueError as error:
        return f"{path.name}: {error}", {}

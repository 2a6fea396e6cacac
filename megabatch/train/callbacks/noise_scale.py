"""Advice: the noise of the gradient, measured as the run goes, for whoever chooses the size of its updates.

Every so many updates one is made in two calls, of two halves of its samples that a coin has drawn: the norm of the
gradient between them and that of all of it tell the noise, see `noise.py`. What is stepped is the update's exact
gradient, as ever.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from torch import nn
from torch.distributed.tensor import DTensor

from megabatch import Learner, MegabatchError, Plan
from megabatch.losses import LossFunction, loss_hooks
from megabatch.train.callbacks.metrics import Row, read_rows
from megabatch.train.callbacks.noise_estimate import Measured, Scale, Sum, measured, words_of
from megabatch.train.callbacks.nonfinite import Made
from megabatch.train.callbacks.nonfinite_search import LARGEST_NORM
from megabatch.train.checkpoints.mid_update import Call, Calls, InCalls
from megabatch.train.config import Config
from megabatch.train.runtime.ranks import Ranks

NOISE, SIGNAL, SCALE = "gradient_noise", "gradient_signal", "noise_scale_samples"  # of an update's row


class HandedOut(Protocol):
    """The update that was handed out last."""

    @property
    def ids(self) -> Sequence[int | str]:
        """Of this rank's samples."""
        ...

    @property
    def size(self) -> int:
        """Samples that it should have, over all ranks."""
        ...


class Advice:
    """Makes updates in calls, as `Partial` does, and measures some of them.

    Args:
        in_calls: Makes those that are not measured.
    """

    def __init__(
        self,
        config: Config,
        learner: Learner,
        loss_fn: LossFunction,
        updates: HandedOut,
        ranks: Ranks,
        in_calls: InCalls,
    ) -> None:
        check_advice(config)
        self._every, self._seed = config.advice.every, config.run.seed
        self._learner, self._loss_fn, self._updates, self._ranks = learner, loss_fn, updates, ranks
        self._in_calls, self._max_norm = in_calls, learner.max_norm
        self._parameters = [each for each in learner.model.parameters() if each.requires_grad]  # FSDP2's shards
        self._part: Sum | None = None  # of the update that is open
        self._scale = Scale()
        self._size = 0  # of the last update that was measured
        self._has_one_term = False  # once it is known

    def run(self, batch: Sequence[Any], call: Call) -> Plan:
        """Make an update's calls; how it was cut. Collective."""
        self._part, self._learner.max_norm = None, self._max_norm
        if self._every is None:
            return self._in_calls(batch, call)
        if (self._learner.step + 1) % self._every:
            plan = self._in_calls(batch, call)
            self._check_terms()
            return plan
        self._learner.max_norm = self._max_norm or LARGEST_NORM  # the norm is looked at
        return self._in_halves(batch, call)

    def _in_halves(self, batch: Sequence[Any], call: Call) -> Plan:
        gradient = self._learner.gradient
        gradient.tune(batch, self._loss_fn)  # by all samples, as ever
        plan, calls = gradient.plan(batch), Calls(halves(self._updates.ids, self._seed, self._learner.step + 1))
        for number, part in calls.left(batch):
            terms = call(part, number)
            calls.note(cast(Plan, gradient.last_plan))
            if number == 0:
                self._check_terms()
                self._part = self._sum_of(terms)
        return calls.as_run(plan)

    def _sum_of(self, terms: Mapping[str, Any]) -> Sum:
        """What is accumulated now, of all ranks."""
        names = self._names()
        (weight,) = self._ranks.sum_of_data([float(terms[name].weight) for name in names[:1]] or [0.0])
        norm = norm_of(self._parameters)
        divided = loss_hooks(self._loss_fn).weigh is not None  # before the backward, by the weight of the call
        return Sum((norm if divided else norm / weight) ** 2 if weight else 0.0, weight)

    def row(self, made: Made) -> Row:
        """What an update's row has of it besides; empty unless it was measured."""
        update, part, self._part = made.update, self._part, None
        if part is None or made.is_skipped or update.grad_norm is None:
            return {}
        found = measured(part, Sum(float(update.grad_norm) ** 2, float(update.weight)), update.num_samples)
        if found is None:
            return {}
        self._scale.add(found)
        self._size = self._updates.size  # not that of a short tail
        scale = {} if self._scale.samples is None else {SCALE: self._scale.samples}
        return {NOISE: found.noise, SIGNAL: found.signal, **scale}

    def resume(self, path: Path) -> None:
        """Go on after the rows of the run that the file has; collective."""
        if self._every is None:
            return
        rows = read_rows(path) if self._ranks.is_main else []
        mine = [[row[NOISE], row[SIGNAL]] for row in rows if NOISE in row]
        self._scale, self._size = Scale(), self._updates.size
        for noise, signal in json.loads(self._ranks.gather(json.dumps(mine))[0]):
            self._scale.add(Measured(noise, signal))

    def words(self) -> list[str]:
        """What is to be said at the end of a run."""
        return words_of(self._scale.recent(), self._size)

    def _check_terms(self) -> None:
        """Raise where a gradient is of several sums with a weight each, which is not one sum over one weight."""
        if self._has_one_term:
            return
        names = self._names()
        self._has_one_term = len(names) == 1
        if len(names) > 1:
            raise MegabatchError(
                f"advice.every is set and the loss has the terms {', '.join(names)}, each with a weight of its own, of "
                "which the gradient has no one noise scale; leave advice.every out"
            )

    def _names(self) -> list[str]:
        """Of the terms that have carried a gradient; waits for the device."""
        opened = self._learner.gradient.open_update
        return [] if opened is None else opened.state_dict()["differentiable"]


def norm_of(parameters: Sequence[nn.Parameter]) -> float:
    """The norm of their gradients, over all shards. Waits for the device."""
    norm = nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def halves(ids: Sequence[int | str], seed: int, step: int) -> list[list[int]]:
    """The places of this rank's samples in the first half and in the second, as a coin of each sample falls.

    It falls the same on any number of ranks. Samples are drawn whatever they are, and by themselves: halves of one size
    on each rank would be drawn from what was dealt by length.
    """
    coins = [hashlib.sha256(f"{seed} {step} {each}".encode("utf-8", "surrogateescape")).digest()[0] & 1 for each in ids]
    return [[place for place, coin in enumerate(coins) if coin == half] for half in (0, 1)]


def check_advice(config: Config) -> None:
    """Raise `MegabatchError` for what does not go together with measured updates."""
    if config.advice.every is None:
        return
    given = {
        "parallel.tp": (config.parallel.tp > 1, "whose ranks hold parts of one gradient"),
        "parallel.cp": (config.parallel.cp > 1, "whose ranks hold stretches of one sample"),
        "parallel.pp": (config.parallel.pp > 1, "whose stages have a gradient each"),
        "checkpoint.partial": (config.checkpoint.partial, "which makes the calls of an update itself"),
        "update.on_nonfinite": (
            config.update.on_nonfinite == "skip_microbatch", "which makes an update again of some of its samples"
        ),
        "model.dtype": (config.model.dtype == "bfloat16", "in which a norm has two digits"),
    }  # fmt: skip
    for key, (is_given, why) in given.items():
        if is_given:
            section, _, name = key.partition(".")
            raise MegabatchError(
                f"advice.every is {config.advice.every} and {key} is {getattr(getattr(config, section), name)}, {why}; "
                "leave one of them out"
            )

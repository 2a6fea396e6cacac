"""The noise of a gradient, where it is known: least squares in float64, its samples drawn anew for every update."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megabatch import GradientAccumulator, Learner, loss
from megabatch.core.contract import LossFunction
from megabatch.train.callbacks.noise_scale import (
    NOISE,
    SCALE,
    SIGNAL,
    Measured,
    NoiseScale,
    Scale,
    Sum,
    error_of,
    estimate,
    halves,
    measure_noise,
    rounded,
    words_of,
)
from megabatch.train.context import Callbacks, RunContext
from megabatch.train.loop import make_update
from tests.train.conftest import NO_DROPOUT, Bench, timeless
from tests.train.contexts import config_of, context_of
from tests.train.test_metrics import events

NUM_FEATURES, SIGMA, OFF = 12, 1.0, 0.08  # the noise of a target, and how far each weight is from what made the data
NUM_SAMPLES, NUM_UPDATES = 48, 300
LENGTHS = np.arange(1, 21)  # targets of a sample, each as likely
Sample = dict[str, Tensor]
Draw = Callable[[torch.Generator], Sample]


def of_tokens(draw: torch.Generator) -> Sample:
    """Targets that know nothing of each other."""
    x = torch.randn(length_of(draw), NUM_FEATURES, generator=draw, dtype=torch.float64)  # [T, features]
    return sample_of(x, torch.randn(len(x), generator=draw, dtype=torch.float64), 0.0)


def of_one(draw: torch.Generator) -> Sample:
    """Targets of a sample that are all the same."""
    x = torch.randn(1, NUM_FEATURES, generator=draw, dtype=torch.float64).expand(length_of(draw), -1)  # [T, features]
    return sample_of(x, torch.randn(1, generator=draw, dtype=torch.float64).expand(len(x)), 0.0)


def by_length(draw: torch.Generator) -> Sample:
    """Short samples say that weights are right, or even too low, and long ones say that they are too high."""
    x = torch.randn(length_of(draw), NUM_FEATURES, generator=draw, dtype=torch.float64)  # [T, features]
    noise = torch.randn(len(x), generator=draw, dtype=torch.float64)
    return sample_of(x, noise, 4 * OFF * (1 - len(x) / LENGTHS.mean()))


def length_of(draw: torch.Generator) -> int:
    return int(LENGTHS[int(torch.randint(len(LENGTHS), (), generator=draw))])


def sample_of(x: Tensor, noise: Tensor, made_by: float) -> Sample:
    """A sample of weights that are all ``made_by``, and not those that the model has, which are all OFF."""
    return {"x": x, "y": x.sum(1) * made_by + SIGMA * noise}


ANSWERS = SIGMA**2 + NUM_FEATURES * OFF**2
A_TARGET = NUM_FEATURES * ANSWERS + NUM_FEATURES * OFF**2  # tr of the covariance of a target's gradient x (x d - noise)
TRUTHS = {  # tr(Sigma) of a sample, |G|^2
    of_tokens: (A_TARGET / LENGTHS.mean(), NUM_FEATURES * OFF**2),
    of_one: (A_TARGET * (LENGTHS**2).mean() / LENGTHS.mean() ** 2, NUM_FEATURES * OFF**2),
}


@loss(weigh=lambda microbatch: (microbatch["y"] != 0).sum())  # padding is 0
def squares(model: Any, microbatch: Sample) -> tuple[Tensor, Any]:
    error = model(microbatch["x"]).squeeze(-1) - microbatch["y"]
    return error.square().sum() / 2, (microbatch["y"] != 0).sum()


def unweighed(model: Any, microbatch: Sample) -> tuple[Tensor, Any]:
    return squares(model, microbatch)


class Machine:
    """The real accumulator and what measures it, at weights that stay where they are."""

    def __init__(self, loss_fn: LossFunction = squares, max_norm: float | None = 1.0) -> None:
        self.model = nn.Linear(NUM_FEATURES, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(self.model.weight, OFF)
        gradient = GradientAccumulator(self.model, max_microbatch_tokens=240)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.learner = Learner(self.model, optimizer, gradient, max_norm=max_norm)
        self.context = context_of(self.learner, loss_fn, config=config_of(advice={"every": 1}))
        self.context.callbacks = Callbacks([NoiseScale(self.context)])

    def update(self, batch: list[Sample]) -> tuple[RunContext, dict[str, Any]]:
        """An update that is measured; what became of it, and its part of a row."""
        first = self.learner.step * NUM_SAMPLES
        updates: Any = self.context.updates
        updates.ids = list(range(first, first + len(batch)))
        make_update(self.context, batch)
        return self.context, self.context.row


def many(draw: Draw) -> Iterator[tuple[Measured, list[Sample], RunContext]]:
    """Measurements by halves that a coin has drawn, each with the samples of its update and what became of it."""
    machine, random = Machine(), torch.Generator().manual_seed(1)
    for _ in range(NUM_UPDATES):
        batch = [draw(random) for _ in range(NUM_SAMPLES)]
        made, row = machine.update(batch)
        yield Measured(row["gradient_noise"], row["gradient_signal"]), batch, made


def by_first_microbatch(batch: list[Sample], made: RunContext) -> Measured:
    """The measurement by the first microbatch of an update alone."""
    whole = Sum(float(made.update.grad_norm) ** 2, float(made.update.weight))
    first = [batch[index] for index in made.learner.gradient.plan(batch).microbatches[0]]
    return measure_noise(sum_of(first), whole, NUM_SAMPLES)


def sum_of(samples: list[Sample]) -> Sum:
    """The gradient of some samples, by hand."""
    x, y = (torch.cat([sample[key] for sample in samples]) for key in ("x", "y"))
    gradient = ((x.sum(1) * OFF - y)[:, None] * x).sum(0) / len(y)  # [features]
    return Sum(float(gradient.square().sum()), len(y))


@pytest.mark.parametrize(
    "draw", [of_tokens, pytest.param(of_one, marks=pytest.mark.full)], ids=lambda draw: draw.__name__
)
def test_estimates_are_right_on_average(draw: Draw) -> None:
    """Within four of their own standard errors, which are small."""
    found = [measured for measured, _, _ in many(draw)]
    for values, truth, precise in zip(zip(*found, strict=True), TRUTHS[draw], (1 / 8, 1 / 3), strict=True):
        error = error_of(values)
        assert error < precise * truth
        assert abs(np.mean(values) - truth) < 4 * error
    told = estimate(found)
    scale = TRUTHS[draw][0] / TRUTHS[draw][1]
    assert abs(told.samples - scale) < 4 * told.error < 2 * scale


def test_a_microbatch_is_no_random_part() -> None:
    """Cut by length, it has a gradient of its own where lengths and gradients go together. Halves of a coin do not."""
    measured = [(found, by_first_microbatch(batch, made)) for found, batch, made in many(by_length)]
    found, naive = zip(*measured, strict=True)
    random = torch.Generator().manual_seed(2)
    samples = [by_length(random) for _ in range(12_000)]
    totals = torch.stack([(each["x"].sum(1) * OFF - each["y"]) @ each["x"] for each in samples])  # [N, features]
    weights = torch.tensor([len(each["y"]) for each in samples], dtype=torch.float64)  # [N]
    gradient = totals.sum(0) / weights.sum()
    residuals = totals - weights[:, None] * gradient
    truths = (float(residuals.square().sum(1).mean() / weights.mean() ** 2), float(gradient.square().sum()))
    for values, others, truth in zip(zip(*found, strict=True), zip(*naive, strict=True), truths, strict=True):
        assert abs(np.mean(values) - truth) < 4 * error_of(values)
        assert abs(np.mean(others) - truth) > 20 * error_of(others)


@pytest.mark.parametrize("loss_fn", [squares, unweighed])
@pytest.mark.parametrize("max_norm", [1.0, None])
def test_the_gradient_is_that_of_the_whole_update(loss_fn: LossFunction, max_norm: float | None) -> None:
    machine, random = Machine(loss_fn, max_norm), torch.Generator().manual_seed(3)
    batch = [of_tokens(random) for _ in range(NUM_SAMPLES)]
    made, row = machine.update(batch)
    x, y = (torch.cat([sample[key] for sample in batch]) for key in ("x", "y"))
    weight = machine.model.weight.detach().clone().requires_grad_()
    ((x @ weight[0] - y).square().sum() / 2 / len(y)).backward()
    expected = weight.grad * min(1.0, (max_norm or math.inf) / (float(weight.grad.norm()) + 1e-6))
    assert float((machine.model.weight.grad - expected).norm() / expected.norm()) < 1e-12
    assert float(made.update.grad_norm) == pytest.approx(float(weight.grad.norm()), rel=1e-12)
    assert sorted(index for rows in made.plan.microbatches for index in rows) == list(range(NUM_SAMPLES))
    first = [batch[place] for place in halves(range(NUM_SAMPLES), 0, 1)[0]]
    by_hand = measure_noise(sum_of(first), sum_of(batch), NUM_SAMPLES)
    assert [row["gradient_noise"], row["gradient_signal"]] == pytest.approx(list(by_hand), rel=1e-9)


def test_two_norms_give_both_unknowns() -> None:
    """Parts are just as the expectation says: |G|^2 is 3 and a target's noise 10."""
    part, whole = (Sum(3 + 10 / weight, weight) for weight in (3.0, 12.0))
    assert measure_noise(part, whole, 4) == pytest.approx((10 * 4 / 12, 3))


def test_a_coin_falls_by_itself_for_each_sample_and_update() -> None:
    one, two = halves(range(1000), 0, 1), halves(range(1000), 0, 2)
    assert sorted(one[0] + one[1]) == list(range(1000))
    both = len(set(one[0]) & set(two[0]))
    assert all(abs(number - mean) < 4 * 16 for number, mean in ((len(one[0]), 500), (len(two[0]), 500), (both, 250)))
    shares = [list(range(rank, 1000, 3)) for rank in range(3)]
    dealt = [share[place] for share in shares for place in halves(share, 0, 1)[0]]
    assert sorted(dealt) == one[0]


def test_a_half_that_is_nothing_or_all_tells_nothing() -> None:
    whole = Sum(4.0, 10.0)
    parts = [Sum(0.0, 0.0), whole, Sum(math.inf, 5.0), Sum(math.nan, 5.0)]
    assert [measure_noise(each, whole, 3) for each in parts] == [None] * 4
    machine = Machine()
    _, row = machine.update([of_tokens(torch.Generator().manual_seed(4))])
    assert row == {}


def test_the_scale_is_a_quotient_of_means() -> None:
    """Not the mean of quotients, which one signal near zero would rule."""
    scale = Scale()
    for each in [Measured(100.0, 1.0), Measured(100.0, 1e-6), Measured(100.0, 2.0)]:
        scale.add(each)
    assert scale.samples == pytest.approx(100 * (0.81 + 0.9 + 1) / (0.81 + 0.9e-6 + 2))
    assert Scale().samples is None
    scale.add(Measured(1.0, -99.0))
    assert scale.samples is None


def test_words_say_no_more_than_is_known() -> None:
    draw = np.random.default_rng(0)
    clear = [Measured(484 + 10 * a, 1 + 0.01 * b) for a, b in draw.normal(size=(20, 2))]
    lines = words_of(clear, 64)
    assert lines[0].startswith("gradients agree up to some 480 samples an update, give or take ")
    assert lines[0].endswith(", by the last 20 measurements of their noise (docs/batch-size.md)")
    assert lines[1].startswith("updates had 64: with twice as many each step goes almost twice as far, if the learning")
    assert words_of(clear, 5000)[1].endswith("with half as many each step goes almost as far")
    assert words_of(clear, 400)[1].endswith("about where more samples an update begin to cost more than they bring")
    vague = [Measured(480.0, b) for b in draw.normal(size=20)]
    assert words_of(vague, 64)[0].startswith("gradients agree up to more than ")
    assert words_of(clear[:3], 64) == []
    numbers = {0.0123: "0.012", 1.26: "1.3", 15.2: "15", 1234.0: "1,200", 87654.0: "88,000"}
    assert {number: rounded(number) for number in numbers} == numbers


Refuse = Callable[..., str]
EVERY: dict[str, Any] = {"advice__every": 2, "run__max_epochs": 2}  # six updates of twelve
UNWEIGHED = """
from megabatch import losses

def next_token(model, microbatch):
    return losses.next_token(model, microbatch)
"""
TWO_TERMS = """
import megabatch
from megabatch import losses

def weights(microbatch):
    weight = (microbatch["labels"][:, 1:] != -100).sum()
    return {"one": weight, "other": weight}

@megabatch.loss(weigh=weights)
def loss(model, microbatch):
    pair = losses.next_token(model, microbatch)
    return {"one": pair, "other": pair}
"""


def measured(rows: list[dict[str, Any]]) -> list[float]:
    """The numbers of the updates that were measured."""
    return [row[key] for row in rows if NOISE in row for key in (NOISE, SIGNAL)]


@pytest.mark.slow
def test_measured_updates_are_the_same_updates(bench: Bench, tmp_path: Path) -> None:
    """Without them and with them, with a loss that does not tell its weight before, and where nothing is clipped."""
    plain, unweighed, unclipped = (tmp_path / name for name in ("plain", "unweighed", "unclipped"))
    bench.train(run__folder=plain, run__max_epochs=2, **NO_DROPOUT)
    said = bench.train(**EVERY, **NO_DROPOUT)
    assert "plan  the gradient's noise is measured every 2 updates (advice.every)" in said
    assert bench.losses() == pytest.approx(bench.losses(plain), rel=1e-10)
    rows = [row for row in bench.rows() if "loss" in row]
    assert [row["step"] for row in rows if NOISE in row] == [2, 4, 6, 8, 10, 12]
    assert not any(key in row for row in bench.rows(plain) for key in (NOISE, SIGNAL, SCALE))
    assert said.count("measurements of their noise (docs/batch-size.md)") == 0  # the last three are too few
    assert [value for _, value in events(bench.folder)[f"train/{NOISE}"]] == pytest.approx(
        measured(rows)[::2], rel=1e-6
    )
    (tmp_path / "own.py").write_text(UNWEIGHED)
    own = f"{tmp_path}/own.py:next_token"
    bench.train(run__folder=unweighed, run__max_steps=4, loss__function=own, **EVERY, **NO_DROPOUT)
    assert measured(bench.rows(unweighed)) == pytest.approx(measured(rows)[:4], rel=1e-8)
    bench.train(run__folder=unclipped, run__max_steps=2, update__max_norm="none", **EVERY, **NO_DROPOUT)
    first, second = (row for row in bench.rows(unclipped) if "loss" in row)
    assert first["grad_norm"] is None
    assert second["grad_norm"] is not None


@pytest.mark.slow
def test_a_stopped_run_measures_as_if_never_stopped(bench: Bench, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    often = {"advice__every": 1, "run__max_epochs": 2}
    said = bench.train(run__folder=whole, **often)
    for last in (3, 5, None):
        stop = {} if last is None else {"run__max_steps": last}
        told = bench.train(run__resume=last != 3, **stop, **often)
    assert timeless(bench.rows()) == timeless(bench.rows(whole))
    lines = [line for line in said.splitlines() if "gradients agree" in line or line.startswith("updates ")]
    assert len(lines) == 2
    assert lines == [line for line in told.splitlines() if "gradients agree" in line or line.startswith("updates ")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "wrapper"),
    [(2, {"wrapper": "ddp"}), (3, {"wrapper": "fsdp2"}), (4, {"wrapper": "fsdp2", "dp_replicate": 2, "dp_shard": 2})],
    ids=["ddp", "fsdp2", "hsdp"],
)
def test_ranks_measure_what_one_does(bench: Bench, tmp_path: Path, ranks: int, wrapper: dict[str, Any]) -> None:
    alone = tmp_path / "alone"
    bench.train(run__folder=alone, run__max_steps=4, **EVERY, **NO_DROPOUT)
    parallel = {f"parallel__{key}": value for key, value in wrapper.items()}
    bench.train(ranks=ranks, run__max_steps=4, **parallel, **EVERY, **NO_DROPOUT)
    assert len(measured(bench.rows())) == 4
    assert measured(bench.rows()) == pytest.approx(measured(bench.rows(alone)), rel=1e-8)
    assert bench.losses() == pytest.approx(bench.losses(alone), rel=1e-10)


@pytest.mark.slow
def test_what_cannot_be_measured_is_refused(bench: Bench, refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "terms.py").write_text(TWO_TERMS)
    finished = bench.finish(advice__every=2, loss__function=f"{tmp_path}/terms.py:loss")
    assert [(each.status, each.err) for each in finished] == [
        (
            2,
            "megabatch: advice.every is set and the loss has the terms one, other, each with a weight of its own, of "
            "which the gradient has no one noise scale; leave advice.every out\n",
        )
    ]

"""What a plan counts: large vocabularies, an average of the weights, a wrapper without others."""

from pathlib import Path

import pytest

from megabatch.train.plan.estimate import estimate_cost
from megabatch.train.plan.search import CERTAIN, SIMULATION, open_runner
from tests.train.test_plan import planned, recipe, subject

__all__ = ["recipe"]

pytestmark = pytest.mark.slow


def test_a_large_vocabulary_is_counted_by_the_chunks_that_are_there_at_once(recipe: Path) -> None:
    what = subject(recipe, 2, parallel__wrapper="fsdp2", model__config__vocab_size=2**16)
    with open_runner(what, 2**40) as run:
        rows = run([choice for choice in what.grid.choices() if choice.fused])
    for row in rows:
        guess = estimate_cost(row.choice, what.sizes, what.sample.length_tokens, what.device)
        assert guess.peak_bytes * CERTAIN <= row.peak_bytes


def test_an_average_of_the_weights_is_counted(recipe: Path) -> None:
    values = {"parallel__wrapper": "fsdp2", "model__config__hidden_size": 256}
    without, with_it = (planned(recipe, 2, **values, **more) for more in ({}, {"optim__ema_decay": 0.99}))
    of_parameters = 4 * subject(recipe, 2, **values).sizes.num_parameters / 2
    for a, b in zip(without, with_it, strict=True):
        if a.by == b.by == SIMULATION:
            assert b.peak_bytes - a.peak_bytes == pytest.approx(of_parameters, rel=0.05)
    assert any(row.by == SIMULATION for row in without)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_a_wrapper_on_one_rank_sends_nothing(recipe: Path, wrapper: str) -> None:
    rows = planned(recipe, 1, parallel__wrapper=wrapper)
    assert {row.sent_bytes for row in rows if row.by == SIMULATION} == {0}

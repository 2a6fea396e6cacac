"""Checks of the trainer, by runs whose every step is noted. A check raises where a run is wrong."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.trainer.runs import EMA, NUM_HELD_OUT, SIZE, Ranks, Run, evaluate, own, plain_loop

CLOSE = 1e-9
CHECKS: dict[str, tuple[int, Callable[[Ranks], None]]] = {}  # by name: on how many ranks, and what


def check(world: int = 1) -> Callable[[Callable[[Ranks], None]], Callable[[Ranks], None]]:
    def add(function: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
        CHECKS[function.__name__] = (world, function)
        return function

    return add


def close(found: float, expected: float, what: object) -> None:
    assert found is not None, what
    assert math.isclose(found, expected, rel_tol=CLOSE), (what, found, expected)


def good(run: Run) -> Run:
    assert set(run.status) == {0}, (run.folder / "log0").read_text()[-3000:]
    return run


def same_weights(run: Run, step: int, expected: dict[str, Any]) -> None:
    for name, found in run.weights(step).items():
        assert (found - expected[name]).abs().max() <= CLOSE * expected[name].abs().max(), (step, name)


@check()
def updates_are_those_of_a_plain_loop(ranks: Ranks) -> None:
    """The loss, the norm before it is clipped, the learning rate and the weights of every update."""
    run = good(ranks.train())
    expected, rows = plain_loop(run.updates()), run.rows()
    assert len(rows) == len(expected) == 8
    for step, (row, update) in enumerate(zip(rows, expected, strict=True), start=1):
        assert row["step"] == step
        for key in ("loss", "grad_norm", "lr"):
            close(row[key], getattr(update, key), (step, key))
        same_weights(run, step, update.weights)


@check()
def numbers_are_those_of_the_samples(ranks: Ranks) -> None:
    """Tokens, targets, padding and throughput, by a clock that counts forwards alone."""
    run = good(ranks.train())
    samples = own().samples()
    for row, numbers, update in zip(run.rows(), run.updates(), plain_loop(run.updates()), strict=True):
        assert row["num_samples"] == len(numbers)
        assert row["num_tokens"] == update.num_tokens
        assert row["num_target_tokens"] == row["weight"] == update.num_target_tokens
        close(row["tokens_per_second"], update.num_tokens / row["num_microbatches"], "tokens/s")
    forwards = [note for note in run.notes() if note["kind"] == "forward" and note["training"] and note["grad"]]
    lengths = [[len(samples[number]["input_ids"]) for number in note["numbers"]] for note in forwards]
    first = run.rows()[0]
    padded = sum(len(each) * max(each) for each in lengths[: first["num_microbatches"]])
    close(first["padding"], 1 - first["num_tokens"] / padded, "padding")


@check()
def every_sample_comes_once_an_epoch(ranks: Ranks) -> None:
    """None that is held out is trained on, and the rest of an epoch is an update of its own."""
    run = good(ranks.train(update__tail="step", run__max_steps=10))
    held_out = run.evaluated()
    assert len(held_out) == NUM_HELD_OUT
    trained = set(range(own().NUM_SAMPLES)) - held_out
    per_epoch = -(-len(trained) // SIZE)
    epochs = [run.updates()[place : place + per_epoch] for place in (0, per_epoch)]
    for updates in epochs:
        assert Counter(number for update in updates for number in update) == Counter(trained)
        assert [len(update) for update in updates] == [SIZE] * (per_epoch - 1) + [len(trained) % SIZE]
    assert epochs[0] != epochs[1], "each epoch is shuffled"
    assert [row["epoch"] for row in run.rows()][per_epoch - 1] == 1.0


@check()
def tails_are_as_asked(ranks: Ranks) -> None:
    run = good(ranks.train(update__tail="drop", run__max_steps=6))
    assert [len(update) for update in run.updates()] == [SIZE] * 6


@check()
def seeds_decide_the_order(ranks: Ranks) -> None:
    """All samples are trained on, since those held out depend on the seed too."""
    values = {"eval__num_samples": 0, "run__max_steps": 3}
    first, again, other = (good(ranks.train(run__seed=seed, **values)).updates() for seed in (0, 0, 1))
    assert first == again
    assert first != other


@check()
def evaluations_are_exact(ranks: Ranks) -> None:
    """They are of the average of the weights, in turn, and leave the model and its modes as they were."""
    run = good(ranks.train(optim__ema_decay=EMA, run__max_steps=5))
    expected = plain_loop(run.updates())
    rows, held_out = run.evaluations(), run.evaluated()
    assert [row["step"] for row in rows] == [0, 2, 4, 5]
    for row in rows[1:]:
        loss, accuracy, count = evaluate(expected[row["step"] - 1].average, held_out)
        close(row["eval_loss"], loss, row["step"])
        close(row["eval_perplexity"], math.exp(loss), row["step"])
        close(row["eval_accuracy"] + 1, accuracy + 1, row["step"])
        assert row["num_target_tokens"] == count
    for step, update in enumerate(expected, start=1):
        same_weights(run, step, update.weights)
    notes = run.notes()
    assert all(note["training"] for note in notes if note["kind"] == "update")
    modes = {note["training"] for note in notes if note["kind"] == "forward" and set(note["numbers"]) <= held_out}
    assert modes == {False}


@check()
def a_killed_run_resumes_as_if_nothing_had_happened(ranks: Ranks) -> None:
    """With dropout, from the last checkpoint: the same samples, rows and weights as those of a whole run."""
    values = {"model__options__dropout": 0.2, "run__save_every": 2, "optim__ema_decay": EMA}
    whole = good(ranks.train(**values))
    broken = ranks.train(die=5, **values)
    assert broken.status == [9]
    before = len(broken.updates())
    resumed = good(ranks.train(broken.folder, run__resume="true", **values))
    assert before == 5
    assert resumed.updates()[-4:] == whole.updates()[-4:]
    for kind in ("rows", "evaluations"):
        for mine, expected in zip(getattr(resumed, kind)(), getattr(whole, kind)(), strict=True):
            assert {key: mine[key] for key in STEADY if key in mine} == {
                key: expected[key] for key in STEADY if key in expected
            }
    same_weights(resumed, 8, whole.weights(8))


STEADY = ("step", "loss", "grad_norm", "lr", "num_samples", "num_tokens", "weight", "epoch", "set", "eval_loss")


@check()
def a_skipped_update_leaves_everything_as_it_was(ranks: Ranks) -> None:
    """The weights, their average and the schedule."""
    run = good(
        ranks.train(
            model__options__has_bad_sample="true", update__on_nonfinite="skip_update", optim__ema_decay=EMA,
            eval__every=1, run__max_steps=5,
        )
    )  # fmt: skip
    rows, updates, bad = run.rows(), run.updates(), own().BAD
    skipped = [place for place, numbers in enumerate(updates) if bad in numbers]
    assert len(skipped) == 1
    expected, evaluations = plain_loop(updates, skipped), run.evaluations()
    for place, (row, update) in enumerate(zip(rows, expected, strict=True)):
        same_weights(run, place + 1, update.weights)
        assert row.get("skipped_samples", 0) == (len(updates[place]) if place in skipped else 0)
        close(evaluations[place + 1]["eval_loss"], evaluate(update.average, run.evaluated())[0], place)
        if place not in skipped:
            close(row["lr"], update.lr, place)


@check()
def a_run_that_no_longer_improves_stops(ranks: Ranks) -> None:
    run = good(ranks.train(eval__every=1, eval__patience=2, optim__lr=30.0, optim__warmup_steps=0, run__max_steps=8))
    losses = [row["eval_loss"] for row in run.evaluations()]
    best = min(range(len(losses)), key=losses.__getitem__)
    worse = next(place for place in range(2, 9) if min(losses[place - 1 : place + 1]) >= min(losses[: place - 1]))
    assert len(losses) == worse + 1, (best, losses)


@check(world=2)
def two_ranks_do_what_one_does(ranks: Ranks) -> None:
    """Each has other samples, and what is said is of both."""
    run = good(ranks.train(parallel__wrapper="ddp", eval__num_samples=1))
    if ranks.rank:
        return
    expected = plain_loop(run.updates(2))
    assert all(len(set(update)) == len(update) for update in run.updates(2))
    held_out = run.evaluated() | {number for note in run.notes(1) if note["kind"] == "forward"
                                  and not note["training"] for number in note["numbers"]}  # fmt: skip
    for step, (row, update) in enumerate(zip(run.rows(), expected, strict=True), start=1):
        for key in ("loss", "grad_norm", "lr"):
            close(row[key], getattr(update, key), (step, key))
        assert (row["num_tokens"], row["num_target_tokens"]) == (update.num_tokens, update.num_target_tokens)
        same_weights(run, step, update.weights)
    for row in run.evaluations()[1:]:
        close(row["eval_loss"], evaluate(expected[row["step"] - 1].weights, held_out)[0], row["step"])


def run_check(name: str) -> None:
    """The job: a check by its name."""
    CHECKS[name][1](Ranks())

"""The result of an update: its loss, its terms and metrics, each with a divisor of its own."""

from dataclasses import replace

import pytest
import torch

from megabatch import GradientAccumulator, LossContractError, Update, loss
from megabatch.core.contract import weight_on_device
from tests.unit.small import count, expected, gradients, model_of_integers, same_bits, samples, squares, weighed

TARGETS = [3, 1, 0, 5, 2, 4, 1, *[0] * 9]  # 16 of them in 16 samples
BATCH = samples(TARGETS)


def run(loss_fn=weighed, *, micro_batch_size=3, **finalize):
    model = model_of_integers()
    gradient = GradientAccumulator(model, micro_batch_size=micro_batch_size)
    gradient.forward_backward(BATCH, loss_fn)
    return gradient.finalize(**finalize), model


def whole_total() -> float:
    rows = ({name: value[None] for name, value in each.items()} for each in BATCH)
    with torch.no_grad():
        return sum(float(squares(model_of_integers(), each)[0]) for each in rows)


def numbers(update: Update) -> dict[str, float]:
    return {name: float(value) for name, value in update.terms.items()}


def test_what_an_update_was():
    update, _ = run(max_norm=1e9)
    assert (float(update.loss), numbers(update), float(update.weight)) == (
        whole_total() / 16, {"loss": whole_total() / 16}, 16,
    )  # fmt: skip
    assert (update.num_samples, update.num_tokens, update.num_microbatches) == (16, 16 + 2 * 16, 6)
    assert bool(update.finite)
    assert update.problem() is None
    assert not any(each.requires_grad for each in (update.loss, update.weight, update.grad_norm))
    assert run()[0].grad_norm is None


def two_terms(targets: int, rows: int):
    """Squared errors over the targets, and 3 * spare per sample over twice the samples; 0 takes a term's weight."""

    def weigh(microbatch):
        return {"errors": targets * count(microbatch), "spare": rows * 2 * len(microbatch["labels"])}

    @loss(weigh=weigh)
    def terms(model, microbatch):
        weights = weigh(microbatch)
        errors, spare = squares(model, microbatch)[0], 3 * model.spare.sum() * len(microbatch["labels"])
        return {"errors": (targets * errors, weights["errors"]), "spare": (rows * spare, weights["spare"])}

    return terms


@pytest.mark.parametrize(("targets", "rows"), [(1, 1), (1, 0), (0, 1)])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 16])
def test_every_term_has_a_divisor_of_its_own(targets, rows, micro_batch_size):
    update, model = run(two_terms(targets, rows), micro_batch_size=micro_batch_size)
    *of_errors, _ = expected(model, BATCH)
    *mine, of_spare = gradients(model)
    assert same_bits(mine, [each * targets for each in of_errors])
    assert float(of_spare) == 1.5 * rows
    assert float(update.loss) == targets * whole_total() / 16 + rows * 1.5
    assert float(update.weight) == 16 * targets  # of the first
    assert bool(update.finite)


def test_terms_without_any_weight_leave_nothing():
    update, model = run(two_terms(0, 0), max_norm=1.0)
    assert not update.finite
    assert update.problem() is None
    assert gradients(model) == [None, None, None]


def test_a_term_without_weight_may_still_spoil_the_gradient():
    """Its quotient is left out of the loss, which is finite; its total is not, so nothing may be stepped."""

    @loss(weigh=lambda microbatch: {"errors": count(microbatch), "none": 0})
    def spoiled(model, microbatch):
        return {"errors": squares(model, microbatch), "none": (model.spare.sum() * float("nan"), 0)}

    update, _ = run(spoiled)
    assert torch.isfinite(update.loss)
    assert not update.finite
    assert str(update.problem()) == "the loss is not finite on data rank 0 of 1"


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_a_weight_that_stays_on_its_device_is_negative(weight):
    """On a device, nothing is read before the end of the update. The report of a rank then names the weight."""
    unread = weight_on_device(torch.tensor([weight]))
    assert unread.isnan()
    update, _ = run()
    reports = update.reports.clone()
    reports[0, 2] = unread
    problem = replace(update, reports=reports).problem()
    assert isinstance(problem, LossContractError)
    assert str(problem).startswith("a weight of the loss is negative or NaN on data rank 0 of 1")
    assert torch.equal(weight_on_device(torch.tensor([2.0])), torch.tensor(2.0, dtype=torch.float64))


def test_sums_are_kept_in_float64():
    """A metric in float32, whose sum would stand still at 2^24."""

    def counting(model, microbatch):
        first = microbatch["labels"].shape[1] == 7  # the longest sample
        return {"loss": squares(model, microbatch), "many": (torch.tensor(2.0**24 if first else 1.0), 1)}

    update, _ = run(counting, micro_batch_size=1)
    assert float(update.terms["many"]) * 16 == 2**24 + 15
    assert update.loss.dtype == torch.float64


@pytest.mark.parametrize("first", [0, 1])
def test_calls_that_count_a_term_by_its_name_and_without_one_add_up(first):
    def named(model, microbatch):
        return {"policy": squares(model, microbatch)}

    def with_metric(model, microbatch):
        return {"policy": squares(model, microbatch), "labels": (microbatch["labels"].sum(), count(microbatch))}

    losses = loss(weigh=count)(with_metric), loss(weigh=lambda microbatch: {"policy": count(microbatch)})(named)
    model, (_, whole) = model_of_integers(), run()
    gradient = GradientAccumulator(model, micro_batch_size=3)
    for part, loss_fn in zip((BATCH[:3], BATCH[3:]), (losses[first], losses[1 - first]), strict=True):
        gradient.forward_backward(part, loss_fn)
    update = gradient.finalize()
    assert float(update.weight) == 16
    assert same_bits(gradients(model), gradients(whole))


@pytest.mark.parametrize("error", [1e-2, 1e-4, -1e-2, 0.0, 1e-9])
def test_told_weights_are_compared_to_a_millionth(error):
    gradient = GradientAccumulator(model_of_integers(), micro_batch_size=3)
    gradient.open(weights=16 * (1 + error))
    gradient.forward_backward(BATCH, squares)
    if abs(error) > 1e-6:
        with pytest.raises(LossContractError, match=r"was told the weight .* returned 16"):
            gradient.finalize()
    else:
        assert gradient.finalize().finite

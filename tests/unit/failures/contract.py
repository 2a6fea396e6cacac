"""Losses that break their contract."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megabatch import JointLoss, LossContractError, loss, losses, mean, verify
from megabatch.batching.samples import Deferred
from tests.unit.failures.table import SAMPLES, Failure, accumulator, linear, squares, update

RETURN = "return (total, weight): the sum over the microbatch and the count it is divided by"
DISAGREE = "count what the loss sums (a causal shift never uses the label at position 0: count labels[:, 1:])"
SEVERAL = (
    "the loss has the differentiable terms ['one', 'two'], each with a denominator of its own; "
    "give weigh= as a mapping with the weight of each"
)


def returning(make: Callable[[Tensor], Any]) -> Callable[..., Any]:
    """A loss that returns what ``make`` makes of the squared predictions."""
    return lambda model, microbatch: make(model(microbatch["x"]) ** 2)


def weighing(weight: Any) -> Callable[..., Any]:
    """A loss whose weigh counts ``weight`` for every microbatch; it returns 2."""
    return loss(weigh=lambda microbatch: weight)(lambda *given: squares(*given))


def two_terms(model: Any, microbatch: Any) -> dict[str, Any]:
    return {"one": squares(model, microbatch), "two": squares(model, microbatch)}


def many_terms(model: Any, microbatch: Any) -> dict[str, Any]:
    metric = {f"metric{number}": (torch.tensor(1.0), 1) for number in range(16)}
    return {"loss": squares(model, microbatch)} | metric


def two_calls_of_two_terms() -> None:
    gradient = accumulator()
    two_weighed = loss(weigh=lambda microbatch: {"one": 2, "two": 2})(two_terms)
    gradient.forward_backward(SAMPLES, two_weighed)
    gradient.forward_backward(SAMPLES, two_weighed)


def two_calls_of_one_term_each() -> None:
    """As a policy and a value might come; their denominators would be mixed up."""
    gradient = accumulator()
    for name in ("one", "two"):
        counting = loss(weigh=lambda microbatch, name=name: {name: len(microbatch["x"])})
        gradient.forward_backward(SAMPLES, counting(lambda *given, name=name: {name: squares(*given)}))


def names_by_microbatch() -> None:
    names = iter(["one", "two"])
    update(loss(weigh=lambda microbatch: {next(names): 1})(lambda *given: squares(*given)))


def replaced_divisor_of_two_terms() -> None:
    gradient = accumulator()
    gradient.forward_backward(SAMPLES, loss(weigh=lambda microbatch: {"one": 2, "two": 2})(two_terms))
    gradient.finalize(weight=3.0)


def backward_without_weight() -> None:
    gradient = accumulator()
    for microbatch in gradient.microbatches(SAMPLES):
        gradient.backward(squares(gradient.model, microbatch)[0])


def meaning(make: Callable[[Tensor], Any], counted: Any = 2) -> Callable[..., Any]:
    """`mean` of a loss that returns what ``make`` makes of the squared predictions."""
    return mean(returning(make), over=lambda microbatch: counted)


def divided(model: Any, microbatch: Any, divisor: float) -> Any: ...


GIVEN_TO_MEAN = {"JointLoss": JointLoss(squares, squares), "counts": losses.next_token, "divides": divided}
SUMS_ALREADY = (
    "mean() was given a loss that sums and counts, or takes the divisor; give it to forward_backward() as it is"
)
LOSSES = {
    "a tuple, as a mean": (
        meaning(lambda squares: (squares.mean(), 2)),
        "the loss of mean() returns a tuple; return the mean alone, as a scalar",
    ),
    "a vector, as a mean": (
        meaning(lambda squares: squares),
        "the loss of mean() returns a tensor of shape (2, 1); return the mean alone, as a scalar",
    ),
    "a mean without a gradient": (
        meaning(lambda squares: squares.detach().mean()),
        "no total of the loss carries a gradient; compute one from the model's output, undetached",
    ),
    "a mean over less than nothing": (
        meaning(lambda squares: squares.mean(), -1),
        "what weigh counts is -1.0; a weight must be finite and not negative",
    ),
    "a mean over a mapping": (
        meaning(lambda squares: squares.mean(), {"one": 1, "two": 1}),
        "over of mean() returns a mapping; return one number, what the mean is over",
    ),
    "a mean": (
        returning(lambda squares: squares.mean()), f"the loss is a tensor of shape (), perhaps a mean; {RETURN}",
    ),
    "a vector": (
        returning(lambda squares: squares.flatten()),
        f"the loss is a tensor of shape (2,), perhaps a mean; {RETURN}",
    ),
    "a string": (returning(lambda squares: "done"), f"the loss is a str, perhaps a mean; {RETURN}"),
    "nothing": (returning(lambda squares: None), f"the loss is a NoneType, perhaps a mean; {RETURN}"),
    "no terms": (returning(lambda squares: {}), f"the loss is a dict, perhaps a mean; {RETURN}"),
    "a tuple of three": (returning(lambda squares: (squares.sum(), 2, 2)), f"the loss is a tuple of 3; {RETURN}"),
    "a term that is a mean": (
        returning(lambda squares: {"router": squares.mean()}),
        f"term 'router' of the loss is a tensor of shape (), perhaps a mean; {RETURN}",
    ),
    "a total that is a number": (
        returning(lambda squares: (3.0, 2)),
        f"the total of the loss is a float; {RETURN}, the total as a scalar tensor",
    ),
    "a total that is a vector": (
        returning(lambda squares: (squares, 2)),
        f"the total of the loss has shape (2, 1); sum it to a scalar, and {RETURN}",
    ),
    "a weight with a gradient": (
        returning(lambda squares: (squares.sum(), squares.sum())),
        "the weight of the loss carries a gradient; count it from the data, or detach it",
    ),
    "a negative weight": (
        returning(lambda squares: (squares.sum(), -2)),
        "the weight of the loss is -2.0; a weight must be finite and not negative",
    ),
    "a weight that is not a number": (
        returning(lambda squares: (squares.sum(), float("nan"))),
        "the weight of the loss is nan; a weight must be finite and not negative",
    ),
    "a weight that is a string": (
        returning(lambda squares: (squares.sum(), "two")), "the weight of the loss is a str; expected a number",
    ),
    "a weight that is a vector": (
        returning(lambda squares: (squares.sum(), torch.ones(2))),
        "the weight of the loss has shape (2,); sum it to one number",
    ),
    "nothing to differentiate": (
        returning(lambda squares: (squares.detach().sum(), 2)),
        "no total of the loss carries a gradient; compute one from the model's output, undetached",
    ),
    "several terms without weigh": (two_terms, SEVERAL),
    "several terms and one weigh": (loss(weigh=lambda microbatch: 2)(lambda *given: two_terms(*given)), SEVERAL),
    "too many terms": (many_terms, "the loss returned 17 terms; at most 16 are supported"),
    "weights that disagree": (
        weighing(1),
        f"weigh counted 1 from the data but the loss returned the weight 2 on microbatch 0; {DISAGREE}",
    ),
    "weigh counts a vector": (
        weighing(torch.ones(2)), "what weigh counts has shape (2,); sum it to one number",
    ),
    "weigh counts nothing": (weighing(None), "what weigh counts is a NoneType; expected a number"),
    "weigh counts less than nothing": (
        weighing(-1), "what weigh counts is -1.0; a weight must be finite and not negative",
    ),
    "weigh counts a term without end": (
        weighing({"loss": float("inf")}),
        "what weigh counts for term 'loss' is inf; a weight must be finite and not negative",
    ),
    "weigh names another term": (
        weighing({"reward": 2}), "weigh names ['reward'] but the differentiable term is 'loss'",
    ),
    "weigh names many terms": (
        weighing({f"term{number}": 1 for number in range(9)}), "weigh names 9 terms; at most 8 are supported",
    ),
}  # fmt: skip

FAILURES = {
    name: Failure(LossContractError, text, lambda loss_fn=loss_fn: update(loss_fn))
    for name, (loss_fn, text) in LOSSES.items()
} | {
    "two calls of two terms": Failure(
        LossContractError,
        "an update of several differentiable terms, ['one', 'two'], is one forward_backward call",
        two_calls_of_two_terms,
    ),
    "two calls of one term each": Failure(
        LossContractError,
        "an update of several differentiable terms, ['one', 'two'], is one forward_backward call",
        two_calls_of_one_term_each,
    ),
    "weigh names a term by microbatch": Failure(
        LossContractError,
        "weigh names the terms [['one'], ['two']]; name the same terms for each microbatch",
        names_by_microbatch,
    ),
    "weigh names what Deferred told": Failure(
        LossContractError,
        "weigh names the terms ['loss', 'reward'] but weights of Deferred have no name; "
        "return a number from weigh, or leave weights out",
        lambda: update(weighing({"reward": 2, "loss": 2}), Deferred(SAMPLES.__getitem__, [1] * 4, [1] * 4)),
    ),
    "weight= and two terms": Failure(
        LossContractError,
        "weight= replaces one divisor, but the loss has the terms ['one', 'two']",
        replaced_divisor_of_two_terms,
    ),
    "backward without a weight": Failure(
        LossContractError,
        "backward() was given no weight and weigh counted none; give backward(total, weight)",
        backward_without_weight,
    ),
    "a mean, to verify": Failure(
        LossContractError,
        f"the loss is a tensor of shape (), perhaps a mean; {RETURN}",
        lambda: verify(linear(), LOSSES["a mean"][0], SAMPLES),
    ),
}
FAILURES |= {
    f"{kind}, as a mean": Failure(LossContractError, SUMS_ALREADY, lambda given=given: mean(given, over=len))
    for kind, given in GIVEN_TO_MEAN.items()
}

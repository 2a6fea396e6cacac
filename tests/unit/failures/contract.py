"""Losses that break their contract."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import JointLoss, LossContractError, loss, losses, mean, verify
from megabatch.batching.deferred import Deferred
from tests.unit.failures.table import SAMPLES, Failure, accumulator, linear, squares, update

RETURN = "return (total"
SEVERAL = "['one', 'two']"


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


def meaning(make: Callable[[Tensor], Any], counted: Any = 2) -> Callable[..., Any]:
    """`mean` of a loss that returns what ``make`` makes of the squared predictions."""
    return mean(returning(make), over=lambda microbatch: counted)


def divided(model: Any, microbatch: Any, divisor: float) -> Any: ...


MEAN = f"the total of the loss is a mean, which its weight would divide again; {RETURN} … .sum() / n"
LOSSES = {
    "a tuple, as a mean": (meaning(lambda squares: (squares.mean(), 2)), "mean() … tuple"),
    "a vector, as a mean": (meaning(lambda squares: squares), "mean() … (2, 1)"),
    "a mean without a gradient": (meaning(lambda squares: squares.detach().mean()), "no total"),
    "a mean over less than nothing": (meaning(lambda squares: squares.mean(), -1), "is -1.0"),
    "a mean over nothing": (meaning(lambda squares: squares.mean() / 0, 0), "inf … over counts 0 … max(count, 1)"),
    "a mean over a mapping": (meaning(lambda squares: squares.mean(), {"one": 1, "two": 1}), "mean() … mapping"),
    "a mean": (returning(lambda squares: squares.mean()), "()"),
    "a mean with its count": (returning(lambda squares: (squares.mean(), 2)), MEAN),
    "a mean of torch's losses with its count": (
        returning(lambda squares: (F.mse_loss(squares, torch.ones_like(squares)), torch.tensor(2))),
        MEAN,
    ),
    "a vector": (returning(lambda squares: squares.flatten()), "(2,)"),
    "a string": (returning(lambda squares: "done"), f"the loss is a str; {RETURN}"),
    "nothing": (returning(lambda squares: None), "NoneType"),
    "no terms": (returning(lambda squares: {}), f"the loss is a dict; {RETURN}"),
    "a tuple of three": (returning(lambda squares: (squares.sum(), 2, 2)), f"the loss is a tuple of 3; {RETURN}"),
    "a term that is a mean": (returning(lambda squares: {"router": squares.mean()}), "'router' … ()"),
    "a total that is a number": (returning(lambda squares: (3.0, 2)), "is a float"),
    "a total that is a vector": (returning(lambda squares: (squares, 2)), "(2, 1)"),
    "a weight with a gradient": (returning(lambda squares: (squares.sum(), squares.sum())), "carries a gradient"),
    "a negative weight": (returning(lambda squares: (squares.sum(), -2)), "is -2.0"),
    "a weight that is not a number": (returning(lambda squares: (squares.sum(), float("nan"))), "loss is nan"),
    "a weight that is a string": (returning(lambda squares: (squares.sum(), "two")), "is a str"),
    "a weight that is a vector": (returning(lambda squares: (squares.sum(), torch.ones(2))), "(2,)"),
    "nothing to differentiate": (returning(lambda squares: (squares.detach().sum(), 2)), "carries a gradient"),
    "several terms without weigh": (two_terms, SEVERAL),
    "several terms and one weigh": (loss(weigh=lambda microbatch: 2)(lambda *given: two_terms(*given)), SEVERAL),
    "too many terms": (many_terms, "returned 17 terms"),
    "weights that disagree": (weighing(1), "counted 1 from … weight 2 on … microbatch 0"),
    "weigh counts a vector": (weighing(torch.ones(2)), "(2,)"),
    "weigh counts nothing": (weighing(None), "NoneType"),
    "weigh counts less than nothing": (weighing(-1), "is -1.0"),
    "weigh counts a term without end": (weighing({"loss": float("inf")}), "'loss'"),
    "weigh names another term": (weighing({"reward": 2}), "['reward'] … 'loss'"),
    "weigh names many terms": (weighing({f"term{number}": 1 for number in range(9)}), "names 9 terms"),
}

FAILURES = (
    {
        name: Failure(text, lambda loss_fn=loss_fn: update(loss_fn), LossContractError)
        for name, (loss_fn, text) in LOSSES.items()
    }
    | {
        f"{kind}, as a mean": Failure(
            "mean() … forward_backward", lambda given=given: mean(given, over=len), LossContractError
        )
        for kind, given in {
            "JointLoss": JointLoss(squares, squares),
            "a loss that counts": losses.next_token,
            "a divisor": divided,
        }.items()
    }
    | {
        "two calls of two terms": Failure(
            "['one', 'two'] … forward_backward", two_calls_of_two_terms, LossContractError
        ),
        "two calls of one term each": Failure(
            "['one', 'two'] … forward_backward", two_calls_of_one_term_each, LossContractError
        ),
        "weigh names a term by microbatch": Failure("[['one'] … ['two']", names_by_microbatch, LossContractError),
        "weigh names what Deferred told": Failure(
            "['loss', 'reward']",
            lambda: update(weighing({"reward": 2, "loss": 2}), Deferred(SAMPLES.__getitem__, [1] * 4, [1] * 4)),
            LossContractError,
        ),
        "weight= and two terms": Failure("weight= … ['one', 'two']", replaced_divisor_of_two_terms, LossContractError),
        "a mean, to verify": Failure("()", lambda: verify(linear(), LOSSES["a mean"][0], SAMPLES), LossContractError),
    }
)

"""Updates that came out wrong: nothing raises, ``update.finite`` is false and ``update.problem()`` says why."""

import torch

from tests.unit.failures.contract import returning
from tests.unit.failures.table import SAMPLES

NAN, INFINITE = ([*SAMPLES[:3], {"x": SAMPLES[0]["x"] * factor}] for factor in (float("nan"), float("inf")))
LOSS = "data rank 0 of 1"
NORM = "norm of the gradient is nan"

# name -> batch, loss, text; what has no weight is no problem, and is not stepped either
PROBLEMS = {
    "a sample that is not a number": (NAN, returning(lambda squares: (squares.sum(), len(squares))), LOSS),
    "a sample without end": (INFINITE, returning(lambda squares: (squares.sum(), len(squares))), LOSS),
    "a loss that is not a number": (SAMPLES, returning(lambda squares: ((-1 - squares).log().sum(), 2)), LOSS),
    "a gradient that is not a number": (SAMPLES, returning(lambda squares: ((squares * 0).sqrt().sum(), 2)), NORM),
    "no weight": (SAMPLES, returning(lambda squares: ((squares * 0).sum(), 0)), None),
    "weight that is a tensor of zero": (
        SAMPLES,
        returning(lambda squares: ((squares * 0).sum(), torch.tensor(0))),
        None,
    ),
    "no samples": ([], returning(lambda squares: (squares.sum(), len(squares))), None),
}

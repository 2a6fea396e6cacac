"""A row of the tables of errors, how one is judged, and the small model and data that the rows share."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch import GradientAccumulator, MegabatchError, PlanError, Update, loss


class Failure(NamedTuple):
    seen: str  # what the error names, in this order: pieces with " … " between
    provoke: Callable[[], object]
    error: type[MegabatchError] = PlanError


# The other half of what does not fit together is a change too.
CHANGE = re.compile(
    r"; |\. [A-Z]|expected|must|at most|\b(give|return|use|leave|set|choose|call)\b"
    r"|\bbut the\b|is one |was not called"
)


def names(text: str, seen: str) -> bool:
    """Return True if a text has all pieces of ``seen``, in their order; anything may follow a colon."""
    return re.search(".*".join(map(re.escape, re.split(r" … |(?<=:) ", seen))), text) is not None


def check_error(text: str, seen: str) -> None:
    """An error is one line that names what was seen and what to change."""
    assert len(text.splitlines()) == 1, text
    assert names(text, seen), f"{text!r} does not name {seen!r}"
    assert CHANGE.search(text), f"{text!r} does not say what to change"


def line_of(work: Callable[..., object], *given: Any, **named: Any) -> str:
    """Return the one line with which the work is refused."""
    with pytest.raises(MegabatchError) as caught:
        work(*given, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check_ranks(found: list[str], expected: list[str]) -> None:
    """Ranks are told the same, if one of them with the name of another before it."""
    for text, seen in zip(found, expected, strict=True):
        assert names(text, seen), f"{text!r} does not name {seen!r}"
    shortest = min(found, key=len).partition(": ")[2]
    assert all(text.endswith(shortest) for text in found), found


SAMPLES = [{"x": torch.full((1,), float(number), dtype=torch.float64)} for number in range(1, 5)]


def linear() -> nn.Module:
    """y = w x + b, with weights that are the same at every call."""
    torch.manual_seed(0)
    return nn.Linear(1, 1).double()


def squares(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
    return (model(microbatch["x"]) ** 2).sum(), len(microbatch["x"])


@loss(weigh=lambda microbatch: len(microbatch["x"]))
def weighed_squares(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
    return squares(model, microbatch)


def accumulator(model: nn.Module | None = None, **settings: Any) -> GradientAccumulator:
    return GradientAccumulator(
        linear() if model is None else model, **({"micro_batch_size": None if "planner" in settings else 2} | settings)
    )


def update(loss_fn: Callable[..., Any] = squares, batch: Any = SAMPLES, **settings: Any) -> Update:
    """One call and its finalize."""
    gradient = accumulator(**settings)
    gradient.forward_backward(batch, loss_fn)
    return gradient.finalize()


def here(mine: Any, others: Any) -> Any:
    """``mine`` on rank 1, where the fault is, and ``others`` on rank 0."""
    return mine if dist.get_rank() == 1 else others


def told(work: Callable[[], Any]) -> str:
    """Return the error of ``work`` on this rank, or "nothing"."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"

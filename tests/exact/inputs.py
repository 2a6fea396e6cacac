"""Input mutations: what users do wrong or oddly, one row each.

A row does what the user does, on every rank. Either the gradient is that of the uncut batch in plain torch, or one
line refuses the row on every rank. What is expected imports nothing of the library, with one exception: models that
cast to float32 run in `Float64WithoutDropout` on both sides, which only keeps their arithmetic in float64.
"""

import functools
import importlib
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import GradientAccumulator, MegabatchError
from tests.exact import oracle
from tests.exact.wrappers import Wrapped, parameters_of, whole

Sample = dict[str, Tensor]
ALL, SEVERAL = (1, 2, 3), (2, 3)
SHARES = {1: (8,), 2: (5, 3), 3: (5, 0, 3)}  # samples of each rank, by world: uneven, and none at all on one rank


class User:
    """One rank of one row: its part of the samples, and how far off its gradients are."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.error, self.parameter = -1.0, "nothing was compared"

    def part(self, samples: Sequence[Any]) -> list[Any]:
        """This rank's of 8 samples."""
        start = sum(SHARES[self.world][: self.rank])
        return list(samples[start : start + SHARES[self.world][self.rank]])

    def rows(self, batch: Sample) -> Any:
        """The same of a batch of 8 rows; no batch where there are none."""
        chosen = self.part(range(8))
        return {key: value[chosen] for key, value in batch.items()} if chosen else []

    def accumulator(self, model: Wrapped, **options: Any) -> GradientAccumulator:
        bounded = bool(options.keys() & {"micro_batch_size", "max_microbatch_tokens", "planner"})
        return GradientAccumulator(model, **(options if bounded else {"micro_batch_size": 2} | options))

    def update(self, model: Wrapped, batch: Any, loss_fn: Any, *, max_norm: float | None = None, **options: Any) -> Any:
        """One update of one call."""
        accumulator = self.accumulator(model, **options)
        accumulator.forward_backward(batch, loss_fn)
        return accumulator.finalize(max_norm=max_norm)

    def expect(self, model: Wrapped, reference: nn.Module) -> None:
        """Compare the model's gradients with the reference's."""
        found = {name: each.grad for name, each in parameters_of(model).items()}
        named = dict(reference.named_parameters())
        found = whole(model, found, {name: each.shape for name, each in named.items()})
        self.expect_equal(found, {name: each.grad for name, each in named.items()})

    def expect_equal(self, found: dict[str, Any], expected: dict[str, Any]) -> None:
        assert found.keys() == expected.keys(), "other parameters"
        for name, each in expected.items():
            error = relative_error(found[name], each)
            if error > self.error:
                self.error, self.parameter = error, name


def relative_error(found: Tensor | None, expected: Tensor | None) -> float:
    """The oracle's, but absolute where nothing is expected: the bias of keys has a gradient of rounding alone."""
    if found is not None and expected is not None and float(expected.norm()) < 1e-14:
        return float(torch.nan_to_num((found - expected).norm(), nan=float("inf")))
    return oracle.relative_error(found, expected)


@dataclass(frozen=True)
class Row:
    """A user's act, the numbers of ranks that do it, and its outcome."""

    act: Callable[[User], None]
    worlds: tuple[int, ...]
    refused: type[MegabatchError] | None = None  # None: the gradient is right
    fragment: str = ""  # of the error: what to change


CHAPTERS = (
    "inputs_batches",
    "inputs_losses",
    "inputs_loops",
    "inputs_updates",
    "inputs_models",
    "inputs_windows",
    "inputs_opened",
    "inputs_planners",
    "inputs_prefix",
    "inputs_names",
    "inputs_targets",
    "inputs_kinds",
)  # the files that add rows
ROWS: dict[str, Row] = {}


def right(*worlds: int, **variants: Any) -> Callable[..., Any]:
    return _rows(variants, worlds, None, "")


def refused(error: type[MegabatchError], fragment: str, *worlds: int, **variants: Any) -> Callable[..., Any]:
    return _rows(variants, worlds, error, fragment)


def _rows(variants: dict[str, Any], worlds: tuple[int, ...], *expected: Any) -> Callable[..., Any]:
    """Add the function to the table: once, or once for each variant, which it is given."""

    def add(act: Callable[..., None]) -> Callable[..., None]:
        for name, variant in variants.items() or [("", None)]:
            acting = functools.partial(act, variant=variant) if variants else act
            title = f"{act.__name__}-{name}" if name else act.__name__
            assert title not in ROWS
            ROWS[title] = Row(acting, worlds or (1,), *expected)
        return act

    return add


def table() -> dict[str, Row]:
    """Every row by its name."""
    for chapter in CHAPTERS:
        importlib.import_module(f"tests.exact.{chapter}")
    return ROWS


def run_job(job: str) -> dict[str, Any]:
    """The job "row:world" on one rank: how far off its gradients are, or what was raised."""
    name, world = job.rsplit(":", 1)
    row, user = table()[name], User(dist.get_rank(), int(world))
    if user.world == 1:
        dist.destroy_process_group()
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row.act(user)
        return {"error": user.error, "parameter": user.parameter}
    except Exception as error:
        kinds = [each.__name__ for each in type(error).__mro__]
        return {"raised": kinds, "text": str(error), "traceback": traceback.format_exc()[-1500:]}
    finally:
        torch.set_default_device(None)
        if dist.is_initialized():
            dist.destroy_process_group()  # a rank that waits for one that has raised is to hear of it


# Regression on numbers: most rows need no more.


def regressor() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def numbers(seed: int = 2, size: int = 8) -> Sample:
    drawn = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, width, generator=drawn).double() for name, width in (("x", 4), ("labels", 1))}


def as_samples(batch: Sample) -> list[Sample]:
    return [{key: value[row] for key, value in batch.items()} for row in range(len(next(iter(batch.values()))))]


def mean_square(model: Callable[[Tensor], Tensor], *batches: Sample) -> None:
    """Leaves the gradient of the mean over all rows of all batches in the model."""
    batch = {key: torch.cat([each[key] for each in batches]) for key in batches[0]}
    F.mse_loss(model(batch["x"]), batch["labels"]).backward()


def squares(model: Any, batch: Sample) -> tuple[Tensor, int]:
    return F.mse_loss(model(batch["x"]), batch["labels"], reduction="sum"), len(batch["x"])

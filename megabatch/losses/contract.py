"""The contract of a loss function: its return value, and the hooks that count its weight from the data.

``loss_fn(model, microbatch)`` returns a pair ``(total, weight)``, or a mapping of names to such pairs. It sums and
counts, and never divides: the update's loss is the sum of the totals over the sum of the weights.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megabatch.errors import LossContractError

EXPECTED = "return (total, weight): the sum over the microbatch and the count it is divided by"
PAIR_NAME = "loss"  # the name of a pair that the loss returned on its own
WEIGHT_TOLERANCE = 1e-6  # relative: one target in a million is seen, float32's rounding of a sum is not


class Term(NamedTuple):
    """A sum and its divisor, of one microbatch. A plain pair will do."""

    total: Tensor  # scalar; a metric if it carries no gradient
    weight: Tensor | float  # scalar, not negative


@dataclass(frozen=True)
class JointLoss:
    """A loss that couples samples, as a contrastive one does; cutting a plain loss would cut its negatives too.

    Every microbatch is encoded twice: once without a graph, for its representations, and once more for the gradient,
    with the same draws of torch's generators. What else changes from call to call is an error where representations
    tell (on a device ``update.finite`` is false); a module that keeps statistics, as batch norm does, moves them twice.

    Args:
        encode: ``encode(model, microbatch)`` gives representations with samples in dim 0: a tensor, or a tuple or
            mapping of tensors, each ``[B, ...]`` and with rows of one shape everywhere. Class labels and the like may
            be among them. Random numbers must be the same on ranks that share samples.
        loss: Gets them for every sample of the call, ``[N, ...]``: those of rank 0, then of rank 1, each in the order
            of its batch. A tuple comes as positional arguments, ``contrast(queries, documents)``, anything else as the
            only one. It returns ``(total, weight)`` or a mapping of names to such pairs, with weights that are
            numbers, and draws no random numbers. A trainable parameter that it needs, a temperature say, comes from
            ``encode``, one row per sample: ``temperature.expand(len(queries))``.

    Each call of an update couples its own samples, and the update's loss is the sum of the calls' totals over the sum
    of their weights. `forward_backward` returns the sums on data rank 0, and zeros on the others.
    """

    encode: Callable[[Any, Any], Any]
    loss: Callable[..., Any]


_TAKES_DIVISOR: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # an inspection takes longer than all other checks
LossFunction = Callable[[Any, Any], Any]
"""Type of a loss: ``loss_fn(model, microbatch)`` returns ``(total, weight)``, or a mapping of names to such pairs."""
Weigh = Callable[[Any], Any]
Prepare = Callable[[Any], Any]
F = TypeVar("F", bound=LossFunction)


def loss(*, weigh: Weigh, prepare: Prepare | None = None) -> Callable[[F], F]:
    """Say how the weight of a microbatch is counted from its data, so that the loss is scaled before backward.

    ``weigh(microbatch)`` sees the collated microbatch on the CPU and returns the weight that the loss will return
    for it (a number or a scalar tensor), or a mapping of term names to weights where the loss has several terms.
    ``prepare(microbatch)`` gives what the loss, and ``weigh``, will see in its place: for what is quickly seen on the
    CPU and slowly on a device. A function that says so already is left as it is; what comes back is another.

    A loss that runs a backward of its own, chunk by chunk say, cannot be scaled by what is done to its total. It takes
    the divisor: ``loss_fn(model, microbatch, divisor)`` returns ``(total / divisor, weight)``, having divided what it
    differentiates. The divisor is a number, or with several terms a mapping of their names to numbers: the weight of
    the update over all ranks (over their number, where the wrapper averages), and infinite in a dummy microbatch.
    """

    def attach(function: F) -> F:
        if weigh_of(function) is not None:  # a ready-made loss, which others go on using
            function = cast(F, _copy_function(function))
        cast(Any, function).weigh = weigh
        cast(Any, function).prepare = prepare
        return function

    return attach


def _copy_function(function: LossFunction) -> LossFunction:
    @functools.wraps(function)
    def run(*given: Any, **named: Any) -> Any:
        return function(*given, **named)

    return run


def weigh_of(loss_fn: LossFunction | JointLoss) -> Weigh | None:
    """Return the counting function that `loss` attached, if any."""
    return cast(Weigh | None, getattr(loss_fn, "weigh", None))


def takes_divisor(loss_fn: LossFunction | JointLoss) -> bool:
    """Return True if a loss divides by itself: it has a parameter named ``divisor``, see `loss`."""
    function = getattr(loss_fn, "__func__", loss_fn)
    with contextlib.suppress(KeyError, TypeError):  # not asked before, or not to be kept
        return _TAKES_DIVISOR[function]
    takes = False
    with contextlib.suppress(TypeError, ValueError):  # written in C, or a JointLoss
        takes = "divisor" in inspect.signature(cast(Callable[..., Any], loss_fn)).parameters
    with contextlib.suppress(TypeError):
        _TAKES_DIVISOR[function] = takes
    return takes


class LossHooks(NamedTuple):
    """Functions that a loss wants called with each collated microbatch, on the CPU; None where it wants none."""

    weigh: Weigh | None = None
    prepare: Prepare | None = None


def loss_hooks(loss_fn: LossFunction | JointLoss) -> LossHooks:
    """Return the two functions ``(weigh, prepare)`` that `loss` attached to a loss, None for each that it did not.

    Call ``prepare(microbatch)`` before ``loss_fn(model, microbatch)`` where you call a loss yourself. Set the
    attributes ``weigh`` and ``prepare`` on a function that stands for the loss.
    """
    return LossHooks(getattr(loss_fn, "weigh", None), getattr(loss_fn, "prepare", None))


def terms_of(returned: Any) -> dict[str, Term]:
    """Return what a loss returned as named terms, checked.

    A weight becomes a number where it can be read without waiting for a device, else a scalar on that device.

    Args:
        returned: What ``loss_fn(model, microbatch)`` returned.

    Returns:
        The terms by name; a pair without a name is called "loss". Totals are scalars on the model's device.

    Raises:
        LossContractError: It is neither a pair ``(total, weight)`` nor a mapping of names to such pairs, a total is not
            a real scalar, or a weight is negative, not finite or carries a gradient.
    """
    if isinstance(returned, Mapping) and returned:
        pairs = [(str(name), f"term {name!r} of the loss", each) for name, each in cast(Any, returned).items()]
    else:
        pairs = [(PAIR_NAME, "the loss", returned)]
    terms: dict[str, Term] = {}
    for name, source, pair in pairs:
        if isinstance(pair, Tensor) or not isinstance(pair, tuple | list):
            kind = f"a tensor of shape {tuple(pair.shape)}" if isinstance(pair, Tensor) else f"a {type(pair).__name__}"
            raise LossContractError(f"{source} is {kind}, perhaps a mean; {EXPECTED}")
        if len(cast(tuple[Any, ...], pair)) != 2:
            raise LossContractError(f"{source} is a tuple of {len(cast(tuple[Any, ...], pair))}; {EXPECTED}")
        total, weight = cast(tuple[Any, Any], pair)
        if not isinstance(total, Tensor):
            raise LossContractError(
                f"the total of {source} is a {type(total).__name__}; {EXPECTED}, the total as a scalar tensor"
            )
        if total.numel() != 1:
            raise LossContractError(
                f"the total of {source} has shape {tuple(total.shape)}; sum it to a scalar, and {EXPECTED}"
            )
        if total.is_complex():
            raise LossContractError(
                f"the total of {source} is complex ({total.dtype}); return a real one, total.real say"
            )
        if isinstance(weight, Tensor) and weight.requires_grad:
            raise LossContractError(f"the weight of {source} carries a gradient; count it from the data, or detach it")
        if isinstance(weight, Tensor) and weight.device.type != "cpu" and weight.numel() == 1:
            weight = weight.reshape(()).to(accumulation_dtype(weight.device))
        else:
            weight = _as_number(f"the weight of {source}", weight)
        terms[name] = Term(total.reshape(()), weight)
    return terms


def terms_given(
    total: Tensor | Mapping[str, Any], weight: Tensor | float | None, weighed: Mapping[str, float]
) -> dict[str, Term]:
    """Return the arguments of `backward` as named terms. A weight that is left out is the weighed one."""
    if isinstance(total, Mapping):
        return terms_of(total)
    if weight is None and len(weighed) != 1:
        raise LossContractError("backward() was given no weight and weigh counted none; give backward(total, weight)")
    return terms_of((total, next(iter(weighed.values())) if weight is None else weight))


def differentiable(terms: Mapping[str, Term]) -> list[str]:
    """Names of the terms that carry a gradient; the others are metrics."""
    return [name for name, term in terms.items() if term.total.requires_grad]


def counted_weights(weight: Any) -> dict[str, float]:
    """Return the result of ``weigh`` for one microbatch as numbers by term name."""
    if isinstance(weight, Mapping):
        named = cast(Mapping[str, Any], weight)
        return {str(name): _as_number(f"what weigh counts for term {name!r}", value) for name, value in named.items()}
    return {PAIR_NAME: _as_number("what weigh counts", weight)}


def _as_number(source: str, weight: Any) -> float:
    if isinstance(weight, Tensor) and weight.numel() != 1:
        raise LossContractError(f"{source} has shape {tuple(weight.shape)}; sum it to one number")
    try:
        number = float(weight)
    except (TypeError, ValueError):
        raise LossContractError(f"{source} is a {type(weight).__name__}; expected a number") from None
    if not 0 <= number < float("inf"):
        raise LossContractError(f"{source} is {number}; a weight must be finite and not negative")
    return number


@functools.cache
def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which totals and weights are summed: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64

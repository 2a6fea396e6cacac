"""The contract of a loss function: its return value, and the hooks that count its weight from the data.

``loss_fn(model, microbatch)`` returns a pair ``(total, weight)``, or a mapping of names to such pairs. It sums and
counts, and never divides: the update's loss is the sum of the totals over the sum of the weights.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megabatch.errors import LossContractError
from megabatch.torch_private.loss_nodes import MEANS, TORCH_LOSSES, reduction_of

EXPECTED = "return (total, weight): the sum over the microbatch and the count it is divided by"
PAIR_NAME = "loss"
"""The name of a pair that the loss returned on its own."""
REFUSES_MEANS = ContextVar("refuses_means", default=True)
"""False in `verify`, which compares the gradients of means."""
WEIGHT_TOLERANCE = 1e-6
"""Relative: one target in a million is seen, float32's rounding of a sum is not."""


class Term(NamedTuple):
    """The sum of a loss over one microbatch, and the weight that divides it. A plain pair works too.

    Attributes:
        total: Scalar tensor, the sum. A total without a gradient is a metric.
        weight: Number or scalar tensor, finite and not negative, such as the number of target tokens.
    """

    total: Tensor
    weight: Tensor | float


@runtime_checkable
class CoupledLoss(Protocol):
    """A loss that runs the microbatches of a call in place of the accumulator, such as `JointLoss`."""

    def run_call(self, call: Any) -> "dict[str, Term]":
        """Run the microbatches of a call. Return this rank's sums."""
        ...


LossFunction = Callable[[Any, Any], Any]
"""Type of a loss: ``loss_fn(model, microbatch)`` returns ``(total, weight)``, or a mapping of names to such pairs."""
Weigh = Callable[[Any], Any]
Prepare = Callable[[Any], Any]
F = TypeVar("F", bound=LossFunction)
Value = TypeVar("Value")


class ByLoss(Generic[Value]):
    """Values by loss, stored as long as the loss lives, or its object if the loss is a method.

    A loss that cannot be a weak key has no value.
    """

    def __init__(self) -> None:
        self._values: WeakKeyDictionary[Any, dict[Any, Value]] = WeakKeyDictionary()

    def get(self, loss_fn: Any) -> Value | None:
        owner, function = _split_method(loss_fn)
        try:
            return self._values.get(owner, {}).get(function)
        except TypeError:
            return None

    def set(self, loss_fn: Any, value: Value) -> None:
        owner, function = _split_method(loss_fn)
        with contextlib.suppress(TypeError):
            self._values.setdefault(owner, {})[function] = value


def _split_method(loss_fn: Any) -> tuple[Any, Any]:
    """Return the object and the function of a method. Python makes a new method object at each access."""
    function = getattr(loss_fn, "__func__", None)
    return (loss_fn, None) if function is None else (loss_fn.__self__, function)


# The answers of `takes_divisor`, since an inspection takes longer than all other checks of a loss.
_TAKES_DIVISOR: ByLoss[bool] = ByLoss()


def loss(*, weigh: Weigh, prepare: Prepare | None = None) -> Callable[[F], F]:
    """Attach to a loss the function that counts its weight from the data.

    The weight of the update is then known before the first forward, so each total is divided before its backward, and
    gradients need no pass of their own::

        @megabatch.loss(weigh=lambda microbatch: (microbatch["labels"][:, 1:] != -100).sum())
        def next_token(model, microbatch): ...

    A loss that runs its own backward, for example chunk by chunk, cannot be scaled from outside. It has a third
    parameter that is named ``divisor`` and given by keyword, ``loss_fn(model, microbatch, divisor)``. It divides what
    it differentiates, and returns ``(total / divisor, weight)``. The divisor is a number, or with several terms a
    mapping of their names to numbers. It is the weight of the update over all ranks (divided by their number, if the
    wrapper averages), and infinite in a dummy microbatch.

    Args:
        weigh: ``weigh(microbatch)`` gets the collated microbatch on the CPU. It returns the weight that the loss will
            return, as a number or scalar tensor, or a mapping of term names to weights if the loss has several terms.
        prepare: ``prepare(microbatch)`` returns the microbatch that the loss and ``weigh`` get in its place. Use it for
            work that is fast on the CPU and slow on a device.

    Returns:
        A decorator. It sets the attributes ``weigh`` and ``prepare`` on the loss. A loss that has them already is not
        changed, and the decorator returns a copy.
    """

    def attach(function: F) -> F:
        # Other code may use the loss with its own weigh, as with a ready-made loss.
        if weigh_of(function) is not None:
            function = cast(F, _copy_function(function))
        cast(Any, function).weigh = weigh
        cast(Any, function).prepare = prepare
        return function

    return attach


def skips_ignored_labels(function: F) -> F:
    """Mark a loss of megabatch that leaves out labels of -100: positions without a label change nothing."""
    cast(Any, function).skips_ignored_labels = True
    return function


def _copy_function(function: LossFunction) -> LossFunction:
    @functools.wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        return function(*args, **named)

    return run


def weigh_of(loss_fn: LossFunction | CoupledLoss) -> Weigh | None:
    """Return the counting function that `loss` attached, if any."""
    return cast(Weigh | None, getattr(loss_fn, "weigh", None))


def takes_divisor(loss_fn: LossFunction | CoupledLoss) -> bool:
    """Return True if a loss divides by itself: it has a parameter named ``divisor``, see `loss`."""
    takes = _TAKES_DIVISOR.get(loss_fn)
    if takes is None:
        takes = _has_parameter(loss_fn, "divisor")
        _TAKES_DIVISOR.set(loss_fn, takes)
    return takes


def _has_parameter(function: Any, name: str) -> bool:
    # Functions that are written in C may have no signature.
    with contextlib.suppress(TypeError, ValueError):
        return name in inspect.signature(function).parameters
    return False


class LossHooks(NamedTuple):
    """Functions that a loss wants called with each collated microbatch, on the CPU; None where it wants none."""

    weigh: Weigh | None = None
    prepare: Prepare | None = None

    def compare_weights(self, samples: Any, rows: Sequence[int]) -> tuple[float, float] | None:
        """Return the weight of some samples in one microbatch and the sum of their own. None if both are equal."""
        weigh = cast(Weigh, self.weigh)
        together = counted_weights(weigh(samples.take(rows)))
        weights_of_rows = [counted_weights(weigh(samples.take([row]))) for row in rows]
        for name, weight in together.items():
            weight_sum = sum(weights.get(name, 0.0) for weights in weights_of_rows)
            if not math.isclose(weight_sum, weight, rel_tol=WEIGHT_TOLERANCE):
                return weight, weight_sum
        return None


def loss_hooks(loss_fn: LossFunction | CoupledLoss) -> LossHooks:
    """Return the functions ``(weigh, prepare)`` that `loss` attached to a loss. Each is None if it is not attached.

    If you call a loss yourself, call ``prepare(microbatch)`` first. If you wrap a loss in a function, set the
    attributes ``weigh`` and ``prepare`` on that function.
    """
    return LossHooks(getattr(loss_fn, "weigh", None), getattr(loss_fn, "prepare", None))


def is_own(function: object) -> bool:
    """Return True if megabatch has written the code of a function: the losses and their hooks draw no random number."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__globals__", {}).get("__name__", "").startswith("megabatch.")


def terms_of(returned: Any) -> dict[str, Term]:
    """Return what a loss returned as named terms, checked.

    A weight becomes a number where it can be read without waiting for a device, else a scalar on that device.

    Args:
        returned: What ``loss_fn(model, microbatch)`` returned.

    Returns:
        The terms by name; a pair without a name is called "loss". Totals are scalars on the model's device.

    Raises:
        LossContractError: It is neither a pair ``(total, weight)`` nor a mapping of names to such pairs, a total is not
            a real scalar, or a weight is negative, not finite or carries a gradient. The value of a weight on a device
            is not read.
    """
    if not isinstance(returned, Mapping) or not returned:
        return {PAIR_NAME: _term_of(PAIR_NAME, "the loss", returned)}
    terms: dict[str, Term] = {}
    for name, pair in cast(Mapping[Any, Any], returned).items():
        terms[str(name)] = _term_of(str(name), f"term {name!r} of the loss", pair)
    return terms


def _term_of(name: str, source: str, pair: Any) -> Term:
    total, weight = _split_pair(name, source, pair)
    _check_total(source, total)
    weight = _read_weight(f"the weight of {source}", weight)
    if total.grad_fn is not None:
        _refuse_mean(source, total.grad_fn, weight)
    return Term(total.reshape(()) if total.ndim else total, weight)


def _read_weight(source: str, weight: Any) -> float | Tensor:
    if not isinstance(weight, Tensor):
        return _as_number(source, weight)
    if weight.requires_grad:
        raise LossContractError(f"{source} carries a gradient; count it from the data, or detach it")
    if weight.device.type == "cpu" or weight.numel() != 1:
        return _as_number(source, weight)
    return weight_on_device(weight)


def weight_on_device(weight: Tensor) -> Tensor:
    """Return a weight as a scalar, which is not read: that would wait for the device. A negative one becomes NaN."""
    weight = weight.detach().reshape(()).to(accumulation_dtype(weight.device))
    return torch.where(weight >= 0, weight, math.nan)


def _split_pair(name: str, source: str, pair: Any) -> tuple[Any, Any]:
    if isinstance(pair, Tensor):
        advice = ", or wrap it in megabatch.mean" if pair.ndim == 0 and name == PAIR_NAME else ""
        raise LossContractError(
            f"{source} is a tensor of shape {tuple(pair.shape)}, perhaps a mean; {EXPECTED}{advice}"
        )
    if not isinstance(pair, tuple | list):
        raise LossContractError(f"{source} is a {type(pair).__name__}; {EXPECTED}")
    if len(cast(Sequence[Any], pair)) != 2:
        raise LossContractError(f"{source} is a tuple of {len(cast(Sequence[Any], pair))}; {EXPECTED}")
    return cast(tuple[Any, Any], pair)


def _check_total(source: str, total: Any) -> None:
    if not isinstance(total, Tensor):
        raise LossContractError(
            f"the total of {source} is a {type(total).__name__}; {EXPECTED}, the total as a scalar tensor"
        )
    if total.numel() != 1:
        raise LossContractError(
            f"the total of {source} has shape {tuple(total.shape)}; sum it to a scalar, and {EXPECTED}"
        )
    if total.is_complex():
        raise LossContractError(f"the total of {source} is complex ({total.dtype}); return a real one, total.real say")


def _refuse_mean(source: str, node: Any, weight: float | Tensor) -> None:
    # A weight of at most 1 divides a mean by nothing.
    if isinstance(weight, float) and weight <= 1:
        return
    operation = node.name()
    is_mean = operation in MEANS or (operation in TORCH_LOSSES and reduction_of(node) == 1)
    if is_mean and REFUSES_MEANS.get():
        raise LossContractError(
            f"the total of {source} is a mean, which its weight would divide again; {EXPECTED} (write a mean "
            "over something else than the weight counts as .sum() / n)"
        )


def differentiable(terms: Mapping[str, Term]) -> list[str]:
    """Return the names of the terms that carry a gradient. The others are metrics."""
    return [name for name, term in terms.items() if term.total.requires_grad]


def describe_missing_gradient() -> str:
    """Return why a total may carry no gradient, and what to change."""
    if torch.is_inference_mode_enabled():
        return "torch.inference_mode() is on around the call; leave it out"
    if not torch.is_grad_enabled():
        return "torch.no_grad() or set_grad_enabled(False) is on around the call; leave it out"
    return "compute one from the model's output, undetached"


def counted_weights(weight: Any, source: str = "what weigh counts") -> dict[str, float]:
    """Return the result of ``weigh`` for one microbatch as numbers by term name."""
    if isinstance(weight, Mapping):
        named = cast(Mapping[str, Any], weight)
        return {str(name): _as_number(f"{source} for term {name!r}", value) for name, value in named.items()}
    return {PAIR_NAME: _as_number(source, weight)}


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

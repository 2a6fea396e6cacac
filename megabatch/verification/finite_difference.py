"""Check of a loss's backward by central differences in float64."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megabatch.torch_private.classes import is_dtensor
from megabatch.torch_private.operations import pytree

# Relative to the moved tensors, each in its own direction.
STEPS = (1e-4, 1e-5, 1e-6)
# From the model's own point, where a loss may have a kink.
OFFSET = 1e-3
TOLERANCE = 1e-3
READS = {"detach", "item", "tolist", "numpy"}
Loss = Callable[[], Tensor]


def check_backward(models: Sequence[nn.Module], loss: Loss) -> bool:
    """Return true if ``loss()`` changes as its backward says, along random directions.

    The check moves the outputs of the models, so that the inside of a model does not count (a quantized layer has no
    slope). If the loss calls only parts of the models, it moves their parameters. Detached values stay the same. It
    returns true if differences show nothing, for example at a kink.
    """
    generator = torch.Generator().manual_seed(0)
    return not all(_differs(models, loss, step, generator) for step in STEPS)


def _differs(models: Sequence[nn.Module], loss: Loss, step: float, generator: torch.Generator) -> bool:
    for line in (_Outputs(models, generator), _Parameters(models, generator)):
        tape = _Tape()
        with line.moved(), torch.enable_grad():
            # Transforms of torch.func refuse a change of what they differentiate.
            try:
                with tape:
                    base = loss()
            except Exception:
                continue
            # The loss calls only parts of the models.
            if not line.leaves:
                continue
            if any(map(is_dtensor, line.leaves)):
                return False
            # Reentrant checkpoints have no gradient of chosen inputs. Another branch of a loss may raise anything.
            try:
                gradients = torch.autograd.grad(base, line.leaves, materialize_grads=True)
                wide, narrow = (_central(line, tape, loss, width) for width in (step, step / 2))
            except Exception:
                return False
            pairs = zip(gradients, line.directions, strict=True)
            slopes = [(slope * gradient).flatten() for slope, gradient in pairs]
            expected = float(sum(slope.sum() for slope in slopes))
            size = float(torch.stack([slope.norm() for slope in slopes]).norm())
        if tape.is_unsure:
            return False
        off, rounding = abs(narrow - expected), 1e-13 * abs(float(base.detach())) / step
        return off > TOLERANCE * max(size, abs(narrow)) + rounding and abs(wide - narrow) < off / 10
    return False


def _central(line: "_Outputs | _Parameters", tape: "_Tape", loss: Loss, step: float) -> float:
    values: list[float] = []
    for at in (step, -step):
        line.move(at)
        tape.begin_again()
        with tape:
            total = loss()
        values.append(float(total.detach()))
    return (values[0] - values[1]) / (2 * step)


class _Line:
    """A straight line along which a loss is evaluated inside of ``moved()``, at points that ``move`` goes to."""

    def __init__(self, models: Sequence[nn.Module], generator: torch.Generator) -> None:
        self._models, self._generator = models, generator
        self.leaves: list[Tensor] = []
        self.directions: list[Tensor] = []

    @torch.no_grad()
    def _random(self, like: Tensor) -> Tensor:
        """Return random numbers of the same magnitude."""
        finite = like[torch.isfinite(like)]
        # The mean of no numbers is NaN.
        size = float(finite.square().mean().sqrt().nan_to_num())
        numbers = torch.randn(like.shape, dtype=torch.float64, generator=self._generator).to(like.device)
        return numbers * (size or 1.0)


class _Outputs(_Line):
    """A line of model outputs that carry a gradient."""

    def __init__(self, models: Sequence[nn.Module], generator: torch.Generator) -> None:
        super().__init__(models, generator)
        self._offsets: list[Tensor] = []
        # None in the first evaluation.
        self._at: float | None = None
        self._number = 0

    @contextlib.contextmanager
    def moved(self) -> Generator[None]:
        with contextlib.ExitStack() as hooks:
            for model in self._models:
                hooks.enter_context(model.register_forward_hook(self._move_output))
            yield

    def move(self, at: float) -> None:
        self._at, self._number = at, 0

    def _move_output(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        return pytree.tree_map(self._move_leaf, output) if torch.is_grad_enabled() else output

    def _move_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.requires_grad:
            return leaf
        if self._at is not None:
            number, self._number = self._number, self._number + 1
            return leaf + self._offsets[number] + self._at * self.directions[number]
        self._offsets.append(OFFSET * self._random(leaf))
        self.directions.append(self._random(leaf))
        self.leaves.append(torch.zeros_like(leaf, requires_grad=True))
        return leaf + self._offsets[-1] + self.leaves[-1]


class _Parameters(_Line):
    """A line of trainable parameters."""

    @contextlib.contextmanager
    def moved(self) -> Generator[None]:
        parameters = nn.ModuleList(self._models).parameters()
        self.leaves = [leaf for leaf in parameters if leaf.requires_grad and leaf.is_floating_point()]
        self._own = [leaf.detach().clone() for leaf in self.leaves]
        self._begin = [original + OFFSET * self._random(original) for original in self._own]
        self.directions = [self._random(original) for original in self._own]
        self.move(0.0)
        try:
            yield
        finally:
            self._set(self._own)

    def move(self, at: float) -> None:
        self._set([start + at * direction for start, direction in zip(self._begin, self.directions, strict=True)])

    @torch.no_grad()
    def _set(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.leaves, values, strict=True):
            parameter.copy_(value)


class _Tape(TorchFunctionMode):
    """Records values read out of the graph in a first evaluation, and returns them in each later one."""

    def __init__(self) -> None:
        super().__init__()
        self._read: list[Any] = []
        # Number of the next value to return. None in the first evaluation.
        self._number: int | None = None
        # True if trained parameters were used without a gradient, which is not recorded.
        self.is_unsure = False

    def begin_again(self) -> None:
        self._number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.is_grad_enabled():
            self.is_unsure |= any(isinstance(argument, nn.Parameter) and argument.requires_grad for argument in args)
        elif getattr(func, "__name__", "") in READS or func == torch.Tensor.data.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            if self._number is None:
                self._read.append(result := func(*args, **(kwargs or {})))
                return result
            self._number += 1
            return self._read[self._number - 1]
        return func(*args, **(kwargs or {}))

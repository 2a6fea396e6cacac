"""Receipts: which gradients there are, and how often each was written to."""

import operator
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from megabatch.core.wrapper import Wrapper
from megabatch.errors import LossContractError
from megabatch.torch_private.autograd import count_writes

# Faster than a comprehension over many parameters in every call.
GRAD = operator.attrgetter("grad")
DIVIDE = (
    "Return the sum itself, or take the divisor, loss(model, microbatch, divisor), and divide by it before that "
    "backward (see megabatch.loss)"
)


class Receipt(NamedTuple):
    """A snapshot of gradients: the tensors, and the number of writes to each."""

    parameters: Sequence[nn.Parameter]
    gradients: list[Tensor | None]
    writes: list[int]

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter]) -> "Receipt":
        """Take a snapshot of the current gradients."""
        # References keep the tensors alive, so that their identity cannot be reused.
        gradients = list(map(GRAD, parameters))
        return cls(parameters, gradients, count_all_writes(gradients))

    def holds(self, accumulating: Sequence[nn.Parameter], *, exact: bool) -> bool:
        """Return True if no gradient of ``accumulating`` appeared, was replaced or written to since.

        Without ``exact``, check only which are None. FSDP2 creates some parameters in the first forward.
        """
        now = list(map(GRAD, self.parameters))
        if exact:
            are_same = all(map(operator.is_, self.gradients, now)) and self.writes == count_all_writes(now)
        else:
            are_same = [gradient is None for gradient in self.gradients] == [gradient is None for gradient in now]
        if not are_same or accumulating is self.parameters:
            return are_same
        # Parameters that FSDP2 has created since the snapshot may not hold a gradient either.
        known = set(map(id, self.parameters))
        return all(parameter.grad is None for parameter in accumulating if id(parameter) not in known)


def check_unmoved(wrapper: Wrapper, before: Receipt) -> None:
    """Raise `LossContractError` if a loss that does not take the divisor has changed a gradient."""
    if not before.holds(wrapper.accumulating, exact=not wrapper.replaces_gradients):
        raise LossContractError(f"gradients changed while the loss ran: it runs its own backward. {DIVIDE}")


def count_all_writes(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return how often each tensor was written to, without those that are None."""
    try:
        return [count_writes(tensor) for tensor in tensors if tensor is not None]
    # Tensors made in inference mode count no writes.
    except RuntimeError:
        return [0 if tensor.is_inference() else count_writes(tensor) for tensor in tensors if tensor is not None]

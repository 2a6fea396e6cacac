"""The order of an update's collectives, which ranks compare where they wait for each other in forwards."""

import contextlib
import zlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import nn

from megabatch.core.mesh import DataRanks
from megabatch.core.wrapper import Wrapper
from megabatch.errors import PlanError

# Calls in which ranks compare each collective: a loss made anew for each call is always new.
MAX_COMPARED_CALLS = 8
# The end of a microbatch, in place of the number of a collective.
END = -1


@dataclass
class CollectiveOrder:
    """A hash of the collectives of an update in their order, which ranks compare.

    They compare it at the end of an update, and each collective before it begins while ``is_compared`` is True.
    """

    digest: int = 0
    wants_comparison: bool = False
    is_compared: bool = False
    num_compared_calls: int = 0

    def want_comparison(self, *, is_new: bool) -> None:
        """Ask to compare each collective of the next call, which has a new loss."""
        self.wants_comparison = is_new and self.num_compared_calls < MAX_COMPARED_CALLS

    @contextlib.contextmanager
    def compared(self, *, is_compared: bool) -> Generator[None]:
        """Compare each collective of a call, if any rank has asked for it."""
        self.is_compared = is_compared
        self.num_compared_calls += is_compared
        try:
            yield
        finally:
            self.is_compared = False

    def note(self, number: int) -> None:
        """Mix in one gather or reduction."""
        self.digest = zlib.crc32(number.to_bytes(8), self.digest)

    def reset(self) -> None:
        """Begin another update."""
        self.digest = 0


class OrderedWrapper(Wrapper):
    """A wrapper that notes the collectives of an update in their order."""

    def __init__(self, model: nn.Module, ranks: DataRanks) -> None:
        super().__init__(model, ranks)
        self.collective_order = CollectiveOrder()
        # Index among the models of a list, which share one order.
        self.index = 0

    @property
    def wants_comparison(self) -> bool:
        """True if this rank has a new loss, whose collectives ranks are to compare."""
        return self.collective_order.wants_comparison

    @property
    def collectives_digest(self) -> int:
        """A hash of the collectives of the update in their order, which ranks compare."""
        return self.collective_order.digest

    def surround_call(self, agreement: Any) -> contextlib.AbstractContextManager[None]:
        """Surround the microbatches of a call. Ranks compare each of its collectives if any has asked for it."""
        return self.collective_order.compared(is_compared=agreement.compares_order)

    def note_collective(self, number: int) -> None:
        """Mix one gather or reduction into the hash that ranks compare."""
        self.collective_order.note(self.index << 32 | number)

    def meet(self, number: int) -> None:
        """Note a collective that all ranks are to begin next; `END` is the end of a microbatch.

        While a new loss runs, this sends a message between hosts, and raises `PlanError` on all ranks if they differ.
        Without it, ranks wait for each other in different collectives until the backend gives up.
        """
        if self.collective_order.is_compared:
            numbers = [int(row[0]) for row in self.ranks.exchange_numbers([self.index << 32 | number])]
            first, *differing = dict.fromkeys(numbers)
            if differing:
                self.collective_order.is_compared = False
                second = differing[0]
                raise PlanError(
                    f"ranks call other submodules in one microbatch: some {self.describe_collective(first)}, others "
                    f"{self.describe_collective(second)}, and {self.kind_name} would wait forever; call every wrapped "
                    "submodule on all ranks, with zeros where a rank has nothing for it, or shard the root alone"
                )
        if number != END:
            self.note_collective(number)

    def describe_collective(self, number: int) -> str:
        """Return the words for a number that `meet` was given on any rank."""
        collective = "reduce gradients" if number % 2 else "gather parameters"
        return "end it" if number < 0 else collective

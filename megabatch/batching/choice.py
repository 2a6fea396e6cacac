"""The choice of a batching by the arguments of an accumulator."""

import copy

from megabatch.core.right_padding import Padded
from megabatch.core.samples import Batching, Collate
from megabatch.errors import PlanError


def choose_batching(collate: Collate | None, batching: object) -> Batching:
    """Return the batching that the arguments of an accumulator name. None pads.

    Raises `PlanError` for both, and for an object of another kind.
    """
    if batching is None:
        if isinstance(collate, Batching):
            kind = type(collate).__name__
            raise PlanError(f"collate= is a function and is given a {kind}; give batching={kind}(...)")
        if isinstance(collate, type) and issubclass(collate, Batching):
            raise PlanError(f"collate= is the class {collate.__name__}; give batching={collate.__name__}()")
        return Padded() if collate is None else Batching(collate)
    if collate is not None:
        raise PlanError("collate= and batching= both make microbatches; leave one of the two out")
    if isinstance(batching, type):
        raise PlanError(f"batching is the class {batching.__name__}; give an object, {batching.__name__}()")
    if not isinstance(batching, Batching):
        raise PlanError(
            f"batching is {batching!r:.60}; give Padded, OneRow, SharedPrefix or InsideSamples of megabatch.batching, "
            "or a function as collate="
        )
    # Accumulators of other models may have the same object.
    return copy.copy(batching)

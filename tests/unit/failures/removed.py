"""Methods that were removed, which say for one release what to do instead."""

from megabatch.errors import RemovedAttributeError
from megabatch.gradient_accumulator import REMOVED
from tests.unit.failures.table import Failure, accumulator


def asked_for(name: str) -> Failure:
    seen = f"GradientAccumulator.{name}() was removed; {REMOVED[name]}"
    return Failure(seen, lambda: getattr(accumulator(), name), RemovedAttributeError)


FAILURES = {f"the removed {name}()": asked_for(name) for name in REMOVED}

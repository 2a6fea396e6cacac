"""Methods that were removed, which say for one release what to do instead."""

from megabatch.accumulator import REMOVED
from tests.unit.failures.table import Failure, accumulator


def asked_for(name: str) -> Failure:
    return Failure(f"GradientAccumulator.{name}() was removed; {REMOVED[name]}", lambda: getattr(accumulator(), name))


FAILURES = {f"the removed {name}()": asked_for(name) for name in REMOVED}

"""States that cannot be saved, or not be loaded."""

from megabatch import MegabatchError
from tests.unit.failures.table import SAMPLES, Failure, accumulator, weighed_squares


def saved_while_open() -> None:
    gradient = accumulator()
    gradient.forward_backward(SAMPLES, weighed_squares)
    gradient.state_dict()


FAILURES = {
    "saved while an update is open": Failure("state_dict() … finalize()", saved_while_open, MegabatchError),
    "an update that an earlier version saved open": Failure(
        "ranks, update … saved open", lambda: accumulator().load_state_dict({"ranks": 1, "update": {}})
    ),
}

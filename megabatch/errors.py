"""Every error that megabatch raises on purpose.

Each message is one line: what was seen, what was expected, and what to change.
"""


class MegabatchError(Exception):
    """Base of every error raised on purpose; its text is one line, fit to be shown to a user."""


class PlanError(MegabatchError, ValueError):
    """What was asked for cannot be planned: a size, a cap, a mesh axis, a wrapper, a policy or a batch."""


class LossContractError(MegabatchError, ValueError):
    """A loss function broke its contract: return a sum and the weight it is divided by, and never divide."""


def require_count(name: str, value: object) -> int:
    """``value`` as a positive integer, or a `PlanError` that names the setting."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name} is {value!r}; it counts things and must be a whole number of at least 1")
    return value

"""Values by loss, kept as long as the loss lives."""

import contextlib
import weakref
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class ByLoss(Generic[Value]):
    """Values by loss, kept as long as the loss lives, or its object if the loss is a method.

    A loss that cannot be a weak key keeps no value.
    """

    def __init__(self) -> None:
        self._found: weakref.WeakKeyDictionary[Any, dict[Any, Value]] = weakref.WeakKeyDictionary()

    def get(self, loss_fn: Any) -> Value | None:
        with contextlib.suppress(TypeError):  # it cannot be a key
            return self._found.get(getattr(loss_fn, "__self__", loss_fn), {}).get(getattr(loss_fn, "__func__", None))
        return None

    def set(self, loss_fn: Any, value: Value) -> None:
        with contextlib.suppress(TypeError):
            values = self._found.setdefault(getattr(loss_fn, "__self__", loss_fn), {})
            values[getattr(loss_fn, "__func__", None)] = value

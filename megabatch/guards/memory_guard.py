"""The guard of a single process: running out of memory becomes an error of one line."""

import contextlib
from collections.abc import Generator

from megabatch.core.error_kinds import is_out_of_memory, out_of_memory_error
from megabatch.core.mesh import DataRanks


class MemoryGuard:
    """Surrounds code that may run out of memory. On several ranks, `ErrorBroadcast` takes its place."""

    def __init__(self, ranks: DataRanks) -> None:
        self._ranks = ranks

    @contextlib.contextmanager
    def listening(self, body: str | None = None) -> Generator[None]:
        """Surround code that may run out of memory. Other ranks hear any error in ``body``, a name."""
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                raise out_of_memory_error(error, self._ranks) from error
            raise

    def surround_body(self, body: str) -> contextlib.AbstractContextManager[None]:
        """Surround code of the user's, whose errors stay as they are on one rank."""
        return contextlib.nullcontext()

    def check(self) -> None:
        """Raise the error of another rank that has told it by now."""

    def agreeing(self) -> contextlib.AbstractContextManager[None]:
        """Surround an exchange between ranks, of which there is one."""
        return contextlib.nullcontext()

"""The page of a run while it goes on."""

import math
import time

from megabatch.train.context import Callback, RunContext
from megabatch.train.report.page import RUNNING, SECONDS_BETWEEN_PAGES, write_page


class LivePage(Callback):
    """Write report.html again and again while the run goes on. It takes at most a hundredth of the time."""

    def __init__(self, seconds: float = SECONDS_BETWEEN_PAGES) -> None:
        self._seconds = seconds
        self._next_page = time.perf_counter() + seconds

    def after_update(self, context: RunContext) -> None:
        """Write the page where it is time to."""
        begun = time.perf_counter()
        if begun < self._next_page or not context.is_writer:
            return
        context.write_logs()
        is_written = write_page(context.folder, context.console, RUNNING)
        now = time.perf_counter()
        self._next_page = now + max(self._seconds, 100 * (now - begun)) if is_written else math.inf

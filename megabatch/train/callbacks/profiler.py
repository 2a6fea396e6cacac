"""A profiler's trace of chosen updates, whole ones, however many microbatches they have."""

import contextlib
import os

import torch
from torch.profiler import ProfilerActivity, profile

from megabatch.train.context import Callback, RunContext
from megabatch.train.runtime.files import replace_text

NUM_OPERATIONS = 30  # in the table, the longest first


class Profiler(Callback):
    """Write ``profile/update-N.json.gz``, for chrome://tracing or Perfetto, and a table ``update-N.txt`` beside it.

    An update that fails leaves nothing behind.
    """

    def __init__(self, context: RunContext) -> None:
        self._steps, self._folder = frozenset(context.config.run.profile_steps), context.folder / "profile"
        self._profile: profile | None = None  # of the update that is made
        context.exits.callback(self._stop)

    def before_update(self, context: RunContext) -> None:
        """Start to record, if the update is one of those asked for."""
        if context.step + 1 in self._steps:
            os.environ.setdefault(
                "KINETO_LOG_LEVEL", "6"
            )  # read at the first profile; below, stderr has a line of each
            self._profile = profile(activities=activities())
            self._profile.__enter__()

    def after_update(self, context: RunContext) -> None:
        """Write what was recorded."""
        if self._profile is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the update's kernels belong to it
            profiled = self._stop()
            with contextlib.suppress(OSError):  # a full disk: a trace is no reason to end a run
                self._write(profiled, context.step)

    def _stop(self) -> profile | None:
        stopped, self._profile = self._profile, None
        if stopped is not None:
            stopped.__exit__(None, None, None)
        return stopped

    def _write(self, profiled: profile | None, step: int) -> None:
        assert profiled is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"update-{step}.json.gz"
        beside = self._folder / f"update-{step}.tmp.json.gz"
        try:
            profiled.export_chrome_trace(str(beside))
            os.replace(beside, trace)
        finally:
            beside.unlink(missing_ok=True)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        table = profiled.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=NUM_OPERATIONS)
        replace_text(self._folder / f"update-{step}.txt", table)


def activities() -> list[ProfilerActivity]:
    """Return what can be recorded on this machine."""
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *gpu]

"""Profile: a profiler's trace of chosen updates, whole ones, however many microbatches they have."""

import contextlib
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megabatch.train.runtime.files import replace_text

NUM_OPERATIONS = 30  # in the table, the longest first


class Profiler:
    """Writes ``profile/update-N.json.gz``, for chrome://tracing or Perfetto, and a table ``update-N.txt`` beside it."""

    def __init__(self, steps: Sequence[int], folder: Path, *, enabled: bool) -> None:
        self._steps = frozenset(steps) if enabled else frozenset[int]()
        self._folder = folder / "profile"

    @contextmanager
    def update(self, step: int) -> Generator[None, None, None]:
        """Surrounds the update ``step``; an update that fails leaves nothing behind."""
        if step not in self._steps:
            yield
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read at the first profile; below, it tells stderr of each
        profiler = profile(activities=activities())
        with profiler:
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # what the update has started belongs to it
        with contextlib.suppress(OSError):  # a full disk: a trace is no reason to end a run
            self._write(profiler, step)

    def _write(self, profiler: profile, step: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"update-{step}.json.gz"
        beside = self._folder / f"update-{step}.tmp.json.gz"
        try:
            profiler.export_chrome_trace(str(beside))
            os.replace(beside, trace)
        finally:
            beside.unlink(missing_ok=True)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        table = profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=NUM_OPERATIONS)
        replace_text(self._folder / f"update-{step}.txt", table)


def activities() -> list[ProfilerActivity]:
    """What can be recorded on this machine."""
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *gpu]

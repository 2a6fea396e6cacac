"""Compare the memory predicted for an update with the memory that it took."""

import contextlib
from pathlib import Path

import torch

from megabatch.planning import TunedLimit
from megabatch.train.config.byte_sizes import gib_text
from megabatch.train.context import Callback, RunContext

PROCESS = Path("/proc/self")
COMPARED = 2  # update of this process after which everything is there that stays


class MemoryCheck(Callback):
    """Measure the second update of a start, and say where a longer sample has changed the limit. Collective."""

    def __init__(self) -> None:
        self._num_updates = 0
        self._high_water: HighWater | None = None
        self._fit: TunedLimit | None = None  # before the update

    def before_update(self, context: RunContext) -> None:
        """Count updates, and begin to measure."""
        self._num_updates += 1
        self._fit = context.learner.gradient.fit
        if self._num_updates == COMPARED:
            self._high_water = HighWater(context.ranks.device)

    def after_update(self, context: RunContext) -> None:
        """Say both peaks, each of the rank that came highest, and add them to the row."""
        fit, high_water = context.learner.gradient.fit, self._high_water
        if fit is not None and fit is not self._fit:
            context.console.say(f"update.{fit.explain()}")
        if high_water is None:
            return
        self._high_water = None
        if context.plan.peak_bytes is None:
            return
        peaks = context.ranks.gather(high_water.bytes() or 0.0)
        predicted = context.ranks.gather(context.plan.peak_bytes)
        if not all(peaks):  # a system that does not tell
            return
        peak, expected = max(peaks), max(predicted)
        share = f"{peak / expected:.2f} of the {gib_text(expected)} predicted"
        context.console.say(f"memory came to {gib_text(peak)}, {share}")
        context.row |= {"peak_gib": peak / 2**30, "predicted_peak_gib": expected / 2**30}


class HighWater:
    """Measures the most memory that this process has had on its device since this was made, as the system counts it."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu, self._device = device.type == "cuda", device
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats(device)
            return
        with contextlib.suppress(OSError):
            (PROCESS / "clear_refs").write_text("5")

    def bytes(self) -> float | None:
        """On a GPU what was reserved; on the CPU what was resident, without files. None where nobody can tell."""
        if self._is_gpu:
            return float(torch.cuda.max_memory_reserved(self._device))
        try:  # lines such as "VmHWM:   123 kB"
            kib = dict(line.split(":", 1) for line in (PROCESS / "status").read_text().splitlines())
            return 1024.0 * (int(kib["VmHWM"].split()[0]) - int(kib["RssFile"].split()[0]))
        except (OSError, ValueError, KeyError):
            return None

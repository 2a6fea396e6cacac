"""One section's process: its device, its sizes, its time, and the rows that it writes."""

import contextlib
import gc
import importlib.util
import json
import statistics
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

GIB = 2**30
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What a section is given. ``small`` asks for toy sizes, for a run on a CPU."""

    section: str
    out: Path  # rows are appended to it, one JSON object a line
    folder: Path  # scratch
    device: torch.device
    small: bool
    seconds: float  # the section's limit
    start: float = field(default_factory=time.perf_counter)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def seconds_left(self) -> float:
        """Seconds until the section is ended."""
        return self.start + self.seconds - time.perf_counter()

    def has(self, *modules: str) -> bool:
        """Return False, and write a row that says so, where a module is not installed."""
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if missing:
            self.write("not run", ok=True, left_out=f"needs {', '.join(missing)}")
        return not missing

    def pick(self, full: Any, small: Any) -> Any:
        """Return the first on a GPU, the second in a small run."""
        return small if self.small else full

    def write(self, name: str, **values: Any) -> None:
        """Append a row at once, so that it survives what comes after it."""
        append(self.out, {"section": self.section, "name": name, **values})

    @contextlib.contextmanager
    def row(self, name: str) -> Generator[Row]:
        """Write the row that the body fills. An error of the body becomes the row, and the section goes on."""
        row: Row = {}
        start = time.perf_counter()
        try:
            yield row
        except Exception as error:
            traceback.print_exc()
            place = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{'/'.join(Path(place.filename).parts[-3:])}:{place.lineno}"
            row |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:400], "at": at}
        self.write(name, **{"ok": True} | row, seconds_taken=round(time.perf_counter() - start, 2))
        self.release()

    def now(self) -> float:
        """Return the clock, once the device has done what it was given."""
        if self.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def release(self) -> None:
        """Give memory that nobody uses back to the device."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Start to measure the peak of memory."""
        self.release()
        if self.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> tuple[float, float]:
        """Return the GiB that were allocated and reserved at most since `reset_peak`. Both 0 on a CPU."""
        if not self.is_cuda:
            return 0.0, 0.0
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB

    def in_turns(self, ways: dict[str, Callable[[], Any]], *, warmup: int, repeats: int) -> dict[str, list[float]]:
        """Return the seconds of each way, run in turns, every second time in reverse."""
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(warmup + repeats):
            order = list(ways)[:: -1 if repeat % 2 else 1]
            for name in order:
                start = self.now()
                ways[name]()
                seconds[name].append(self.now() - start)
        return {name: values[warmup:] for name, values in seconds.items()}


def append(out: Path, row: Row) -> None:
    """Append one line in one write, since several processes share the file."""
    line = json.dumps(row, default=str) + "\n"
    with out.open("ab", buffering=0) as file:
        file.write(line.encode())


def read(out: Path) -> list[Row]:
    """Return the rows of a result file."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def median_ms(seconds: Sequence[float]) -> float:
    return round(1000 * statistics.median(seconds), 3)

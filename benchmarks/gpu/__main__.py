"""What megabatch does on one GPU, in one command of at most eight minutes.

    python -m benchmarks.gpu                            # writes benchmarks/results/gpu_<device>_<date>.jsonl
    python -m benchmarks.gpu --only exact,memory        # some sections
    python -m benchmarks.gpu --device cpu --small       # every section at toy sizes, to see that it works
    python -m benchmarks.gpu --table                    # the tables of docs/benchmarks.md, from the newest result

Each section is a process with a time limit of its own. A crash, a hang or a lack of memory ends that section alone. A
row is written the moment it is measured. Sections without timings run side by side first. README.md says what each
number means.
"""

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import hardware, result
from benchmarks.gpu import table
from benchmarks.gpu.job import Job, append, read
from benchmarks.gpu.summary import summarize

LIBRARIES = ["transformers", "accelerate"]
SMALL_FACTOR = 8  # a busy CPU is slower than a GPU at toy sizes
LEAST_SECONDS = 10.0  # with less left, a section does not begin


class Section(NamedTuple):
    """One process: the function that it runs, and the seconds that it may take."""

    name: str
    function: str
    seconds: float
    measures: bool = False  # times or peaks: it must run alone


SECTIONS = (  # the most valuable first
    Section("exact", "exactness:run_wrappers", 110),
    Section("tests", "exactness:run_gpu_tests", 100),
    Section("cells", "exactness:run_cells", 100),
    Section("predict", "memory_prediction:predict", 130),
    Section("train", "recovery:run_training", 140),
    Section("oom", "recovery:run_out_of_memory", 45, measures=True),
    Section("waits", "recovery:run_waits", 40, measures=True),
    Section("memory", "memory_prediction:measure", 90, measures=True),
    Section("speed", "speed:run_loops", 100, measures=True),
    Section("trainers", "speed:run_trainers", 60, measures=True),
    Section("auto", "limits:run_auto", 60, measures=True),
    Section("one_microbatch", "speed:run_one_microbatch", 30, measures=True),
    Section("one_row", "limits:run_one_row", 30, measures=True),
    Section("prepare", "limits:run_prepare", 20, measures=True),
    Section("needless_pass", "speed:run_needless_pass", 90, measures=True),
)
BY_NAME = {section.name: section for section in SECTIONS}


class Running(NamedTuple):
    """A section's process, and when it must have ended."""

    section: Section
    process: subprocess.Popen[bytes]
    start: float
    deadline: float


class Runner:
    """Starts the sections' processes, ends those over their limit, and writes a row for each that has ended."""

    def __init__(self, out: Path, device: str, *, small: bool, minutes: float) -> None:
        self.out, self.device, self.small = out, device, small
        self.deadline = time.monotonic() + 60 * minutes
        self.scratch = tempfile.TemporaryDirectory(prefix="megabatch-gpu-")

    def run(self, sections: Sequence[Section]) -> None:
        """Run those without timings side by side, then the others one after the other. A small run has no timings."""
        together = [section for section in sections if not section.measures]
        alone = [section for section in sections if section.measures]
        with self.scratch:
            if self.small:
                self._run_together([*together, *alone], at_once=2)
                return
            self._run_together(together, at_once=max(1, len(together)))
            for section in alone:
                self._run_together([section], at_once=1)

    def _run_together(self, sections: list[Section], at_once: int) -> None:
        waiting, running = list(sections), list[Running]()
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    section = waiting.pop(0)
                    if self.deadline - time.monotonic() < LEAST_SECONDS:
                        append(self.out, {"section": section.name, "name": "ended", "left_out": "no time was left"})
                        continue
                    running.append(self._start(section))
                running = [one for one in running if not self._has_ended(one)]
                time.sleep(0.1)
        finally:
            for one in running:
                _kill(one.process)

    def _start(self, section: Section) -> Running:
        start = time.monotonic()
        limit = section.seconds * (SMALL_FACTOR if self.small else 1)
        limit = min(limit, self.deadline - start)
        folder = Path(self.scratch.name) / section.name
        folder.mkdir()
        words = ["--section", section.name, "--device", self.device, "--out", str(self.out)]
        words += ["--seconds", f"{limit:.1f}", "--folder", str(folder), *["--small"] * self.small]
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": _python_path()}
        if self.device == "cpu" or not section.measures:
            quiet["OMP_NUM_THREADS"] = "1"  # several run at once
        if self.device == "cuda":
            quiet["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu", *words], cwd=result.ROOT, env=os.environ | quiet,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return Running(section, process, start, start + limit)

    def _has_ended(self, one: Running) -> bool:
        """Return True for a process that has ended or is over its limit, which it then is made to."""
        now = time.monotonic()
        if one.process.poll() is None and now < one.deadline:
            return False
        is_late = one.process.poll() is None
        _kill(one.process)
        log = (Path(self.scratch.name) / one.section.name / "log.txt").read_text(errors="replace")
        row: dict[str, Any] = {"section": one.section.name, "name": "ended", "seconds": round(now - one.start, 1)}
        if is_late:
            row |= {"ok": False, "error": f"over its limit of {one.deadline - one.start:.0f} s", "log": log[-1500:]}
        elif one.process.returncode:
            row |= {"ok": False, "error": f"ended with {one.process.returncode}", "log": log[-1500:]}
        append(self.out, row)
        print(f"{one.section.name}: {row['seconds']} s{', ' + row['error'] if 'error' in row else ''}", flush=True)
        return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a section with everything that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _python_path() -> str:
    """Return the path with this checkout before it, since sections start programs in other folders."""
    return os.pathsep.join([str(result.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def run_section(job: Job) -> None:
    """Run one section in this process."""
    if job.is_cuda:
        torch.cuda.set_device(job.device)
    module, _, function = BY_NAME[job.section].function.partition(":")
    getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(job)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def section_names(text: str) -> list[str]:
    """Parse the names of sections that a comma parts."""
    for name in text.split(","):
        if name not in BY_NAME:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(BY_NAME)}")
    return text.split(",")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=section_names, default=list(BY_NAME), help=f"of {', '.join(BY_NAME)}")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no section runs (default: 8)")
    parser.add_argument("--out", type=Path, help="the result file, of JSON lines")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="toy sizes; their times say nothing")
    parser.add_argument("--table", action="store_true", help="only write the tables of docs/benchmarks.md")
    for name, kind in (("section", str), ("seconds", float), ("folder", Path)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)  # of a section's process
    given = parser.parse_args()
    if given.table:
        return given
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; give --device cpu --small to see that every section works")
    if given.device == "cpu" and not given.small:
        parser.error("the full sizes are for a GPU; give --small with --device cpu")
    return given


def main() -> int:
    given = arguments()
    if given.table:
        table.write()
        return 0
    if given.section:
        device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
        run_section(Job(given.section, given.out, given.folder, device, given.small, given.seconds))
        return 0
    out = (given.out or result.dated("gpu", hardware.name()).with_suffix(".jsonl")).resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    append(out, {"section": "all", "name": "made with", **result.made_with(LIBRARIES), **hardware.facts()})
    Runner(out, given.device, small=given.small, minutes=given.minutes).run([BY_NAME[name] for name in given.only])
    rows = read(out)
    print(summarize(rows), f"written to {out.name}", sep="\n")
    return int(any(row.get("ok") is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())

"""How long it takes to begin: imports and commands in fresh processes, and which of them import torch.

Repeats are interleaved, so that the machine's drift falls on all; numbers are medians. Writes
benchmarks/results/start_*.json.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import result

NUM_REPEATS = 7
COMMAND = "import sys; from megabatch.__main__ import main; sys.argv[1:] = {!r}; main()"
SCRIPTS = {
    "python": "pass",
    "import torch": "import torch",
    "import megabatch": "import megabatch",
    "megabatch.GradientAccumulator": "import megabatch; megabatch.GradientAccumulator",
    "megabatch --help": COMMAND.format(["--help"]),
    "megabatch train --help": COMMAND.format(["train", "--help"]),
    "megabatch init": COMMAND.format(["init", "--model", "small", "--data", "stdlib", "--hardware", "cpu"]),
    "megabatch train without a recipe": COMMAND.format(["train"]),
}
SEEN = "\nimport atexit, sys\n@atexit.register\ndef say(): print('torch' in sys.modules, file=sys.stderr)\n"


def seconds(script: str) -> float:
    """Wall time of a process."""
    with TemporaryDirectory() as folder:
        start = time.perf_counter()
        run(script, Path(folder))
        return time.perf_counter() - start


def run(script: str, folder: Path) -> str:
    """What a fresh process says on stderr."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(result.ROOT)!r}); {script}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stderr


def imports_torch(script: str) -> bool:
    """Whether it has imported torch at its end."""
    with TemporaryDirectory() as folder:
        return run(f"exec({SEEN!r}); {script}", Path(folder)).split()[-1] == "True"


def main() -> None:
    """Run, print and write the result beside what it was measured with."""
    made_with = result.made_with(["pydantic", "rich", "transformers", "tyro"])
    times: dict[str, list[float]] = {name: [] for name in SCRIPTS}
    for repeat in range(NUM_REPEATS + 1):
        for name in sorted(SCRIPTS, reverse=bool(repeat % 2)):
            times[name].append(seconds(SCRIPTS[name]))
    rows = {
        name: {"seconds": statistics.median(times[name][1:]), "imports_torch": imports_torch(script)}
        for name, script in SCRIPTS.items()
    }
    for name, row in rows.items():
        print(f"{name:34} {row['seconds']:6.2f} s  {'with' if row['imports_torch'] else 'without'} torch")
    claim = "help and init wait for no torch, and the library adds less than a second to it"
    print(result.write(result.dated("start"), {"claim": claim, **made_with, "rows": rows, "repeats": NUM_REPEATS}))


if __name__ == "__main__":
    main()

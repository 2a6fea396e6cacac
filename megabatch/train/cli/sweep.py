"""Sweep: `megabatch train recipe.toml --sweep optim.lr=1e-3,3e-3`, a run for each value, one after the other.

Each run is a process of its own: one that fails, or takes all memory, leaves the next ones as they are.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from types import FrameType

from megabatch.errors import MegabatchError
from megabatch.train.cli.recipe_command import read_config
from megabatch.train.report.runs import print_runs
from megabatch.train.runtime.console import print_line

# Words such as "optim.lr=1e-3", one for each key.
Words = tuple[str, ...]


def run_sweep(arguments: Sequence[str], sweeps: Sequence[str]) -> int:
    """Check all runs, make them, print the table of `megabatch runs`; return the status of the first that failed.

    Args:
        arguments: The recipe and overrides for every run.
        sweeps: ``key=value,value,...`` each; of several, every combination is run.

    Raises:
        MegabatchError: A run cannot be; none is started then.
    """
    combinations = list(dict.fromkeys(product(*map(read_values, sweeps))))
    parent = Path(f"{read_config('train', arguments, is_new=False).run.folder}-sweep")
    commands: dict[Words, list[str]] = {}
    for words in combinations:
        names = [re.sub(r"^[^=]*\.(?=[^=]*=)", "", word) for word in words]
        folder = parent / re.sub(r"[^\w.+=,-]", "_", ",".join(names))
        commands[words] = [*arguments, *(f"--{word}" for word in words), f"--run.folder={folder}"]
    for command in commands.values():
        read_config("train", command)
    failed: dict[Words, int] = {}
    for number, (words, command) in enumerate(commands.items(), start=1):
        print_line(f"sweep: run {number} of {len(commands)}, {' '.join(words)}")
        status, is_stopped = run_process([sys.executable, "-m", "megabatch", "train", *command])
        if status:
            failed[words] = status
            print_line(f"sweep: {' '.join(words)} ended with status {status}", sys.stderr)
        if is_stopped:
            num_left = len(commands) - number
            print_line(f"sweep: stopped with {num_left} runs left; the same command with --run.resume=true continues")
            break
    if any(parent.glob("*/config.toml")):
        print_runs(parent, as_json=False)
    for words, status in failed.items():
        print_line(f"sweep: failed with status {status}: {' '.join(words)}")
    return next(iter(failed.values()), 0)


def read_values(sweep: str) -> list[str]:
    """Return ``key=value`` for each value of ``key=value,value,...``."""
    key, _, values = sweep.partition("=")
    texts = [value.strip() for value in values.split(",") if value.strip()]
    if "." not in key or not texts:
        raise MegabatchError(f"--sweep is {sweep!r}; write section.key=value,value: --sweep optim.lr=1e-3,3e-3")
    return [f"{key.removeprefix('--')}={value}" for value in texts]


def run_process(command: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[int, bool]:
    """Run a command to its end; return its status, and True if a signal asked this process to stop meanwhile.

    A terminal sends Ctrl-C to both processes. SIGTERM comes to this one alone, and is passed on.
    """
    stopped_by: list[int] = []
    process = subprocess.Popen(command, env=environment)

    def stop(number: int, frame: FrameType | None) -> None:
        stopped_by.append(number)
        if number == signal.SIGTERM:
            process.send_signal(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status, bool(stopped_by)

"""What a result says of where it came from, and where it is written."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def made_with(libraries: Iterable[str] = ()) -> dict[str, Any]:
    """Command, commit, versions, cores, and how busy the machine is now (running processes, mean of a minute)."""
    names = sorted({"torch", "numpy", "megabatch", *libraries})
    return {
        "command": command(),
        "commit": commit(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        "machine": f"{platform.machine()}, {processor()}",
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
    }


def command() -> str:
    """As it was typed; a program of this repository by its name, and files elsewhere by theirs alone."""
    name = (getattr(sys.modules["__main__"], "__spec__", None) or sys).__dict__.get("name", sys.argv[0])
    typed = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return " ".join(["python", "-m", str(name).removesuffix(".__main__"), *typed])


def commit() -> str:
    """Return the commit of the measured library, with "+" where files differ from it. Empty without a checkout."""
    if shutil.which("git") is None:
        return ""
    asked = (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results"])
    name, changed = (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip() for words in asked
    )
    return name + "+" * bool(changed)


def version(library: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's name, where the kernel tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "processor unknown"
    )


def dated(name: str, hardware: str = "cpu") -> Path:
    """Where today's result of a benchmark is written; ``hardware`` is what the device calls itself."""
    letters = re.sub(r"[^a-z0-9]+", "-", hardware.lower().removeprefix("nvidia ")).strip("-")
    return RESULTS / f"{name}_{letters}_{datetime.date.today():%Y-%m-%d}.json"


def write(path: Path, result: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path

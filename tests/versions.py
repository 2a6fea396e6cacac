"""Which versions of torch and of the extras megabatch works with: `python -m tests.versions`.

For each version of torch it makes an environment, runs the programs of version_programs.py and a choice of tests there,
and writes versions.json and the table of docs/versions.md. `--torch 2.11.0` measures that version alone. It needs about
2 GB a version and 4 GB that all share, because torch's CUDA builds share one set of NVIDIA's libraries.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "versions.md"
FOLDER = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "megabatch" / "versions"
BEGIN, END = "<!-- python -m tests.versions writes this table -->\n", "<!-- end -->"
TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
PURE = ("filelock", "typing_extensions", "sympy", "networkx", "jinja2", "fsspec", "numpy", "setuptools")  # torch's own
EXTRAS = (
    "transformers", "safetensors", "datasets", "pyarrow", "pydantic", "tyro", "tomli_w", "rich", "tensorboard",
    "scikit-learn", "matplotlib", "hypothesis", "packaging", "psutil",
)  # fmt: skip
ON_TORCH = ("accelerate", "peft", "trl")  # what would bring a torch of its own
RUNNER = ("pytest", "pytest-xdist", "execnet", "iniconfig", "pluggy", "Pygments", "packaging")
OLDEST = {
    "accelerate": "1.10.0", "datasets": "4.7.0", "numpy": "1.26.0", "peft": "0.18.0", "pyarrow": "21.0.0",
    "pydantic": "2.0", "rich": "13.0.0", "safetensors": "0.5.0", "tomli_w": "1.0.0", "transformers": "5.1.0",
    "trl": "1.0.0", "tyro": "1.0.2",
}  # fmt: skip
TESTS = ("tests/test_torch_private.py", "tests/unit/test_accumulator.py")
COLUMNS = {  # of the table → the programs
    "loop, `verify`": ("loop", "verify"),
    "FSDP2": ("fsdp2", "accumulate_dtype"),
    "a loss raises": ("raises",),
    "unused parameter": ("unused",),
    "pipeline": ("pipeline",),
    "`plan`": ("plan",),
    "`train`": ("recipe",),
}
MEASURED = ("torch", "transformers", "datasets", "pydantic", "tyro", *ON_TORCH)
VERSIONS = f"""
import importlib.metadata, json, platform
versions = {{name: importlib.metadata.version(name) for name in {MEASURED!r}}}
print(json.dumps(versions | {{"python": platform.python_version()}}))
"""
SECONDS = 3600  # of the programs or of the tests under one version


@dataclass(frozen=True)
class Environment:
    """Packages that are measured together: a version of torch, and pins of the others."""

    torch: str
    pins: Mapping[str, str] = field(default_factory=dict)  # none: as in constraints.txt

    @property
    def name(self) -> str:
        return f"{self.torch} oldest" if self.pins else self.torch


def run(command: Iterable[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], check=True, text=True, **options)


def install(python: Path, folder: Path, requirements: Iterable[str], *options: str, pins: Mapping[str, str]) -> None:
    """Install packages into a folder, unless they are there."""
    if folder.exists():
        return
    constraints = folder.with_name(f"{folder.name}.txt")
    constraints.write_text("\n".join(f"{name}=={version}" for name, version in pins.items()))
    whole = folder.with_name(f"{folder.name}.part")
    command = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--upgrade", "--target", whole, *options]
    # The user's own constraints may name another torch.
    run([*command, *requirements], env=os.environ | {"PIP_CONSTRAINT": str(constraints)})
    whole.rename(folder)


def pinned() -> dict[str, str]:
    """Return the versions of constraints.txt but torch's."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name: version for name, version in pins.items() if name != "torch"}


def libraries_of(sites: Iterable[Path]) -> list[str]:
    """Return the newest of each of NVIDIA's packages that the builds of torch in some folders ask for."""
    newest, extras = dict[str, list[int]](), dict[str, set[str]]()
    texts = dict[str, str]()
    for site in sites:
        (metadata,) = site.glob("torch-*.dist-info/METADATA")
        for name, extra, version in re.findall(
            r"^Requires-Dist: ((?:nvidia|cuda-toolkit)[\w-]*)(?:\[([\w,]+)\])?==([\d.]+)", metadata.read_text(), re.M
        ):
            numbers = [int(part) for part in version.split(".")]
            extras.setdefault(name, set()).update(filter(None, extra.split(",")))
            if numbers > newest.get(name, []):
                newest[name], texts[name] = numbers, version
    return [
        f"{name}[{','.join(sorted(extras[name]))}]=={texts[name]}" if extras[name] else f"{name}=={texts[name]}"
        for name in newest
    ]


def make(environments: Iterable[Environment], folder: Path, python: Path) -> dict[str, Path]:
    """Return the interpreter of each environment."""
    folder.mkdir(parents=True, exist_ok=True)
    environments = list(environments)
    sites = {each.torch: folder / f"torch-{each.torch}" for each in environments}
    for version, site in sites.items():
        install(python, site, [f"torch=={version}"], "--no-deps", pins={})
    libraries = libraries_of(site for site in folder.glob("torch-*") if site.is_dir() and site.suffix != ".part")
    shared = folder / f"nvidia-{hashlib.sha256(str(libraries).encode()).hexdigest()[:8]}"
    if libraries:
        install(python, shared, libraries, pins={})
    interpreters = dict[str, Path]()
    for environment in environments:
        pins = pinned() if not environment.pins else dict(environment.pins)
        extras = folder / ("oldest" if environment.pins else "pinned")
        install(python, extras, [*PURE, *EXTRAS], pins=pins)
        install(python, extras.with_name(f"{extras.name}-on-torch"), [*ON_TORCH, *RUNNER], "--no-deps", pins=pins)
        home = folder / f"env-{environment.name.replace(' ', '-')}"
        run([python, "-m", "venv", "--without-pip", home])
        (packages,) = home.glob("lib/python*/site-packages")
        paths = (sites[environment.torch], extras, extras.with_name(f"{extras.name}-on-torch"))
        (packages / "versions.pth").write_text("\n".join(map(str, paths)))
        link = sites[environment.torch] / "nvidia"
        link.unlink(missing_ok=True)
        link.symlink_to(shared / "nvidia")
        interpreters[environment.name] = home / "bin" / "python"
    return interpreters


def measure(python: Path) -> dict[str, Any]:
    """Run the programs and the tests with an interpreter."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    options: dict[str, Any] = {"cwd": ROOT, "env": os.environ | quiet, "capture_output": True, "timeout": SECONDS}
    versions = run([python, "-c", VERSIONS], **options)
    programs = run([python, "-m", "tests.version_programs"], **options)
    command = [python, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not slow and not full"]
    tested = subprocess.run([*map(str, command), *TESTS], text=True, **options)
    counts = re.findall(r"(\d+) (passed|failed|errors?|skipped)", (tested.stdout.strip().splitlines() or [""])[-1])
    return {
        "versions": json.loads(versions.stdout.splitlines()[-1]),
        "programs": json.loads(programs.stdout.splitlines()[-1]),
        "tests": {kind: int(number) for number, kind in counts},
        "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", tested.stdout, re.M),
    }


def cell(answers: list[dict[str, Any]]) -> str:
    """Return the largest error of some programs, "works", or what one said."""
    failures = [answer["failure"] for answer in answers if "failure" in answer]
    if failures:
        return "**" + failures[0].replace("|", "\\|")[:120] + "**"
    errors = [answer["error"] for answer in answers if "error" in answer]
    return f"{max(errors):.1e}" if errors else "works"


def table(results: Mapping[str, Any]) -> str:
    heads = ["torch", "transformers", "Python", *COLUMNS, "tests passed"]
    rows = [heads, ["---"] * len(heads)]
    for name in sorted(results):
        result = results[name]
        versions, programs, tests = result["versions"], result["programs"], result["tests"]
        cells = [cell([programs[program] for program in group]) for group in COLUMNS.values()]
        ran = sum(number for kind, number in tests.items() if kind != "skipped")
        passed = f"{tests.get('passed', 0)} of {ran}"
        rows.append([versions["torch"].partition("+")[0], versions["transformers"], versions["python"], *cells, passed])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write(name: str, result: Mapping[str, Any]) -> None:
    """Write a result into the result file and the page's table."""
    results = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    results[name] = result
    RESULT.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(results) + END + rest.partition(END)[2], encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--torch", nargs="+", metavar="VERSION", help="these versions of torch, with the pinned extras")
    parser.add_argument("--oldest", action="store_true", help="the oldest extras, beside what --torch names")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the environments; they stay there")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="interpreter that has pip")
    asked = parser.parse_args()
    is_all = not asked.torch and not asked.oldest
    environments = [Environment(version) for version in (TORCH if is_all else asked.torch or ())]
    if is_all or asked.oldest:
        environments.append(Environment(TORCH[0], OLDEST))
    for name, python in make(environments, asked.folder.resolve(), asked.python).items():
        print(f"torch {name}", flush=True)
        result = measure(python)
        print(json.dumps(result["programs"]), result["tests"], *result["failed"], flush=True)
        write(name, result)


if __name__ == "__main__":
    main()

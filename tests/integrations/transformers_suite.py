"""Run transformers' own tests of Trainer twice, with Trainer and with MegabatchTrainer in its place, and compare.

``python -m tests.integrations.transformers_suite CHECKOUT [TEST ...]`` takes a checkout of transformers' repository. It
runs those test files against the installed transformers, offline. The tests need ``parameterized``, and ``optuna`` for
the search of hyperparameters. ``docs/integrations.md`` lists the differences.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

FILES = "tests/trainer/test_trainer*.py"  # those in one process, without tests/trainer/distributed
REMOVED = ("GlueDataset", "GlueDataTrainingArguments")  # imported by test files that are older than transformers


class Outcomes:
    """A pytest plugin that keeps the outcome of each test, and the message of each that fails."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if self.found.get(report.nodeid, ("",))[0] == "failed" or (report.when != "call" and report.passed):
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        self.found[report.nodeid] = (report.outcome, "" if crash is None else crash.message.splitlines()[0])


def run_tests(substitutes: bool, tests: list[str], result: Path) -> None:
    """Run tests of the current directory, and write their outcomes to a JSON file."""
    import pytest
    from transformers import Seq2SeqTrainer

    package = sys.modules["transformers"]  # the import of a trainer has replaced the module
    for name in REMOVED:
        vars(package).setdefault(name, None)
    if substitutes:  # before a test file is imported, so that its subclasses inherit too
        from megabatch.integrations.transformers import MegabatchTrainer

        vars(package)["Trainer"] = MegabatchTrainer
        vars(package)["Seq2SeqTrainer"] = type("ExactSeq2SeqTrainer", (MegabatchTrainer, Seq2SeqTrainer), {})
        from transformers import Trainer

        assert Trainer is MegabatchTrainer, "the substitution has no effect"
    outcomes = Outcomes()
    options = "--noconftest --continue-on-collection-errors -o addopts= -p no:cacheprovider -q --tb=short"
    pytest.main([*options.split(), *tests], plugins=[outcomes])
    result.write_text(json.dumps(outcomes.found))


def run_in_process(checkout: Path, trainer: str, tests: list[str]) -> dict[str, list[str]]:
    """Return the outcome and the message of each test, from a process that runs in the checkout."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "outcomes.json")
        log = Path(tempfile.gettempdir(), f"transformers_suite_{trainer}.log")
        with log.open("w") as output:
            command = [sys.executable, __file__, "--inside", trainer, str(result), *tests]
            subprocess.run(command, cwd=checkout, env=environment, stdout=output, stderr=output, check=False)
        if not result.exists():
            raise SystemExit(f"pytest did not finish with {trainer}: see {log}")
        return json.loads(result.read_text())


def compare(plain: dict[str, list[str]], exact: dict[str, list[str]]) -> str:
    """Return a table of counts, and each test whose outcome differs."""
    lines = ["| | passed | failed | skipped |", "|---|---|---|---|"]
    for name, found in (("Trainer", plain), ("MegabatchTrainer", exact)):
        counts = Counter(outcome for outcome, _ in found.values())
        lines.append(f"| {name} | {counts['passed']} | {counts['failed']} | {counts['skipped']} |")
    missing = ["not run", ""]
    for test in sorted({*plain, *exact}):
        (before, old), (after, new) = plain.get(test, missing), exact.get(test, missing)
        if before != after:
            lines.append(f"{test}: {before} -> {after}: {new or old}")
        elif before == "failed":
            lines.append(f"{test}: fails with both: {old}" + ("" if old == new else f" | {new}"))
    return "\n".join(lines)


def main() -> None:
    import torch
    import transformers

    checkout = Path(sys.argv[1])
    tests = sys.argv[2:] or sorted(str(each.relative_to(checkout)) for each in checkout.glob(FILES))
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    print(f"tests of {commit.stdout.strip()}, transformers {transformers.__version__}, torch {torch.__version__}")
    print(compare(*(run_in_process(checkout, trainer, tests) for trainer in ("Trainer", "MegabatchTrainer"))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        sys.path.pop(0)  # this folder, whose names are not those of the checkout
        run_tests(sys.argv[2] == "MegabatchTrainer", sys.argv[4:], Path(sys.argv[3]))
    else:
        main()

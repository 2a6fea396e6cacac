"""Exactness of other trainers, as `megabatch audit` sees it: one unmodified loop of each, on the same texts.

    python -m benchmarks.certificate --write           # measures, writes the result and the table of docs/peers.md
    python -m benchmarks.certificate --table           # the table alone, from the result
    python -m benchmarks.certificate --only "sft|dpo"  # some; with --write, the other rows stay

The loops are those of tests/integrations/audited_loops.py: 20 texts of 4 to 59 random tokens, two to a microbatch, four
microbatches to an optimizer step, and a last step of two. Each runs in a process of its own. torchtune, torchtitan and
diffusers need environments of their own: TUNE_PYTHON, TITAN_PYTHON and DIFFUSERS_PYTHON name their interpreters (the
packages are in tests/integrations/test_torchtune.py and test_torchtitan.py; `pip install torch==2.13.0 torchvision
diffusers accelerate datasets`). DIFFUSERS_EXAMPLES is the folder examples of diffusers' repository. Without them,
their rows stay as they were.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import result
from megabatch import Audit
from megabatch.train.cli.audited_command import read_findings
from megabatch.verification.audit_text import percent, verdict_of

PAGE = result.ROOT / "docs" / "peers.md"
START, END = "<!-- certificate: python -m benchmarks.certificate --table -->\n", "<!-- end of certificate -->"
COMMAND = "megabatch audit -- python -m tests.integrations.audited_loops"


class Peer(NamedTuple):
    """A loop, as the table names it."""

    name: str
    library: str  # whose version is shown
    python: str | None = None  # the environment variable that names its interpreter


PEERS = {  # kind of tests.integrations.audited_loops → the loop
    "plain": Peer("a plain loop, `loss / N`", "torch"),
    "accelerate": Peer("Accelerate, `accumulate()`", "accelerate"),
    "lightning": Peer("Lightning, `accumulate_grad_batches`", "lightning"),
    "trainer": Peer("`Trainer`, Llama", "transformers"),
    "trainer-gpt2": Peer("`Trainer`, GPT-2", "transformers"),
    "trainer-mean": Peer("`Trainer`, a `compute_loss` that returns a mean", "transformers"),
    "sft-llama": Peer("TRL `SFTTrainer`, Llama", "trl"),
    "sft": Peer("TRL `SFTTrainer`, GPT-2", "trl"),
    "dpo": Peer("TRL `DPOTrainer`", "trl"),
    "grpo": Peer("TRL `GRPOTrainer`", "trl"),
    "sentence-transformers": Peer("sentence-transformers, in-batch negatives", "sentence-transformers"),
    "torchtune": Peer("torchtune, `full_finetune_single_device`", "torchtune", "TUNE_PYTHON"),
    "torchtitan": Peer("torchtitan, `CrossEntropyLoss`", "torchtitan", "TITAN_PYTHON"),
    "torchtitan-chunked": Peer("torchtitan, chunked loss (default)", "torchtitan", "TITAN_PYTHON"),
    "diffusers": Peer("diffusers, `train_unconditional.py`", "diffusers", "DIFFUSERS_PYTHON"),
}


def measure(kind: str, python: str) -> dict[str, Any]:
    """Audit a loop in a process of its own, by an interpreter; return its row."""
    environment = os.environ | {"PYTHONPATH": str(result.ROOT), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        loop = [python, "-m", "tests.integrations.audited_loops", kind, folder]
        # The loop's interpreter needs torch and its library alone; the command needs megabatch's extras.
        audit = [sys.executable, "-m", "megabatch", "audit", "--to", f"{folder}/audit", "--", *loop]
        done = subprocess.run(audit, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{kind}: {done.stdout[-500:]}{done.stderr[-1500:]}")
        findings, _ = read_findings(Path(folder, "audit"), kind)
    return row_of(findings, kind, python)


def interpreter_of(kind: str) -> str | None:
    """Return the interpreter that has the library of a loop; None where nobody names it."""
    variable = PEERS[kind].python
    return sys.executable if variable is None else os.environ.get(variable)


def version_of(library: str, python: str) -> str:
    """Return the version of a library where an interpreter finds it."""
    code = f"import importlib.metadata as metadata; print(metadata.version({library!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def row_of(findings: Audit, kind: str, python: str) -> dict[str, Any]:
    """Return what the table and the result say of a loop."""
    weights = [part for update in findings.updates for part in update.weights or [] if part.numel()]
    return {
        "version": version_of(PEERS[kind].library, python),
        "verdict": verdict_of(findings),
        "lightest_token": min((float(part.min()) for part in weights), default=None),
        "heaviest_token": max((float(part.max()) for part in weights), default=None),
        "gradient_error": findings.error("token"),
        "problems": findings.problems,
        "cannot_tell": findings.unknown,
        "trainer": findings.loop.trainer,
        "command": f"{COMMAND} {kind} FOLDER",
    }


def table_of(rows: dict[str, dict[str, Any]]) -> str:
    """Return the table of the page."""
    lines = [
        "| loop | version | verdict | a token weighs | gradient off the token mean |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind, row in rows.items():
        peer = PEERS[kind]
        weight = "cannot tell"
        if row["lightest_token"] is not None:
            least, most = f"{row['lightest_token']:.2f}", f"{row['heaviest_token']:.2f}"
            weight = least if least == most else f"{least} to {most}"
        error = "cannot tell" if row["gradient_error"] is None else percent(row["gradient_error"])
        lines.append(f"| {peer.name} | {peer.library} {row['version']} | {row['verdict']} | {weight} | {error} |")
    return "\n".join(lines)


def write_table(path: Path) -> None:
    """Put the table of a result between the marks of the page."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    before, _, after = PAGE.read_text(encoding="utf-8").partition(START)
    link = f"([result](../benchmarks/results/{path.name}))"
    PAGE.write_text(f"{before}{START}\n{table_of(rows)}\n\n{link}\n\n{END}{after.partition(END)[2]}", encoding="utf-8")


def newest() -> Path:
    """Return the newest result."""
    return max(result.RESULTS.glob("certificate_cpu_*.json"))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the result and the table")
    parser.add_argument("--table", action="store_true", help="write the table of the newest result")
    parser.add_argument("--only", default="", help="kinds of loops, as a regular expression")
    asked = parser.parse_args()
    if not asked.table:
        before = json.loads(newest().read_text(encoding="utf-8"))["rows"]
        rows: dict[str, dict[str, Any]] = {}
        # Rows say the versions of libraries that have an interpreter of their own.
        made = result.made_with({peer.library for peer in PEERS.values() if peer.python is None})
        for kind in PEERS:
            python = interpreter_of(kind)
            if re.search(asked.only, kind) and python is not None:
                rows[kind] = measure(kind, python)
                print(kind, rows[kind]["verdict"], sep=": ", flush=True)
            elif kind in before:
                rows[kind] = before[kind]
        if not asked.write:
            return
        result.write(result.dated("certificate"), {**made, "rows": rows})
    write_table(newest())


if __name__ == "__main__":
    main()

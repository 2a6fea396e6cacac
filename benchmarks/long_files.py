"""Held-out loss of whole files: trained on whole files in chunks, on their first 2,048 tokens, and on packed rows.

Three runs of recipes/stdlib-files.toml on the same files of Python's standard library, for as many updates. The first
cuts files into chunks of 2,048 tokens, with the gradient of whole files. The second trains on their first 2,048 tokens.
The third has rows of 2,048 tokens, which read nothing of earlier rows. Plain transformers evaluates the exported models
on whole held-out files. Writes benchmarks/results/long_files_*.json.

    OMP_NUM_THREADS=1 python -m benchmarks.long_files    # about 110 minutes on one core of a busy machine
"""

import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from benchmarks import result

RECIPE = result.ROOT / "recipes" / "stdlib-files.toml"
LIMIT_TOKENS = 2048
MAX_BYTES = 100_000
NUM_TRAINED, NUM_HELD_OUT = 40, 4
WAYS = ("whole files", "truncated", "packed rows")
CLAIM = "held-out losses of whole files, of a model trained on whole files in chunks and of two that were not"


def choose_files() -> list[Path]:
    """Return files of the standard library's top folder with more tokens than the limit, spread over the alphabet."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    long_files = [path for path in files if LIMIT_TOKENS < path.stat().st_size < MAX_BYTES]
    step = len(long_files) / (NUM_TRAINED + NUM_HELD_OUT)
    return [long_files[int(index * step)] for index in range(NUM_TRAINED + NUM_HELD_OUT)]


def write_files(folder: Path, files: list[Path], *, most_bytes: int | None = None) -> int:
    """Copy files, or their beginnings, to a folder. Return the bytes."""
    folder.mkdir()
    for path in files:
        (folder / path.name).write_bytes(path.read_bytes()[:most_bytes])
    return sum(path.stat().st_size for path in folder.iterdir())


def run_command(*words: object) -> None:
    """Run a command of megabatch. Raises `SystemExit` with its output if it fails."""
    command = [sys.executable, "-m", "megabatch", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=result.ROOT)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])


def train(folder: Path, way: str, data: Path, num_bytes: int) -> tuple[Path, dict[str, Any]]:
    """Train as the recipe says. Return the exported model, and what the run trained on."""
    run, export = folder / way.replace(" ", "-"), folder / f"{way} exported"
    values = {
        "data.path": f"{data}/*.py", "eval.num_samples": 0, "update.global_batch_size": 1,
        "data.cache": folder / "cache", "run.folder": run, "run.device": "cpu",
    }  # fmt: skip
    if way == "packed rows":  # as many updates, of as many tokens
        rows_per_file = num_bytes / LIMIT_TOKENS / NUM_TRAINED
        values |= {"data.pack_tokens": LIMIT_TOKENS, "update.global_batch_size": round(rows_per_file)}
    started = time.perf_counter()
    run_command("train", RECIPE, *(f"--{key}={value}" for key, value in values.items()))
    seconds = time.perf_counter() - started
    run_command("export", run, "--to", export)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "loss" in row]
    return export, {"way": way, "updates": len(updates), "seconds": round(seconds)}


@torch.no_grad()
def evaluate(export: Path, held_out: list[Path]) -> dict[str, Any]:
    """Return the losses per token of whole files, of their first `LIMIT_TOKENS` tokens, and of later ones."""
    model = AutoModelForCausalLM.from_pretrained(export).eval()
    losses = [token_losses(model, path) for path in held_out]
    parts = {
        "whole_files": torch.cat(losses),
        "first_tokens": torch.cat([tokens[: LIMIT_TOKENS - 1] for tokens in losses]),
        "later_tokens": torch.cat([tokens[LIMIT_TOKENS - 1 :] for tokens in losses]),
    }
    return {f"loss_of_{name}": round(float(tokens.mean()), 4) for name, tokens in parts.items()}


def token_losses(model: Any, path: Path) -> torch.Tensor:
    """Return the loss of each byte of a file but the first, [T - 1]. ByT5 counts three tokens before the bytes."""
    tokens = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long() + 3  # [T]
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]  # [T - 1, V]
    return F.cross_entropy(logits.float(), tokens[1:], reduction="none")


def main() -> None:
    found = result.made_with(["transformers"])
    files = choose_files()
    held_out = files[5 :: len(files) // NUM_HELD_OUT]
    trained = [path for path in files if path not in held_out]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, beginnings = folder / "whole", folder / "beginnings"
        num_bytes = write_files(whole, trained)
        write_files(beginnings, trained, most_bytes=LIMIT_TOKENS - 1)  # and the token that ends a document
        for way in WAYS:
            data = beginnings if way == "truncated" else whole
            export, trained_with = train(folder, way, data, num_bytes)
            rows.append(trained_with | evaluate(export, held_out))
            print(rows[-1], flush=True)
    sizes = {path.name: path.stat().st_size for path in held_out}
    found |= {
        "claim": CLAIM, "limit_tokens": LIMIT_TOKENS, "trained_bytes": num_bytes, "longest_bytes": max_bytes(trained),
        "held_out_bytes": sizes, "rows": rows,
    }  # fmt: skip
    print(result.write(result.dated("long_files"), found))


def max_bytes(files: list[Path]) -> int:
    return max(path.stat().st_size for path in files)


if __name__ == "__main__":
    main()

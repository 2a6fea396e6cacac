"""Memory and time of one long sample: in chunks, whole, and whole with activation checkpointing.

Each row is one forward and backward of a small Llama (2 layers of 64, float32) on the CPU, in a process of its own.
Memory is the high-water mark of resident memory (VmHWM, reset before the update) above what was resident before the
update. Seconds are CPU seconds. Writes benchmarks/results/long_samples_*.json.

    python -m benchmarks.long_samples                   # 1k to 64k tokens, about ten minutes
    python -m benchmarks.long_samples 2048 8192           # these lengths instead
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import result
from megabatch import GradientAccumulator, losses
from megabatch.batching import InsideSamples

LENGTHS = (1024, 4096, 16384, 65536)
CHUNK_TOKENS = 512
WHOLE_AT_MOST = 16384  # tokens that are also measured without chunks
WAYS = ("chunks", "whole", "checkpointing")
MEBIBYTE = 2**20
CLAIM = "a sample in chunks takes the memory of one chunk and of its keys and values, for one more forward"


def model_of(*, checkpoints: bool) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=256, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=131072,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train()
    if checkpoints:
        model.gradient_checkpointing_enable()
    return model


def resident(name: str) -> int:
    """Bytes that the kernel says of this process: VmRSS now, VmHWM at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def measure(way: str, length: int) -> dict[str, Any]:
    """Run one update in this process. Return MiB above the start, CPU seconds and the norm of the gradient."""
    model = model_of(checkpoints=way == "checkpointing")
    options: dict[str, Any] = {"micro_batch_size": 1}
    if way == "chunks":
        options = {"max_microbatch_tokens": CHUNK_TOKENS, "batching": InsideSamples()}
    gradient = GradientAccumulator(model, **options)
    ids = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(1))
    # Allocates gradients and loads kernels, which are no part of the sample's memory.
    gradient.forward_backward([{"input_ids": ids[:64], "labels": ids[:64]}], losses.next_token)
    gradient.finalize()
    Path("/proc/self/clear_refs").write_text("5")
    before, start = resident("VmRSS"), time.process_time()
    gradient.forward_backward([{"input_ids": ids, "labels": ids}], losses.next_token)
    update = gradient.finalize(max_norm=1e9)
    seconds, most = time.process_time() - start, resident("VmHWM")
    assert update.grad_norm is not None
    return {"way": way, "tokens": length, "mebibytes": round((most - before) / MEBIBYTE), "seconds": round(seconds, 2),
            "norm": float(update.grad_norm)}  # fmt: skip


def measured_apart(way: str, length: int) -> dict[str, Any]:
    """Return `measure` of a fresh process."""
    command = [sys.executable, "-m", "benchmarks.long_samples", "--one", way, str(length)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=result.ROOT)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        torch.set_num_threads(1)
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
        return
    about = result.made_with(["transformers"])
    lengths = [int(word) for word in sys.argv[1:]] or LENGTHS
    rows: list[dict[str, Any]] = []
    for length in lengths:
        for way in WAYS if length <= WHOLE_AT_MOST else WAYS[:1]:
            row = measured_apart(way, length)
            rows.append(row)
            print(f"{row['tokens']:>6} tokens, {way:<13} {row['mebibytes']:>5} MiB  {row['seconds']:>7} s", flush=True)
        norms = [row["norm"] for row in rows if row["tokens"] == length]
        assert max(norms) - min(norms) < 1e-4 * max(norms), norms
    if lengths == LENGTHS:
        found = {**about, "claim": CLAIM, "chunk_tokens": CHUNK_TOKENS, "rows": rows}
        print(result.write(result.dated("long_samples"), found))


if __name__ == "__main__":
    main()

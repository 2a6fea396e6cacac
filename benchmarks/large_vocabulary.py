"""What `losses.next_token` takes of memory and time beside the same loss of all logits, on a small Llama on the CPU.

One microbatch forward and backward, when every parameter has a gradient already. Peaks are those of torch's allocator,
beyond what was there before; seconds are of this process's CPU, medians of interleaved repeats; gradients are compared.
Writes benchmarks/results/large_vocabulary_*.json.

    python -m benchmarks.large_vocabulary       # some five minutes
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import result
from megabatch import losses
from megabatch.autotune.memory import measure_memory

MEGABYTE = 10**6
CPU = torch.device("cpu")
NUM_REPEATS = 3
MAX_ROWS = 512
Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


class Size(NamedTuple):
    vocabulary: int
    rows: int
    tokens: int  # of a row
    prompt: float  # share of a row that has no targets
    hidden: int = 256
    layers: int = 2
    dtype: str = "float32"


SIZES = [
    Size(384, 192, 128, 0.5, hidden=64, layers=1),
    Size(384, 192, 128, 0.0, hidden=64, layers=1),
    Size(8_192, 16, 128, 0.5),
    Size(8_192, 16, 128, 0.0),
    Size(32_000, 16, 128, 0.5),
    Size(32_000, 16, 128, 0.0),
    Size(32_000, 16, 128, 0.5, dtype="bfloat16"),
    Size(64_000, 16, 128, 0.5),
    Size(64_000, 16, 128, 0.0),
]


def of_all_logits(model: nn.Module, batch: Batch) -> Tensor:
    """As one writes it in plain torch."""
    logits = model(batch["input_ids"]).logits[:, :-1]  # [B, T - 1, V]
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def of_next_token(model: nn.Module, batch: Batch) -> Tensor:
    return losses.next_token(model, batch).total


LOSSES: dict[str, Loss] = {"logits": of_all_logits, "next_token": of_next_token}


def llama(size: Size) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers, num_attention_heads=4, use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).to(getattr(torch, size.dtype))


def batch_of(size: Size) -> Batch:
    ids = torch.randint(size.vocabulary, (size.rows, size.tokens), generator=torch.Generator().manual_seed(1))
    is_prompt = torch.arange(size.tokens) < size.prompt * size.tokens
    return {"input_ids": ids, "labels": ids.masked_fill(is_prompt, -100)}


def peak_bytes(model: nn.Module, loss: Loss, batch: Batch) -> float:
    with measure_memory(CPU) as needed:
        loss(model, batch).backward()
    return needed.peak_bytes


def seconds(model: nn.Module, loss: Loss, batch: Batch) -> float:
    start = time.process_time()
    loss(model, batch).backward()
    return time.process_time() - start


def gradient(model: nn.Module, loss: Loss, batch: Batch) -> Tensor:
    model.zero_grad()
    loss(model, batch).backward()
    return torch.cat([each.grad.double().flatten() for each in model.parameters() if each.grad is not None])


def compare(size: Size) -> dict[str, Any]:
    """Both losses on one model and batch."""
    model, batch = llama(size), batch_of(size)
    gradients = [gradient(model, loss, batch) for loss in LOSSES.values()]
    peaks = {name: peak_bytes(model, loss, batch) for name, loss in LOSSES.items()}
    times: dict[str, list[float]] = {name: [] for name in LOSSES}
    for repeat in range(NUM_REPEATS):
        for name in sorted(LOSSES, reverse=bool(repeat % 2)):
            times[name].append(seconds(model, LOSSES[name], batch))
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {
        **size._asdict(),
        **{f"{name}_peak_bytes": peak for name, peak in peaks.items()},
        **{f"{name}_seconds": round(median, 4) for name, median in medians.items()},
        "peak_ratio": round(peaks["next_token"] / peaks["logits"], 4),
        "seconds_ratio": round(medians["next_token"] / medians["logits"], 4),
        "gradients_differ": float((gradients[0] - gradients[1]).norm() / gradients[0].norm()),
        "rows_in_the_same_memory": rows_within(size, model, peaks["logits"]),
    }


def rows_within(size: Size, model: nn.Module, limit_bytes: float) -> int:
    """The largest doubling of the rows whose peak is no higher."""
    rows = size.rows
    while rows < MAX_ROWS and peak_bytes(model, of_next_token, batch_of(size._replace(rows=2 * rows))) <= limit_bytes:
        rows *= 2
    return rows


def main() -> None:
    torch.set_num_threads(1)
    made_with = result.made_with(["transformers"])
    rows: list[dict[str, Any]] = []
    for size in SIZES:
        row = compare(size)
        rows.append(row)
        peaks = "  ".join(f"{row[f'{name}_peak_bytes'] / MEGABYTE:7.0f} MB" for name in LOSSES)
        spent = "  ".join(f"{row[f'{name}_seconds']:6.2f} s" for name in LOSSES)
        print(
            f"V {size.vocabulary:6}  prompt {size.prompt}  {size.dtype:8}  {peaks}  {row['peak_ratio']:.2f}  "
            f"{spent}  {row['seconds_ratio']:.2f}  gradients {row['gradients_differ']:.0e}  "
            f"rows {size.rows} -> {row['rows_in_the_same_memory']}",
            flush=True,
        )
    found = {
        "claim": "next_token without all logits takes less memory and no more time than with them",
        **made_with,
        "threads": 1,
        "rows": rows,
        "repeats": NUM_REPEATS,
    }
    print(result.write(result.dated("large_vocabulary"), found))


if __name__ == "__main__":
    main()

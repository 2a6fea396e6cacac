"""The cost of the same bits: CPU time, memory and bytes reduced of ``same_bits`` beside sums in float32.

One process trains one small Llama of ten million parameters. Updates of four microbatches alternate strictly between
the grades, and so does their order. Only CPU time of the one thread counts, of `forward_backward` and `finalize` with a
clip. The ratio is that of medians; its interval is bootstrapped over updates. Memory is the bytes of ``p.grad`` between
two calls. Bytes reduced are those of every all-reduce and reduce-scatter that two ranks begin in an update. Writes
benchmarks/results/same_bits_*.json.

    python -m benchmarks.same_bits            # two minutes
"""

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import result
from megabatch import GradientAccumulator, losses
from megabatch.planners import Rows, SameBits
from tests.comm.counting import Collectives


def unchanged(limit: Rows) -> Rows:
    """Return the planner of sums in float32."""
    return limit


GRADES: dict[str, Callable[[Rows], Any]] = {"float32": unchanged, "float64": SameBits}
NUM_UPDATES = {256: 16, 2048: 4}  # by tokens of a microbatch
NUM_MICROBATCHES, WARMUP, NUM_RESAMPLES = 4, 1, 4000


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 2048, "hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 5, "max_position_embeddings": 512}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def batch_of(tokens: int) -> tuple[dict[str, torch.Tensor], Rows]:
    """An update, and the limit that cuts it: rows of 256 tokens."""
    rows = tokens // 256
    ids = torch.randint(0, 2048, (rows * NUM_MICROBATCHES, 256), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}, Rows(rows)


def bytes_of_gradients(model: nn.Module) -> int:
    return sum(each.grad.numel() * each.grad.element_size() for each in model.parameters() if each.grad is not None)


def compare(tokens: int) -> dict[str, Any]:
    """CPU milliseconds of an update in each grade, and ratios to float32 with their intervals."""
    batch, limit = batch_of(tokens)
    model = new_model()
    gradients = {name: GradientAccumulator(model, planner=grade(limit)) for name, grade in GRADES.items()}
    times: dict[str, list[float]] = {name: [] for name in GRADES}
    memory: dict[str, int] = {}
    num_updates = NUM_UPDATES[tokens]
    for update in range(WARMUP + num_updates):
        for name in list(GRADES)[:: -1 if update % 2 else 1]:
            gc.collect()
            start = time.thread_time()
            gradients[name].forward_backward(batch, losses.next_token)
            seconds = time.thread_time() - start
            memory[name] = bytes_of_gradients(model)
            start = time.thread_time()
            gradients[name].finalize(max_norm=1.0)
            times[name].append(seconds + time.thread_time() - start)
    kept = {name: np.array(each[WARMUP:]) for name, each in times.items()}
    chosen = np.random.default_rng(0).integers(num_updates, size=(NUM_RESAMPLES, num_updates))
    resampled = {name: np.median(each[chosen], axis=1) for name, each in kept.items()}
    medians = {name: float(np.median(each)) for name, each in kept.items()}
    return {
        name: {
            "ms": round(1000 * medians[name], 2),
            "ratio": round(medians[name] / medians["float32"], 4),
            "ratio_95_percent": np.quantile(resampled[name] / resampled["float32"], [0.025, 0.975]).round(4).tolist(),
            "bytes_of_gradients": memory[name],
        }
        for name in GRADES
    }


def count_reduced(rank: int, wrapper: str, folder: str) -> None:
    """Write the bytes that a rank of two gives to reductions in an update of two microbatches each, by grade."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    torch.set_num_threads(1)
    batch, limit = batch_of(256)
    rows = {key: value[2 * rank : 2 * rank + 2] for key, value in batch.items()}
    for name, grade in GRADES.items():
        model: nn.Module = new_model()
        if wrapper == "ddp":
            model = DistributedDataParallel(model)
        else:
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float64 if name == "float64" else None)
            for layer in [*model.model.layers, model]:
                fully_shard(layer, mp_policy=policy)
        gradient = GradientAccumulator(model, planner=grade(limit))
        with Collectives() as counted:
            gradient.forward_backward(rows, losses.next_token)
            gradient.finalize(max_norm=1.0)
        if rank == 0:
            reduced = sum(size for kind, size in counted.seen if kind in ("all_reduce", "reduce_scatter"))
            Path(f"{folder}/{name}").write_text(str(reduced))
    dist.destroy_process_group()


def reduced_bytes(wrapper: str) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(count_reduced, (wrapper, folder), nprocs=2)
        return {name: int(Path(f"{folder}/{name}").read_text()) for name in GRADES}


def main() -> None:
    """Run, print and write the result beside what it was measured with."""
    torch.set_num_threads(1)
    gc.disable()
    made_with = result.made_with(["transformers"])
    reduced = {wrapper: reduced_bytes(wrapper) for wrapper in ("ddp", "fsdp2")}
    rows = {str(tokens): compare(tokens) for tokens in NUM_UPDATES}
    for tokens, row in rows.items():
        for name, each in row.items():
            low, high = each["ratio_95_percent"]
            print(f"{tokens} tokens, {name}: {each['ms']:.1f} ms, {each['ratio']:.3f} ({low:.3f} to {high:.3f})")
    print(reduced)
    claim = "CPU time, bytes of gradients and bytes reduced of same_bits, beside sums in float32"
    num_parameters = sum(map(torch.numel, new_model().parameters()))
    found = {"claim": claim, **made_with, "threads": 1, "num_parameters": num_parameters, "updates": NUM_UPDATES,
             "microbatches": NUM_MICROBATCHES, "rows": rows, "bytes_reduced_of_two_ranks": reduced}  # fmt: skip
    print(result.write(result.dated("same_bits"), found))


if __name__ == "__main__":
    main()

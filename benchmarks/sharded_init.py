"""What memory a rank needs to make a model of a billion parameters: plain, and sharded over two ranks.

Each rank is a process of its own on the CPU; its high-water mark of resident memory (VmHWM, reset before) is read when
the model has its weights, and again after a forward. Writes benchmarks/results/sharded_init_*.json.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import result
from megabatch.train.config import Config
from megabatch.train.model.build import choose_source, lay, try_forward
from megabatch.train.runtime.ranks import Ranks

GIGABYTE = 10**9
MODEL = {
    "model_type": "llama", "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 17, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 2048,
}  # fmt: skip
CASES = {"plain": (1, None), "fsdp2 on 2 ranks": (2, "fsdp2")}


def recipe(wrapper: str | None, layers: int) -> Config:
    return Config.model_validate(
        {
            "model": {"config": {**MODEL, "num_hidden_layers": layers}},
            "update": {"global_batch_size": 1},
            "run": {"folder": "unused"},
            "parallel": {"wrapper": wrapper},
        }
    )


def memory_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure(config: Config, ranks: Ranks) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")
    before, start = memory_bytes("VmRSS"), time.perf_counter()
    source, wrapper = choose_source(config, ranks, None, None)
    lay(source, config, wrapper, ranks)
    seconds, made = time.perf_counter() - start, memory_bytes("VmHWM")
    try_forward(source.model, config.model, ranks.device)
    num_parameters = sum(each.numel() for each in source.model.parameters())
    largest = max(each.numel() for each in source.model.parameters())
    return {
        "num_parameters": num_parameters,
        "model_gb": num_parameters * 4 / GIGABYTE,
        "largest_tensor_gb": largest * 4 / GIGABYTE,
        "before_gb": before / GIGABYTE,
        "high_water_with_weights_gb": made / GIGABYTE,
        "growth_with_weights_gb": (made - before) / GIGABYTE,
        "growth_after_forward_gb": (memory_bytes("VmHWM") - before) / GIGABYTE,
        "seconds": seconds,
    }


def rank_main(rank: int, num_ranks: int, wrapper: str | None, store: str, results: Any) -> None:
    """A rank's whole life; a small model first, so that what is loaded once is loaded."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    ranks = Ranks(rank, num_ranks, torch.device("cpu"))
    small = recipe(wrapper, 1).model.model_copy(update={"config": {**MODEL, "hidden_size": 64, "num_hidden_layers": 1}})
    measure(recipe(wrapper, 1).model_copy(update={"model": small}), ranks)
    results.put((rank, measure(recipe(wrapper, MODEL["num_hidden_layers"]), ranks)))
    dist.barrier()
    dist.destroy_process_group()


def run_case(num_ranks: int, wrapper: str | None, folder: Path) -> list[dict[str, Any]]:
    results = mp.get_context("spawn").SimpleQueue()
    store = folder / f"store_{num_ranks}_{time.time_ns()}"
    context = mp.spawn(rank_main, (num_ranks, wrapper, str(store), results), nprocs=num_ranks, join=False)
    found = [results.get() for _ in range(num_ranks)]
    context.join()
    store.unlink(missing_ok=True)
    return [row for _, row in sorted(found, key=lambda each: each[0])]


def main() -> None:
    made_with = result.made_with(["transformers"])
    with tempfile.TemporaryDirectory() as folder:
        rows = {name: run_case(*case, Path(folder)) for name, case in CASES.items()}
    found = {
        "claim": "while it gets weights, a rank of a sharded model holds its shard and one block, never the whole",
        **made_with,
        "threads_a_rank": 1,
        "rows": rows,
    }
    print(result.write(result.dated("sharded_init"), found).read_text())


if __name__ == "__main__":
    main()

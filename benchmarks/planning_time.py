"""CPU seconds of `megabatch plan` for six models and four numbers of ranks, each in a process of its own.

    python -m benchmarks.planning_time                    # about ten minutes of one core
    python -m benchmarks.planning_time --ranks 64         # a part, of which nothing is written

Every model has FSDP2 on H100 and four samples of 4,096 tokens for each rank.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks import result

LENGTH_TOKENS, SAMPLES_PER_RANK = 4096, 4
RANKS = [8, 64, 1024, 4096]
LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
QWEN = {"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
ROUTED = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": QWEN | {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
                          "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072,
                          "tie_word_embeddings": True},
    "Llama-3.1-8B": LLAMA | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                             "intermediate_size": 14336},
    "Llama-3.1-70B": LLAMA | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
                              "intermediate_size": 28672},
    "Llama-3.1-405B": LLAMA | {"hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128,
                               "intermediate_size": 53248},
    "Qwen3-30B-A3B": QWEN | ROUTED | {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
                                      "num_key_value_heads": 4, "intermediate_size": 6144},
    "DeepSeek-V3": {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
                    "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
                    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
                    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
                    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
                    "v_head_dim": 128, "vocab_size": 129280, "max_position_embeddings": 163840},
}  # fmt: skip


def plan(model: str, ranks: int) -> dict[str, Any]:
    """Plan a model on so many H100 with FSDP2, and return the CPU seconds and the best row."""
    recipe = {
        "model": {"config": MODELS[model], "dtype": "bfloat16"},
        "data": {"path": "none", "pack_tokens": LENGTH_TOKENS},
        "update": {"global_batch_size": SAMPLES_PER_RANK * ranks},
        "parallel": {"wrapper": "fsdp2"},
        "run": {"folder": "none"},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.toml")
        path.write_text(tomli_w.dumps(recipe))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "megabatch", "plan", path, "--world", str(ranks), "--device", "h100", "--json"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"a plan failed: {done.stderr}")
    rows = json.loads(done.stdout)
    return {
        "model": model,
        "ranks": ranks,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "num_rows": len(rows),
        "best": rows[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=RANKS)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in asked.models:
        for ranks in asked.ranks:
            rows.append(plan(model, ranks))
            print(f"{model:15} {ranks:5} ranks: {rows[-1]['cpu_seconds']:6.1f} CPU s, {rows[-1]['best']}", flush=True)
    if (asked.ranks, asked.models) == (RANKS, list(MODELS)):
        claim = "CPU seconds of a plan, by model and ranks"
        print(result.write(result.dated("planning_time"), {"claim": claim, **result.made_with(), "rows": rows}))


if __name__ == "__main__":
    main()

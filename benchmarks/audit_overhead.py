"""CPU seconds of updates that `megabatch.audit` watches, beside the same updates unwatched.

    python -m benchmarks.audit_overhead               # two minutes; writes benchmarks/results/audit_overhead_*.json
    python -m benchmarks.audit_overhead --quick       # small, to see that it works; writes nothing

One process with one thread, a small Llama with a vocabulary of 8192, four microbatches of 4 x 256 tokens an update.
Watched and unwatched updates take turns. Times are those that the processor gave to the process. Weights are compared
bit by bit.
"""

import argparse
import copy
import statistics
import time
from typing import Any

import torch
from torch import nn

import megabatch
from benchmarks import result

CLAIM = "an update that an audit watches takes up to 1.3 times its CPU time; the others take what they took"
NUM_UPDATES, NUM_REPEATS, NUM_MICROBATCHES = 3, 3, 4
ROWS, TOKENS, VOCABULARY = 4, 256, 8192


def build(width: int) -> nn.Module:
    """A Llama of 7 million parameters at the full width."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCABULARY, hidden_size=width, intermediate_size=688, num_hidden_layers=4,
        num_attention_heads=4, use_cache=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def updates(model: nn.Module, tokens: torch.Tensor, number: int) -> float:
    """CPU seconds of updates in plain torch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = time.process_time()
    for _ in range(number):
        for _ in range(NUM_MICROBATCHES):
            (model(input_ids=tokens, labels=tokens).loss / NUM_MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.process_time() - start


def watched(model: nn.Module, tokens: torch.Tensor, number: int, num_watched: int) -> float:
    """CPU seconds of updates of which the first are watched."""
    with megabatch.audit(model, updates=num_watched) as found:
        seconds = updates(model, tokens, number)
    assert len(found.updates) == num_watched
    assert found.ok, str(found)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    made_with = result.made_with(["transformers"])
    model = build(64 if quick else 256)
    tokens = torch.randint(0, VOCABULARY, (ROWS, 16 if quick else TOKENS))
    updates(copy.deepcopy(model), tokens, 1)  # what the first update makes once
    rows: list[dict[str, Any]] = []
    for _ in range(1 if quick else NUM_REPEATS):
        models = [copy.deepcopy(model) for _ in range(3)]
        plain = updates(models[0], tokens, NUM_UPDATES)
        first = watched(models[1], tokens, NUM_UPDATES, NUM_UPDATES)
        after = watched(models[2], tokens, NUM_UPDATES, 1)
        same = all(map(torch.equal, models[0].parameters(), models[1].parameters()))
        rows.append({
            "unwatched_s": round(plain, 2), "watched_s": round(first, 2), "one_watched_of_three_s": round(after, 2),
            "watched_over_unwatched": round(first / plain, 2), "bit_equal": same,
        })  # fmt: skip
        print(rows[-1], flush=True)
    ratio = statistics.median(row["watched_over_unwatched"] for row in rows)
    print(f"watched updates take {ratio:.2f} times their CPU time")
    if not quick:
        size = sum(each.numel() for each in model.parameters())
        setting = {"parameters": size, "vocabulary": VOCABULARY, "microbatches": NUM_MICROBATCHES, "rows": ROWS,
                   "tokens": TOKENS, "updates": NUM_UPDATES, "threads": 1}  # fmt: skip
        whole = {"claim": CLAIM, **made_with, "setting": setting, "rows": rows, "median_ratio": ratio}
        print(result.write(result.dated("audit_overhead"), whole))


if __name__ == "__main__":
    main()

"""Compare the search of `megabatch plan` with simulating every choice.

    python -m benchmarks.plan_search                      # half an hour of one core
    python -m benchmarks.plan_search --recipes 2          # a part, of which nothing is written

Sixteen recipes with ten memory limits each, from the least that any choice needs to the most that one does.
"""

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import result
from benchmarks.planning_time import MODELS
from megabatch.simulate import Simulated
from megabatch.train.config import Config
from megabatch.train.plan.grid import Choice
from megabatch.train.plan.request import read_request
from megabatch.train.plan.search import YES, PlanRow, run_simulation, search_choices, sort_rows
from megabatch.train.plan.simulation import LongestSample, Simulator, build_simulator, find_longest_sample
from megabatch.train.runtime.console import Console

LENGTH_TOKENS, NUM_LIMITS, NUM_UPDATES = 2048, 10, 4
TINY = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 12, "intermediate_size": 128,
        "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 8192}  # fmt: skip
SMALL = MODELS["Qwen3-0.6B"] | {"tie_word_embeddings": False}
LARGE, ROUTED = MODELS["Llama-3.1-8B"], MODELS["Qwen3-30B-A3B"]
BF16, BY_TOKENS = {"model": {"dtype": "bfloat16"}}, {"update": {"max_microbatch_tokens": 3 * LENGTH_TOKENS}}
RECIPES: dict[str, tuple[dict[str, Any], int, str, dict[str, Any]]] = {  # model, ranks, device, keys
    "small, one process": (SMALL, 1, "a100", {}),
    "small, one process, ragged": (SMALL, 1, "h100", BF16 | BY_TOKENS),
    "small, DDP": (SMALL, 8, "h100", {"parallel": {"wrapper": "ddp"}}),
    "small, FSDP2": (SMALL, 8, "a100-40g", {"parallel": {"wrapper": "fsdp2"}}),
    "small, FSDP2, RTX 4090": (SMALL, 4, "rtx4090", BF16 | {"parallel": {"wrapper": "fsdp2"}}),
    "small, one process, compiled": (SMALL, 1, "h100", {"model": {"dtype": "bfloat16", "compile": True}}),
    "tiny, CPU": (TINY, 1, "cpu", {}),
    "tiny, CPU, ragged": (TINY, 1, "cpu", BY_TOKENS),
    "tiny, FSDP2, CPU": (TINY, 2, "cpu", {"parallel": {"wrapper": "fsdp2"}}),
    "8B, FSDP2": (LARGE, 8, "h100", BF16 | {"parallel": {"wrapper": "fsdp2"}}),
    "8B, FSDP2, ragged": (LARGE, 8, "h100", BF16 | BY_TOKENS | {"parallel": {"wrapper": "fsdp2"}}),
    "8B, FSDP2, 256 ranks": (LARGE, 256, "a100", {"parallel": {"wrapper": "fsdp2"}}),
    "8B, HSDP": (LARGE, 32, "a100", BF16 | {"parallel": {"wrapper": "fsdp2", "dp_replicate": 4}}),
    "8B, FSDP2 with TP": (LARGE, 8, "h200", BF16 | {"parallel": {"wrapper": "fsdp2", "tp": 2}}),
    "8B, FSDP2, offload": (LARGE, 8, "a100-40g", BF16 | {"parallel": {"wrapper": "fsdp2", "cpu_offload": True}}),
    "30B of 128 experts, FSDP2": (ROUTED, 16, "h100", BF16 | {"parallel": {"wrapper": "fsdp2"}}),
}
SAMPLES_PER_RANK = 8


@dataclass(frozen=True)
class RememberingSimulator(Simulator):
    """A recipe whose choices are simulated once each."""

    simulated: dict[Choice, Simulated] = field(default_factory=dict[Choice, Simulated])

    def simulate(self, choice: Choice) -> Simulated:
        if choice not in self.simulated:
            self.simulated[choice] = super().simulate(choice)
        return self.simulated[choice]


def build(name: str) -> RememberingSimulator:
    """Return a recipe, ready to be simulated; ragged ones have lengths from a log-normal distribution."""
    model, world, device, keys = RECIPES[name]
    config = Config.model_validate({
        "data": {"path": "none"},
        "parallel": keys.get("parallel", {}),
        "model": {"config": model, **keys.get("model", {})},
        "update": {"global_batch_size": SAMPLES_PER_RANK * world, **keys.get("update", {})},
        "run": {"folder": "none"},
    })  # fmt: skip
    request = read_request([("world", str(world)), ("device", device), ("length", str(LENGTH_TOKENS))], [])
    console = Console(enabled=False, loss_digits=4)
    found = find_longest_sample(config, LENGTH_TOKENS, console)
    lengths = np.random.default_rng(0).lognormal(6.0, 0.8, (NUM_UPDATES, SAMPLES_PER_RANK * world))
    updates = tuple(tuple(int(each) for each in row) for row in lengths.clip(8, LENGTH_TOKENS))
    sample = LongestSample(found.fields, found.length_tokens, found.source, updates=updates if "ragged" in name else ())
    simulator = build_simulator(config, request, console, sample)
    return RememberingSimulator(**{each.name: getattr(simulator, each.name) for each in fields(simulator)})


def compare(simulator: RememberingSimulator) -> dict[str, Any]:
    """Return how often a search finds the best choice, and how much slower its choice is where it does not."""
    choices = simulator.grid.choices()
    rows = [run_simulation(simulator, 2**62, choice) for choice in choices]
    most, least = max(row.margined_bytes for row in rows), min(row.margined_bytes for row in rows)
    slower: list[float] = []
    num_simulated: list[int] = []
    for limit in np.linspace(least, most, NUM_LIMITS).astype(int).tolist():
        every = [run_simulation(simulator, limit, choice) for choice in choices]
        best = sort_rows(every)[0]
        found: list[PlanRow] = search_choices([simulator], limit, lambda _: None)
        assert found[0].fits == best.fits == YES
        slower.append(found[0].seconds / best.seconds - 1)
        num_simulated.append(sum(row.by == "simulation" for row in found))
    return {
        "choices": len(choices),
        "simulated": num_simulated,
        "found": sum(each < 1e-9 for each in slower),
        "slower": slower,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", type=int, default=len(RECIPES))
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in list(RECIPES)[: asked.recipes]:
        rows.append({"recipe": name, **compare(build(name))})
        print(f"{name:32} {rows[-1]['found']} of {NUM_LIMITS}, worst {max(rows[-1]['slower']):.2%}", flush=True)
    num_found, worst = sum(row["found"] for row in rows), max(max(row["slower"]) for row in rows)
    print(f"{num_found} of {NUM_LIMITS * len(rows)} searches find the best choice; the worst is {worst:.2%} slower")
    if asked.recipes == len(RECIPES):
        claim = (
            f"{num_found} of {NUM_LIMITS * len(rows)} searches find the best choice that simulating all of them finds"
        )
        path: Path = result.write(result.dated("plan_search"), {"claim": claim, **result.made_with(), "rows": rows})
        print(path)


if __name__ == "__main__":
    main()

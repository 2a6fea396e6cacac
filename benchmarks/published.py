"""Eight A100-80GB, CodeLlama-34B and Mixtral-8x7B, tuned whole: what the plan says, beside what was published.

Published in March 2024 with huggingface/transformers' report 29425 (FSDP of that time, accelerate): an update of one
microbatch fits, of two or more without a reduction at each runs out of memory, and with one at each takes what one
microbatch takes. accelerate's page "Gradient synchronization" prints other levels of the same runs. Not published, and
assumed here: samples of 2048 tokens, activations recomputed, bfloat16 parameters and states, foreach AdamW. Nothing is
measured on a GPU. ``--report`` writes benchmarks/results/published_*.json.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, optim

from benchmarks import result
from megabatch.train.config.byte_sizes import GIB
from megabatch.train.config.recipe import load_config
from megabatch.train.model.architecture import quiet
from megabatch.train.plan.grid import Choice
from megabatch.train.plan.request import read_request
from megabatch.train.plan.search import simulated_row
from megabatch.train.plan.simulation import Simulator, build_simulator
from megabatch.train.runtime.console import Console

PROCESSES = 2  # each takes a core, and half a GiB
ARGUMENTS = ["--world", "8", "--device", "a100-80g", "--memory", "80GiB"]
ROUNDED = ["--optim.master=none", "--optim.state_dtype=none"]  # bfloat16 weights and states, as theirs were
OPTIMIZERS = {
    "AdamW": ["--optim.options.fused=false", "--optim.options.foreach=true", *ROUNDED],
    "8-bit AdamW": [f"--optim.function={Path(__file__).resolve()}:eight_bit", *ROUNDED],
}
CASES = {1: ("every", "1"), 2: ("last", "2, held back"), 16: ("every", "16, reduced at each")}
RUN = {"AdamW": [1, 2, 16], "8-bit AdamW": [16]}
PUBLISHED = {  # GB by model, optimizer and microbatches; None: out of memory
    ("codellama-34b", "AdamW", 1): [55],
    ("codellama-34b", "AdamW", 2): [None],
    ("codellama-34b", "AdamW", 16): [55],
    ("mixtral-8x7b", "AdamW", 1): [79, 69],
    ("mixtral-8x7b", "AdamW", 2): [None, None],
    ("mixtral-8x7b", "AdamW", 16): [80, 69],
    ("mixtral-8x7b", "8-bit AdamW", 16): [66],
}
BLOCK = 256  # numbers that share a scale


class EightBit(optim.Optimizer):
    """What an 8-bit AdamW keeps: two bytes a number, and two scales a block. It moves as SGD does."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    weight, gradient = (local(each) for each in (parameter, parameter.grad))
                    if not self.state[parameter]:
                        self.state[parameter] = states(weight)
                    weight.add_(gradient, alpha=-group["lr"])


def states(weight: Tensor) -> dict[str, Tensor]:
    """Two moments in eight bits, and their scales."""
    scales = -(-weight.numel() // BLOCK)
    moments = {name: torch.zeros_like(weight, dtype=torch.uint8) for name in ("first", "second")}
    return moments | {f"{name}_scale": weight.new_zeros(scales, dtype=torch.float32) for name in moments}


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def eight_bit(groups: list[dict[str, Any]], lr: float) -> EightBit:
    """As optim.function has it."""
    return EightBit(groups, {"lr": lr})


def subject(model: str, optimizer: str) -> Simulator:
    asked = read_request([*ARGUMENTS, *OPTIMIZERS[optimizer]])
    config = load_config(result.ROOT / "recipes" / f"{model}.toml", list(asked.overrides))
    return build_simulator(config, asked, Console(enabled=False, loss_digits=4))


def row(model: str, optimizer: str, microbatches: int) -> dict[str, Any]:
    """One case, simulated."""
    what, sync = subject(model, optimizer), CASES[microbatches][0]
    found = what.simulate(Choice(1, microbatches, sync, reshard=True, recompute=True, fused=False))
    limit_bytes = read_request(ARGUMENTS).limit_bytes
    said = simulated_row(Choice(1, microbatches, sync, True, True, False), found, limit_bytes, 2048)
    return {
        "model": model,
        "optimizer": optimizer,
        "num_microbatches": microbatches,
        "sync": sync,
        "fits": said.fits,
        "why": said.why,
        "peak_bytes": said.peak_bytes,
        "peak_bytes_by_category": said.at_peak,
        "peak_phase": said.where,
        "reserved_bytes": said.reserved_bytes,
        "wire_bytes": said.sent_bytes,
        "seconds": said.seconds,
        "published_gb": PUBLISHED.get((model, optimizer, microbatches), []),
    }


def quiet_row(case: tuple[str, str, int]) -> dict[str, Any]:
    """One case, in a process that has others before and after it."""
    with quiet():
        return row(*case)


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    published = " or ".join("out of memory" if each is None else f"{each} GB" for each in found["published_gb"])
    return (
        f"{found['model']:14} {found['optimizer']:12} {CASES[found['num_microbatches']][1]:20} {found['fits']:6} "
        f"{found['peak_bytes'] / GIB:7.1f} {found['reserved_bytes'] / GIB:9.1f}   {published or 'not published'}"
    )


def main() -> None:
    """Run, print and write the result beside what it was made with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", action="store_true", help="write the result file")
    report = parser.parse_args().report
    print("model          optimizer    microbatches         fits   peak GiB reserved   published")
    models = ("codellama-34b", "mixtral-8x7b")
    cases = [(model, optimizer, number) for model in models for optimizer in OPTIMIZERS for number in RUN[optimizer]]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as processes:
        for found in processes.map(quiet_row, cases):
            rows.append(found)
            print(line(found), flush=True)
    if report:
        print(result.write(result.dated("published"), of(rows)))


def of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "claim": "what fits on eight GPUs of 80 GiB, and what does not, is said before there is one",
        **result.made_with(["transformers"]),
        "rows": rows,
        "limit_bytes": read_request(ARGUMENTS).limit_bytes,
        "assumed": "samples of 2048 tokens, activations recomputed, bfloat16 parameters and states, foreach AdamW",
    }


if __name__ == "__main__":
    main()

"""With one microbatch an update has no pass over the gradients: what a pass costs, and what a step without it.

torchtune's recipes differentiate the mean times the number of target tokens, then multiply every gradient by the
number's reciprocal. torchtune measured 42.5 ms of an 800 ms step for that: Llama 8B in bfloat16 on an H100.
`GradientAccumulator` scales the loss, and has nothing to do in `finalize`.

In one process, on one model and batch, in turns: torchtune's loop (without the sum over ranks, as there is one),
megabatch, plain PyTorch without a pass as the floor, and the pass alone, tensor by tensor (by a number that is on the
device, as there) and as one foreach (by one of the host's, as other types take its slow way). The batch comes from the
host, no optimizer steps, times are medians of a synchronized clock. Gradients are compared first.

    python -m benchmarks.needless_pass         # on a GPU of 80 GiB: Llama 8B, minutes; on the CPU a small one

Writes benchmarks/results/needless_pass_*.json. Ends with status 1 where gradients disagree.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import hardware, result
from benchmarks.llama import Shape, llama
from benchmarks.turns import TOLERANCES, Way, difference, gradients, medians, write
from megabatch import GradientAccumulator, losses
from megabatch.torch_private.loss_nodes import IGNORED_LABEL

CLAIM = "with one microbatch an update has no pass over the gradients"
Batch = dict[str, Tensor]


class Size(NamedTuple):
    shape: Shape
    rows: int
    tokens: int  # of a row
    dtype: torch.dtype
    repeats: int


SIZES = {
    # 2,048 tokens: an estimated 50 GiB, and too few for losses.next_token to cut its logits: all losses are alike.
    "8b": Size(Shape(128_256, 4096, 14336, 32, 32, 8), 1, 2048, torch.bfloat16, 20),
    "small": Size(Shape(8192, 512, 1536, 6, 8, 4), 1, 128, torch.float32, 9),
    "quick": Size(Shape(384, 32, 96, 2, 4, 2), 2, 48, torch.float32, 2),
}


def batch_of(size: Size) -> Batch:
    """On the host, where a loader leaves it."""
    ids = torch.randint(size.shape.vocabulary, (size.rows, size.tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}  # [B, T]


def mean_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The mean over targets, and their number."""
    moved = {name: each.to(hardware.device()) for name, each in batch.items()}
    targets = F.pad(moved["labels"], (0, 1), value=IGNORED_LABEL)[:, 1:].flatten()  # [B * T]
    logits = model(input_ids=moved["input_ids"]).logits.float().flatten(0, 1)  # [B * T, V]
    return F.cross_entropy(logits, targets, ignore_index=IGNORED_LABEL), (targets != IGNORED_LABEL).sum()


def one_by_one(model: nn.Module, factor: Tensor) -> None:
    """The pass of torchtune's recipe."""
    for parameter in model.parameters():
        parameter.grad *= factor


def ways_of(model: nn.Module, batch: Batch) -> dict[str, Way]:
    """Steps, and passes over the gradients that the step before has left."""
    gradient = GradientAccumulator(model, micro_batch_size=len(batch["input_ids"]))
    num_targets = batch["labels"][:, 1:].numel()
    factor = torch.tensor(1 / num_targets, device=hardware.device())

    def plain() -> None:
        model.zero_grad(set_to_none=True)
        mean_loss(model, batch)[0].backward()

    def torchtune() -> None:
        model.zero_grad(set_to_none=True)
        mean, counted = mean_loss(model, batch)
        (mean * counted).backward()
        one_by_one(model, 1 / counted)

    def megabatch() -> None:
        gradient.forward_backward(batch, losses.next_token)
        gradient.finalize()

    return {
        "plain": plain,
        "torchtune": torchtune,
        "pass": lambda: one_by_one(model, factor),
        "megabatch": megabatch,
        "foreach_pass": lambda: torch._foreach_mul_([each.grad for each in model.parameters()], 1 / num_targets),
    }


def differences(model: nn.Module, ways: dict[str, Way]) -> dict[str, float]:
    """Of gradients from the plain step's, relative."""
    ways["plain"]()
    expected = gradients(model)
    return {name: difference(model, ways[name], expected) for name in ("torchtune", "megabatch")}


def measured(size: Size) -> dict[str, Any]:
    """Conditions of the measurement, for the result file."""
    model = llama(size.shape, size.tokens, size.dtype, hardware.device())
    ways = ways_of(model, batch_of(size))
    apart, tolerance = differences(model, ways), TOLERANCES[size.dtype]
    rows = medians(ways, size.repeats)
    for name in ("plain", "torchtune", "megabatch"):
        rows[name]["tokens_per_second"] = round(1000 * size.rows * size.tokens / rows[name]["ms"], 1)
        rows[name]["times_plain"] = round(rows[name]["ms"] / rows["plain"]["ms"], 4)
    return {
        "size": {**size._asdict(), "shape": size.shape._asdict(), "dtype": str(size.dtype).removeprefix("torch.")},
        "parameters": sum(each.numel() for each in model.parameters()),
        "gradients_differ": apart,
        "tolerance": tolerance,
        "gradients_agree": max(apart.values()) <= tolerance,
        "rows": rows,
        "pass_share_of_torchtune": round(rows["pass"]["ms"] / rows["torchtune"]["ms"], 4),
    }


def asked() -> tuple[str, Size, Path | None]:
    """The size by name and as it is asked for, and where its result goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, without a result file unless --out")
    for name in ("rows", "tokens", "repeats"):
        parser.add_argument(f"--{name}", type=hardware.positive)
    parser.add_argument("--out", type=Path, help="the result file")
    given = vars(parser.parse_args())
    name = hardware.size_named("8b", quick=given["quick"])
    size = SIZES[name]._replace(**{key: given[key] for key in ("rows", "tokens", "repeats") if given[key]})
    if size.tokens < 2:
        parser.error("--tokens is 1, and a row's first token is no target; give 2 or more")
    default = None if given["quick"] else result.dated("needless_pass", hardware.name())
    return name, size, given["out"] or default


def said(found: dict[str, Any]) -> str:
    """The table, and what it is not."""
    apart = "  ".join(f"{name} {each:.1e}" for name, each in found["gradients_differ"].items())
    lines = [f"{found['parameters'] / 1e6:,.1f}M parameters, {found['size']['dtype']}, {found['hardware']}"]
    lines += [f"gradients differ from plain by: {apart}  (at most {found['tolerance']:.0e})"]
    for name, row in found["rows"].items():
        speed = f"{row['tokens_per_second']:12,.0f} tokens/s  {row['times_plain']:.3f}" if "times_plain" in row else ""
        lines.append(f"{name:13}{row['ms']:10.3f} ms{speed}")
    return "\n".join([*lines, f"the pass is {found['pass_share_of_torchtune']:.1%} of torchtune's step"])


def main() -> None:
    name, size, out = asked()
    write(partial(measured, size), said, out, claim=CLAIM, not_measured=hardware.not_measured(name, "8b"))


if __name__ == "__main__":
    main()

"""What a contrastive loss over the whole update is worth beside one over each microbatch.

Two small towers learn which code belongs to which docstring of Python's standard library. Both ways see the same
samples in the same microbatches; one couples the samples of a microbatch (ordinary accumulation), the other those of
the update (JointLoss). Each has the learning rate that is best for it on pairs held out for that; what is reported is
of other pairs. Memory is the most bytes that autograd keeps for backward at one time, of the encoders and of the scores
of all pairs. Writes benchmarks/results/negatives_*.json.
"""

import argparse
import ast
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import result
from megabatch import GradientAccumulator, JointLoss

VOCABULARY, WIDTH, NUM_WORDS = 8192, 64, 64
TEMPERATURE = 0.07
MICRO_BATCH_SIZE = 16
GLOBAL_BATCH_SIZES = (16, 64, 256, 1024)
LEARNING_RATES = (1e-2, 3e-2)
NUM_EPOCHS = 20  # the same for every size
NUM_HELD_OUT = 400  # twice: to choose the learning rate, and to report
SEEDS = (0, 1, 2)  # the learning rate is chosen with the first
Pair = dict[str, Tensor]


def hashed(text: str) -> Tensor:
    """The words of a text as numbers [T]; 0 is padding."""
    words = re.findall("[a-z]+", text.lower())[:NUM_WORDS] or ["-"]
    return torch.tensor([zlib.crc32(word.encode()) % (VOCABULARY - 1) + 1 for word in words])


def all_pairs() -> list[Pair]:
    """Docstrings and the code under them, in an order that does not change."""
    found: dict[str, Pair] = {}
    for path in sorted(Path(ast.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)) and node.body[1:]:
                found[doc] = {"docs": hashed(doc), "codes": hashed(ast.unparse(node.body[1:]))}
    pairs = list(found.values())
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    return [pairs[place] for place in order]


class Tower(nn.Module):
    """Words to a direction: [B, T] to [B, C]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(VOCABULARY, WIDTH, padding_idx=0)
        self.mix = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        found = self.words(words)
        return F.normalize(found + self.mix(found), dim=-1)


def encode(model: nn.ModuleDict, batch: Pair) -> tuple[Tensor, Tensor]:
    return model["docs"](batch["docs"]), model["codes"](batch["codes"])


def contrast(docs: Tensor, codes: Tensor) -> tuple[Tensor, int]:
    """Each docstring finds its code and each code its docstring, among those given: [N, C] each."""
    scores, own = docs @ codes.T / TEMPERATURE, torch.arange(len(docs))
    both = F.cross_entropy(scores, own, reduction="sum") + F.cross_entropy(scores.T, own, reduction="sum")
    return both / 2, len(docs)


def over_the_microbatch(model: nn.ModuleDict, batch: Pair) -> tuple[Tensor, int]:
    """The loss of ordinary accumulation: the negatives are those of the microbatch."""
    return contrast(*encode(model, batch))


LOSSES: dict[str, Callable[..., Any] | JointLoss] = {
    "microbatch": over_the_microbatch,
    "update": JointLoss(encode, contrast),
}


def build(seed: int) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({"docs": Tower(), "codes": Tower()})


def train(pairs: list[Pair], negatives: str, global_batch_size: int, learning_rate: float, seed: int) -> nn.ModuleDict:
    """The towers after the same number of samples, whatever the size of an update."""
    model = build(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    gradient = GradientAccumulator(model, micro_batch_size=MICRO_BATCH_SIZE)
    num_samples = len(pairs) // max(GLOBAL_BATCH_SIZES) * max(GLOBAL_BATCH_SIZES)
    order = torch.cat([torch.randperm(len(pairs))[:num_samples] for _ in range(NUM_EPOCHS)])
    for rows in order.split(global_batch_size):
        gradient.forward_backward([pairs[row] for row in rows.tolist()], LOSSES[negatives])
        if gradient.finalize().finite:
            optimizer.step()
    return model


@torch.no_grad()
def retrieval(model: nn.ModuleDict, pairs: list[Pair]) -> dict[str, float]:
    """How well docstrings find their code among all of ``pairs``."""
    batch = {name: nn.utils.rnn.pad_sequence([pair[name] for pair in pairs], batch_first=True) for name in pairs[0]}
    docs, codes = encode(model, batch)
    scores = docs @ codes.T
    ranks = (scores > scores.diagonal()[:, None]).sum(1) + 1.0  # [N]
    return {"recall_at_1": (ranks == 1).float().mean().item(), "mrr": (1 / ranks).mean().item()}


class Saved:
    """What autograd keeps for backward of some function, and the most bytes of it at one time."""

    def __init__(self) -> None:
        self.num_bytes = self.most = 0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: Kept(tensor, self), lambda kept: kept.tensor):
                return function(*given)

        return counted

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.most = max(self.most, self.num_bytes)


class Kept:
    """A tensor that is kept; a parameter is there anyway and counts nothing."""

    def __init__(self, tensor: Tensor, saved: Saved) -> None:
        self.tensor, self.saved = tensor, saved
        self.num_bytes = 0 if isinstance(tensor, nn.Parameter) else tensor.nbytes
        saved.add(self.num_bytes)

    def __del__(self) -> None:
        self.saved.add(-self.num_bytes)


def peak_bytes(pairs: list[Pair], size: int, micro_batch_size: int) -> tuple[int, int]:
    """What the encoders and the scores keep at most in an update of the joint loss."""
    encoders, scores = Saved(), Saved()
    gradient = GradientAccumulator(build(0), micro_batch_size=micro_batch_size)
    gradient.forward_backward(pairs[:size], JointLoss(encoders(encode), scores(contrast)))
    gradient.finalize()
    return encoders.most, scores.most


def row(splits: dict[str, list[Pair]], negatives: str, size: int) -> dict[str, Any]:
    """One line of the table: the mean over seeds, at the learning rate that was best."""
    first = {rate: train(splits["train"], negatives, size, rate, SEEDS[0]) for rate in LEARNING_RATES}
    best = max(first, key=lambda rate: retrieval(first[rate], splits["choose"])["mrr"])
    others = [train(splits["train"], negatives, size, best, seed) for seed in SEEDS[1:]]
    found = [retrieval(model, splits["report"]) for model in (first[best], *others)]
    mean = {name: sum(each[name] for each in found) / len(found) for name in found[0]}
    rates = {"learning_rate": best, "mrr_by_seed": [each["mrr"] for each in found]}
    return {"global_batch_size": size, "negatives_of_each": negatives} | mean | rates


def memory(pairs: list[Pair], size: int) -> dict[str, int]:
    """Bytes for backward, cut into microbatches and uncut."""
    encoders, scores = peak_bytes(pairs, size, MICRO_BATCH_SIZE)
    uncut, _ = peak_bytes(pairs, size, size)
    return {"global_batch_size": size, "encoders": encoders, "encoders_uncut": uncut, "scores": scores}


def main() -> None:
    """Run, print and write the result beside what it was measured with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=result.dated("negatives"))
    output = parser.parse_args().output
    torch.set_num_threads(1)
    made_with = result.made_with()
    pairs = all_pairs()
    splits = {"choose": pairs[:NUM_HELD_OUT], "report": pairs[NUM_HELD_OUT : 2 * NUM_HELD_OUT]}
    splits["train"] = pairs[2 * NUM_HELD_OUT :]
    rows: list[dict[str, Any]] = []
    for size in GLOBAL_BATCH_SIZES:
        for negatives in LOSSES if size > MICRO_BATCH_SIZE else list(LOSSES)[:1]:  # where they are the same
            rows.append(row(splits, negatives, size))
            print(rows[-1], flush=True)
    found = {
        "claim": "docstrings find their code better among the negatives of the whole update than among those of a "
        "microbatch, and the encoders keep no more for backward",
        **made_with,
        "rows": rows,
        "bytes_for_backward": [memory(splits["train"], size) for size in GLOBAL_BATCH_SIZES],
        "pairs": {name: len(each) for name, each in splits.items()},
        "micro_batch_size": MICRO_BATCH_SIZE,
        "epochs": NUM_EPOCHS,
        "seeds": len(SEEDS),
        "learning_rates": LEARNING_RATES,
        "threads": 1,
    }
    result.write(output, found)


if __name__ == "__main__":
    main()

"""Proof: an uneven update, cut over the ranks, and its gradient beside that of plain torch on the whole of it.

Everything is in float64, so that what is right is right to the last bits, and what is wrong is not taken for rounding.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, UpdateSampler, losses
from megabatch.train.cli.doctor.finding import Finding
from megabatch.train.runtime.ranks import Ranks

VOCABULARY, WIDTH, CAP_TOKENS = 32, 8, 12
MAX_ERROR = 1e-12  # relative, of the gradient in float64; rounding makes some 1e-16
Sample = dict[str, Tensor]  # ids and labels, [T]
Wrap = Callable[[nn.Module], nn.Module]


class TinyModel(nn.Module):
    """Next tokens of the token alone; logits [B, T, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:  # [B, T] -> [B, T, V]
        return self.head(self.body(self.embedding(input_ids))).clone()  # FSDP2 warns of what is a view


@dataclass(frozen=True)
class Proved:
    """What an update came to on this rank."""

    error: float  # of its gradient: the distance from plain torch's over its norm
    norm: float  # of plain torch's gradient, which is that of every rank
    num_microbatches: int


def tiny_model(device: torch.device) -> nn.Module:
    """The same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TinyModel().double().to(device)


def uneven_samples(num_ranks: int) -> list[Sample]:
    """More samples than ranks, not divisible by them, of 3 to 11 tokens of which the first third is not learned."""
    draw = torch.Generator().manual_seed(0)
    lengths = [3 + 4 * number % 10 for number in range(2 * num_ranks + 3)]
    ids = [torch.randint(VOCABULARY, (length,), generator=draw) for length in lengths]  # [T]
    labels = [torch.where(torch.arange(len(each)) < len(each) // 3, -100, each) for each in ids]  # [T]
    return [{"input_ids": one, "labels": other} for one, other in zip(ids, labels, strict=True)]


def plain_gradient(model: nn.Module, samples: list[Sample], device: torch.device) -> list[Tensor]:
    """Of the mean over all targets, by plain torch, one sample after the other."""
    total, num_targets = torch.zeros((), dtype=torch.float64, device=device), 0
    for sample in samples:
        labels = sample["labels"][1:].to(device)  # [T - 1]
        logits = model(sample["input_ids"][None].to(device))[0, :-1]  # [T - 1, V]
        total = total + F.cross_entropy(logits, labels, reduction="sum")
        num_targets += int((labels != -100).sum())
    return list(torch.autograd.grad(total / num_targets, list(model.parameters())))


def prove(wrap: Wrap, ranks: Ranks) -> Proved:
    """Make the update through a wrapper and compare its gradient, whole, on this rank; collective."""
    model, samples = tiny_model(ranks.device), uneven_samples(ranks.size)
    expected = plain_gradient(model, samples, ranks.device)
    wrapped = wrap(copy.deepcopy(model))
    share = UpdateSampler(
        [len(sample["input_ids"]) for sample in samples],
        global_batch_size=len(samples),
        dp_rank=ranks.rank,
        dp_degree=ranks.size,
    )
    gradient = GradientAccumulator(wrapped, max_microbatch_tokens=CAP_TOKENS)
    gradient.forward_backward([samples[number] for ids in share for number in ids], losses.next_token)
    update = gradient.finalize()
    found = [whole(parameter.grad) for parameter in wrapped.parameters()]
    return Proved(error_of(found, expected), norm_of(expected), update.num_microbatches)


def whole(gradient: Tensor | None) -> Tensor:
    """A gradient of which this rank may have a shard; collective."""
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def error_of(found: list[Tensor], expected: list[Tensor]) -> float:
    """The distance between two gradients over the norm of the second; not a number is as far as can be."""
    error = norm_of([one - other for one, other in zip(found, expected, strict=True)]) / norm_of(expected)
    return error if error == error else float("inf")


def norm_of(gradient: list[Tensor]) -> float:
    """The Euclidean norm of all of it."""
    return float(torch.linalg.vector_norm(torch.cat([each.flatten() for each in gradient])))


def wrappers(ranks: Ranks) -> dict[str, Wrap]:
    """What models are wrapped in, with that many ranks."""
    if ranks.size == 1:
        return {"plain": lambda model: model}
    return {"ddp": DistributedDataParallel, "fsdp2": sharded}


def sharded(model: nn.Module) -> nn.Module:
    """The model in FSDP2, over all ranks."""
    fully_shard(model)
    return model


def proof_of(name: str, wrap: Wrap, ranks: Ranks) -> Finding:
    """What an update through a wrapper came to, on all ranks; collective."""
    proved = prove(wrap, ranks)
    told = [Proved(**json.loads(text)) for text in ranks.gather(json.dumps(asdict(proved)))]
    where = "1 rank" if ranks.size == 1 else f"each of {ranks.size} ranks"
    what = f"{2 * ranks.size + 3} uneven samples in {proved.num_microbatches} microbatches on {where}: gradient"
    other = [rank for rank, each in enumerate(told) if abs(each.norm / told[0].norm - 1) > MAX_ERROR]
    if other:
        why = f"plain torch on rank {other[0]} computes another gradient than on rank 0; look at the devices of both"
        return Finding("fail", name, f"{what} not known: {why}")
    worst = max(told, key=lambda each: each.error)
    if worst.error <= MAX_ERROR:
        return Finding("ok", name, f"{what} {worst.error:.1e} from plain torch's, in float64")
    wrong = [rank for rank, each in enumerate(told) if each.error > MAX_ERROR]
    where = "every rank" if len(wrong) == ranks.size else f"rank {', '.join(map(str, wrong))}"
    return Finding(
        "fail",
        name,
        f"{what} {worst.error:.1e} from plain torch's on {where}, and it may be {MAX_ERROR:g}; do not train here: try "
        "another version of torch, and look at the devices and the network",
    )

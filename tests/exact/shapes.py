"""Updates whose microbatches have few shapes, beside plain torch: gradients, and the shapes that the model saw."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, losses
from megabatch.batching import Deferred
from tests.exact import models, oracle
from tests.unit.small import unseen

CAP, NUM_SHAPES = 64, 3
# Samples of each rank, update by update: the first says the shapes, a later one has a longer sample, one rank has none.
LENGTHS = [[[3, 17, 8, 9, 30, 4, 5], [6, 6]], [[5, 2, 28, 11], []], [[40, 7], [3, 9, 9, 12, 2]]]


def sums(model: nn.Module, batch: Mapping[str, Tensor]) -> oracle.Sums:
    logits, targets = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return {"loss": (total, (targets != -100).sum())}


def samples_of(lengths: list[int], seed: int) -> list[oracle.Sample]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(1, models.VOCABULARY, (length,), generator=generator) for length in lengths]
    return [{"input_ids": each, "labels": each.where(torch.arange(len(each)) != 2, -100)} for each in ids]


def batch_of(kind: str, samples: list[oracle.Sample]) -> Any:
    if kind != "deferred":
        return samples
    return Deferred(samples.__getitem__, [len(each["input_ids"]) for each in samples])


def whole(gradient: Tensor | None) -> Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def run_job(name: str) -> Any:
    """Return the worst error of each update of ``wrapper:batch``, and the shapes that the model saw on this rank."""
    wrapper, kind = name.split(":")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    plain = models.gpt2()
    model = models.gpt2()
    model.load_state_dict(plain.state_dict())
    seen: set[tuple[int, ...]] = set()
    model.transformer.wte.register_forward_pre_hook(unseen(lambda _, given: seen.add(tuple(given[0].shape))))
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    if wrapper == "fsdp2":
        model = fully_shard(model)
    gradient = GradientAccumulator(model, max_microbatch_tokens=CAP, shapes=NUM_SHAPES)
    errors, numbers = [], []
    for step, lengths in enumerate(LENGTHS):
        of_ranks = [samples_of(each, 10 * step + place) for place, each in enumerate(lengths)]
        own = of_ranks[rank] if world > 1 else [each for of_rank in of_ranks for each in of_rank]
        gradient.forward_backward(batch_of(kind, own), losses.next_token)
        update = gradient.finalize()
        expected = oracle.answer(plain, sums, [each for of_rank in of_ranks for each in of_rank])
        found = {key.removeprefix("module."): whole(each.grad) for key, each in model.named_parameters()}
        errors.append(oracle.worst_error(found, expected.gradients)[0])
        numbers.append(float(update.loss) - expected.loss)
    return {"errors": errors, "losses": numbers, "seen": sorted(seen), "state": gradient.state_dict()["shapes"]}

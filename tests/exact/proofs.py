"""verify on several ranks: of models as they are wrapped, of wrong losses, and of faults planted in the library."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megabatch import JointLoss, losses, verify
from megabatch import loss as counted_from_data
from tests.exact import models
from tests.exact.wrappers import WRAPPERS, Wrapped, full, mesh_of, wrap


class _Always(property):
    """An attribute that stays what it is, whatever is written to it."""

    def __init__(self, value: float) -> None:
        super().__init__(lambda _: value, lambda *_: None)


# What a planted fault changes: what is patched, and by what.
FAULTS: dict[str, dict[str, tuple[str, Any]]] = {
    "plain": {"ranks are not summed": ("megabatch.wrappers.rank_sums.SummedWrapper.finish_update", lambda self: None)},
    "ddp": {"the mean of ranks": ("megabatch.wrappers.ddp.DDPWrapper.loss_factor", _Always(1.0))},
    "fsdp2": {"the mean of ranks": ("megabatch.wrappers.fsdp2.FSDP2Wrapper.loss_factor", 0.5)},
}
LENGTHS = {0: (3, 7, 5), 1: (4,), 2: (6, 2, 8, 5)}  # of the samples, by rank


def text() -> list[dict[str, Tensor]]:
    """This rank's samples: other numbers and lengths on each."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    tokens = [torch.randint(models.VOCABULARY, (length,), generator=generator) for length in LENGTHS[rank]]
    return [{"input_ids": each, "labels": each} for each in tokens]


def sums(model: Wrapped, microbatch: Any) -> tuple[Tensor, Tensor]:
    logits = models.called(model)(microbatch["input_ids"]).logits[:, :-1]  # [B, T - 1, V]
    labels = microbatch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def means(model: Wrapped, microbatch: Any) -> tuple[Tensor, Tensor]:
    total, weight = sums(model, microbatch)
    return total / weight.clamp(min=1), weight


def derivatives(model: Wrapped, microbatch: Any) -> tuple[Tensor, Tensor]:
    """The squared slopes of the targets' cross-entropies along the logits."""
    logits = models.called(model)(microbatch["input_ids"]).logits[:, :-1]  # [B, T - 1, V]
    labels = microbatch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    (slope,) = torch.autograd.grad(total, logits, create_graph=True)
    return slope.square().sum(), (labels != -100).sum()


def representations(model: Wrapped, microbatch: Any) -> Tensor:
    """The sum of each sample's logits over its tokens."""
    logits = models.called(model)(microbatch["input_ids"]).logits  # [B, T, V]
    return (logits * (microbatch["labels"] != -100)[..., None]).sum(1)


def centred(model: Wrapped, microbatch: Any) -> Tensor:
    rows = representations(model, microbatch)
    return rows - rows.mean(0)


def contrast(rows: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)).flip(0), reduction="sum"), len(rows)


LOSSES: dict[str, Any] = {
    "weighed": counted_from_data(weigh=losses.count_targets)(lambda *given: sums(*given)),
    "late": sums,
    "means": means,
    "derivatives": derivatives,
    "joint": JointLoss(representations, contrast),
    "joint, centred": JointLoss(centred, contrast),
}


def local_numbers(model: Wrapped) -> list[Tensor]:
    """Copies of what this rank holds of parameters and gradients."""
    parts = [each for part in (model if isinstance(model, list) else [model]) for each in part.parameters()]
    found = [tensor for each in parts for tensor in (each.detach(), each.grad) if tensor is not None]
    return [(each.to_local() if isinstance(each, DTensor) else each).clone() for each in found]


def new_model(wrapper: str) -> Wrapped:
    torch.manual_seed(0)
    return wrap(models.small_lm(torch.float32), wrapper)


def job(name: str) -> Any:
    """``wrapper:loss`` or ``wrapper:fault``: the verdict, the worst error, and the causes."""
    wrapper, what = name.split(":")
    model = new_model(wrapper)
    mesh = {"mesh": mesh_of(wrapper, dist.get_world_size())} if WRAPPERS[wrapper].needs_mesh else {}
    if what in LOSSES:
        before = local_numbers(model)
        found = verify(model, LOSSES[what], text(), **mesh)
        after = local_numbers(model)
        left = len(before) == len(after) and all(map(torch.equal, before, after))
        return {"ok": found.ok, "worst": found.worst, "causes": found.causes, "left": left}
    place, change = FAULTS[wrapper][what]
    with patch(place, change):
        found = verify(model, sums, text(), **mesh)
    return {"ok": found.ok, "worst": found.worst, "causes": found.causes, "left": True}


def trains_on(name: str) -> Any:
    """Assert that a verified model is trained as one that was not: its wrapper is as it was."""
    wrapper = name.split(":")[0]
    gradients: list[list[Tensor]] = []
    for is_verified in (False, True):
        model = new_model(wrapper)
        assert isinstance(model, nn.Module)
        if is_verified:
            assert verify(model, sums, text()).ok
        total, weight = sums(model, {key: each[None] for key, each in text()[0].items()})
        (total / weight).backward()
        gradients.append([full(each.grad) for each in model.parameters() if each.grad is not None])
    return [torch.equal(one, other) for one, other in zip(*gradients, strict=True)]

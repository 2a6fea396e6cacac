"""A loss that another library knows as a mean, as a sum and its count; and whether it is that mean."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from megabatch import contract
from megabatch.batch import IGNORED_LABEL, Microbatch
from megabatch.contract import LossFunction, Term
from megabatch.errors import LossContractError

Mean = Callable[[Any, Any], Any]  # a scalar tensor, of a model and a microbatch
Count = Callable[[Any], Tensor]  # the targets of a microbatch
MAX_NUMEL = 2**20  # of a parameter whose gradient is compared
GIVE = "give loss_fn=, which returns (total, weight)"


def times_count(mean: Mean, count: Count) -> LossFunction:
    """The loss whose total is ``mean * count`` and whose weight is ``count``.

    The mean may be 0 / 0 where there is nothing to count, if its gradient is not, as with torch's cross-entropy.
    """

    @contract.loss(weigh=count)
    def total_and_count(model: nn.Module, microbatch: Microbatch) -> Term:
        weight = count(microbatch)
        found = mean(model, {**microbatch})  # a copy: it may take the labels out
        return Term(torch.where(weight > 0, found, 0.0) * weight, weight)

    return total_and_count


def count_labels(microbatch: Microbatch, *, shifted: bool) -> Tensor:
    """Targets that are not -100; ``shifted``: a causal model's, which never uses the label at position 0."""
    if not isinstance(microbatch, Mapping) or not {"labels", "shift_labels"} & set(cast(Any, microbatch)):
        raise LossContractError(f"the samples have no 'labels', so what a mean is over cannot be counted; {GIVE}")
    labels: Any = cast(Any, microbatch).get("shift_labels")
    if labels is None:
        labels = microbatch["labels"][..., 1:] if shifted else microbatch["labels"]
    return (labels != IGNORED_LABEL).sum()


def check_mean(mean: Mean, count: Count, model: nn.Module, pair: Microbatch, *, tolerance: float) -> None:
    """Raise `LossContractError` unless the mean of two samples follows from their own, weighed by their counts.

    More labels are left of the first than of the second, so that a mean over something else shows. Gradients are
    compared, of the small parameters, without dropout; the model and its random numbers are left as they were.
    """
    thin = _thinned(pair)
    parts = [_gradient(mean, model, each) * float(count(each)) for each in _rows(thin) if count(each)]
    if not parts:
        raise LossContractError(f"the first samples have no target, so that a mean cannot be tried on them; {GIVE}")
    found, expected = _gradient(mean, model, thin) * float(count(thin)), torch.stack(parts).sum(0)
    if (error := _distance(found, expected)) > tolerance:
        raise LossContractError(
            f"the loss of two samples is no mean over their {int(count(thin))} targets: its gradient is off by "
            f"{error:.2g}; {GIVE}, or say in count_targets() what it is a mean over"
        )


def check_same(
    loss_fn: LossFunction, count: Count, mean: Mean, model: nn.Module, pair: Microbatch, *, tolerance: float
) -> None:
    """Raise `LossContractError` unless the loss of a microbatch has the gradient of the model's own mean."""
    expected = _gradient(mean, model, pair) * float(count(pair))

    def total(model: nn.Module, microbatch: Microbatch) -> Tensor:
        return loss_fn(model, microbatch)[0]

    found = _gradient(total, model, pair)
    if count(pair) and (error := _distance(found, expected)) > tolerance:
        raise LossContractError(
            f"the model's own loss is not the mean over next tokens: its gradient is off by {error:.2g}; {GIVE}"
        )


def _gradient(scalar: Mean, model: nn.Module, microbatch: Mapping[str, Any]) -> Tensor:
    """Of some parameters, as one vector in float64; in eval mode, and nothing is left of it."""
    trained = [each for each in model.parameters() if each.requires_grad]
    small = [each for each in trained if each.numel() <= MAX_NUMEL] or [min(trained, key=Tensor.numel)]
    devices = {each.device for each in trained if each.device.type != "cpu"}
    was_training = [module for module in model.modules() if module.training]
    with torch.random.fork_rng(list(devices)):
        model.eval()
        try:
            found: Any = torch.autograd.grad(scalar(model, {**microbatch}), small, allow_unused=True)
        finally:
            for module in was_training:
                module.training = True
    return torch.cat([each.double().flatten() for each in found if each is not None])


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())  # NaN, of nothing, is within any tolerance


def _thinned(pair: Mapping[str, Any]) -> dict[str, Any]:
    """The same with few labels: of the first sample the first two and the last, of the second the last."""
    thin = {name: value.clone() if isinstance(value, Tensor) else value for name, value in pair.items()}
    labels = thin["shift_labels" if "shift_labels" in thin else "labels"]  # [2] or [2, T, ...]
    if labels.ndim > 1 and not labels.is_floating_point():
        for row, others in zip(labels, (slice(2, -1), slice(0, -1)), strict=True):
            for place in (row != IGNORED_LABEL).nonzero()[others]:
                row[tuple(place)] = IGNORED_LABEL
    return thin


def _rows(pair: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each of two samples as a microbatch of its own."""
    for name, value in pair.items():
        if isinstance(value, Tensor) and (value.ndim == 0 or len(value) != 2):
            raise LossContractError(
                f"the data collator makes {name!r} of shape {tuple(value.shape)} of two samples, so that a mean cannot "
                f"be tried on each; {GIVE}"
            )
    index = [slice(0, 1), slice(1, 2)]
    return [{name: value[row] if isinstance(value, Tensor) else value for name, value in pair.items()} for row in index]

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
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative; else of a mean in 16 bits
TOLERANCE_OF_HALF = 1e-2
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


def check_mean(mean: Mean, count: Count, model: nn.Module, pair: Microbatch) -> None:
    """Raise `LossContractError` unless the mean of two samples follows from their own, weighed by their counts.

    The second keeps one of its targets, so that a mean over something else shows. Runs three forwards without a
    gradient and without dropout; random numbers are drawn again afterwards. A sum, and most means over something
    else, are seen; `megabatch.verify` sees the gradient.
    """
    devices = {each.device for each in model.parameters() if each.device.type != "cpu"}
    was_training = model.training
    with torch.random.fork_rng(list(devices)), torch.no_grad():
        model.eval()
        try:
            thin = _thinned(pair)
            found = [(mean(model, {**each}), float(count(each))) for each in (thin, *_rows(thin))]
        finally:
            model.train(was_training)
    (whole, both), *parts = found
    expected = sum(float(value) * weight for value, weight in parts if weight)
    allowed = TOLERANCE.get(whole.dtype, TOLERANCE_OF_HALF)
    if both and abs(float(whole) * both - expected) > allowed * abs(expected):
        raise LossContractError(
            f"the loss of two samples is {float(whole):.6g}, but as a mean over their {both:.0f} targets it would be "
            f"{expected / both:.6g}; {GIVE}, or count_targets() what it is a mean over"
        )


def _thinned(pair: Mapping[str, Any]) -> dict[str, Any]:
    """The same with one target left of the second sample."""
    thin = {name: value.clone() if isinstance(value, Tensor) else value for name, value in pair.items()}
    name = "shift_labels" if "shift_labels" in thin else "labels"
    labels = thin[name]  # [2] or [2, T, ...]
    if labels.ndim > 1 and not labels.is_floating_point():
        real = (labels[1] != IGNORED_LABEL).nonzero()
        for place in real[:-1]:
            labels[1][tuple(place)] = IGNORED_LABEL
    return thin


def _rows(pair: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each of two samples as a microbatch of its own."""
    for name, value in pair.items():
        if isinstance(value, Tensor) and (value.ndim == 0 or len(value) != 2):
            raise LossContractError(
                f"the data collator makes {name!r} of shape {tuple(value.shape)} of two samples, so that a mean cannot "
                f"be checked on each; {GIVE}"
            )
    index = [slice(0, 1), slice(1, 2)]
    return [{name: value[row] if isinstance(value, Tensor) else value for name, value in pair.items()} for row in index]

"""Padded positions that a loss counts as targets: what padding says of them is one of the values that the loss counts.

Two checks look at a loss once. `check_weights` compares the weight of padded samples with that of the same samples one
by one. `check_totals` looks at the losses of torch in the graph of a total: which of their targets are padding. A loss
of other arithmetic whose weight does not count padding is not seen through; `verify` finds it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.core.contract import LossHooks
from megabatch.core.samples import Microbatch, Samples
from megabatch.errors import LossContractError
from megabatch.inspection.sample_kinds import shape_of
from megabatch.planning.plan import Plan
from megabatch.torch_private.loss_nodes import CROSS_ENTROPIES, DIFFERENCES, reduction_of, targets_of

MAX_COMPARED_SAMPLES = 8
BESIDE_TOKENS = ("_mask", "position_ids", "token_type_ids")
"""Ends of keys that are no targets."""
NOT_COUNTED = ("input_ids", *BESIDE_TOKENS)
"""Ends of keys whose padding no weight counts."""


def check_weights(samples: Samples, plan: Plan, hooks: LossHooks) -> bool:
    """Raise `LossContractError` if the weight of padded samples is not the sum of their own.

    Returns:
        True if a microbatch of the plan has padding, so that there was something to compare.
    """
    lengths = samples.lengths
    several = [rows for rows in plan.microbatches if len(rows) > 1]
    if not several or samples.batching.is_collated_by_user or not samples.is_list:
        return False
    rows = max(several, key=lambda rows: max(map(lengths.__getitem__, rows)) - min(map(lengths.__getitem__, rows)))
    rows = (*rows[: MAX_COMPARED_SAMPLES // 2], *rows[MAX_COMPARED_SAMPLES // 2 :][-MAX_COMPARED_SAMPLES // 2 :])
    ragged = _find_ragged_keys([samples.one_view(row) for row in rows])
    if not ragged:
        return False
    difference = hooks.compare_weights(samples, rows)
    if difference is not None:
        raise LossContractError(
            f"weigh counts {difference[0]:.10g} in {len(rows)} samples of other lengths, which are padded, and "
            f"{difference[1]:.10g} in the same one by one, so that it counts padding of "
            f"{', '.join(map(repr, ragged))}; say in batching=Padded({{key: value}}) what the loss "
            "leaves out"
        )
    return True


def _find_ragged_keys(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys of samples that differ in shape, without tokens and masks."""
    ragged: list[str] = []
    for name in samples[0].keys():  # noqa: SIM118 - iterating over a TensorDict yields rows
        shapes = {shape_of(sample[name]) for sample in samples}
        if len(shapes) > 1 and not name.endswith(NOT_COUNTED):
            ragged.append(name)
    return ragged


def check_totals(lengths: Mapping[str, Sequence[int]], microbatch: Microbatch, nodes: Iterable[Any]) -> None:
    """Raise `LossContractError` if a loss of torch counts a padded position, here or in the backward.

    Args:
        lengths: Of each sample of the microbatch, by padded key.
        microbatch: The tensors that the loss was given, on its device.
        nodes: The nodes of the totals' graph.
    """
    names = [name for name in lengths if isinstance(microbatch.get(name), Tensor) and not name.endswith(BESIDE_TOKENS)]
    # A meta tensor has no values.
    padded = {name: lengths[name] for name in names if not microbatch[name].is_meta}
    if not padded:
        return
    for node in nodes:
        if node.name() not in CROSS_ENTROPIES + DIFFERENCES:
            continue
        targets, are_counted, ignored = targets_of(node)
        for name, sample_lengths in padded.items():
            is_padding = _find_padding(targets, microbatch[name], sample_lengths)
            if is_padding is None:
                continue
            counted = CountedPadding(name, targets.flatten(), is_padding & are_counted.flatten(), ignored)
            if reduction_of(node):
                counted.refuse()
            else:
                # A mask of the user's may leave padding out.
                node.register_prehook(counted.refuse_gradients)


class CountedPadding(NamedTuple):
    """Padded elements of a key among the targets of a loss of torch, which leaves out the value ``ignored``, if any."""

    name: str
    targets: Tensor  # [N]
    counted: Tensor  # [N], bool
    ignored: int | None

    def refuse(self) -> None:
        """Raise `LossContractError` if there is any."""
        if not bool(self.counted.any()):
            return
        value = float(self.targets[self.counted][0])
        says = "leaves no value out; leave padded positions out by a mask among the keys of the samples"
        if self.ignored is not None:
            says = f"leaves out {self.ignored}; give batching=Padded({{{self.name!r}: {self.ignored}}})"
        raise LossContractError(
            f"the loss counts {int(self.counted.sum())} padded positions of {self.name!r} as targets: they are padded "
            f"with {value:.10g}, and it {says}"
        )

    def refuse_gradients(self, gradients: tuple[Tensor, ...]) -> None:
        """Raise `LossContractError` if the loss of any has a gradient."""
        self._replace(counted=self.counted & (gradients[0].flatten() != 0)).refuse()


def _find_padding(targets: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor | None:
    """Return which elements of ``targets`` are padding of a key; None if the targets are not that key's values.

    The targets may lack the first or the last columns of the key, as those of next tokens do.
    """
    num_rows, num_columns = value.shape[:2]
    # A part of a microbatch that did not fit in memory has fewer rows.
    if num_rows != len(lengths):
        return None
    columns, remainder = divmod(targets.numel() * num_columns, max(value.numel(), 1))
    # Fewer columns, such as the classes of whole samples, may be equal by chance.
    if remainder or not num_columns < 2 * columns <= 2 * num_columns:
        return None
    if value.is_floating_point() != targets.is_floating_point() or value.dtype == torch.bool:
        return None
    real = torch.arange(num_columns, device=value.device) < torch.tensor(lengths, device=value.device)[:, None]
    for first in dict.fromkeys((num_columns - columns, 0)):
        part = value[:, first : first + columns]
        if torch.equal(part.flatten().to(targets.dtype), targets.flatten()):
            is_padding = ~real[:, first : first + columns]  # [B, columns]
            return is_padding.reshape(num_rows, columns, *[1] * (value.ndim - 2)).expand_as(part).flatten()
    return None

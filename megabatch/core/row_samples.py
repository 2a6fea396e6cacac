"""A batch that is a mapping of tensors, with samples in dim 0."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megabatch.core.samples import STOPPED, Microbatch, Samples, split_rows
from megabatch.errors import PlanError
from megabatch.inspection.mappings import checked_rows


class RowSamples(Samples):
    """A mapping of tensors with samples in dim 0."""

    is_list = False

    def _read(self, batch: Any) -> dict[str, Tensor]:
        return checked_rows(batch)

    def _measure(self) -> list[int]:
        if self._length is not None:
            try:
                return [int(self._length(sample)) for sample in split_rows(self._batch)]
            except StopIteration as error:
                raise PlanError(f"the function length= {STOPPED}") from error
        first = next(iter(self._batch.values()))
        return self._refuse_empty([first.shape[1] if first.ndim > 1 else 1] * len(first))

    def _are_images(self) -> bool:
        first = next(iter(self._batch.values()))
        return first.ndim > 3 and first.is_floating_point()

    def take_whole(self, indices: Sequence[int]) -> Microbatch:
        """Collate the rows at ``indices``, without the loss's view of them."""
        return self.batching.collate_rows(_take_rows(self._batch, indices), indices)

    def owned(self, microbatch: Microbatch, moved: Microbatch) -> Microbatch:
        """Return ``moved`` on memory of its own: rows are the caller's."""
        return self.batching.copied(microbatch, moved)

    def kinds(self) -> None:
        """Return None: rows are of one kind."""

    def copy_last(self) -> Samples:
        """Return a copy of the last row."""
        rows = {name: tensor[-1:].clone() for name, tensor in self._batch.items()}
        return RowSamples(rows, self.batching.origin, self._length, self.part)

    def one_view(self, index: int) -> Any:
        """Return row ``index`` as a sample, a view of the batch."""
        return {name: tensor[index] for name, tensor in self._batch.items()}

    def keys(self) -> list[tuple[str, ...]]:
        """Return the keys of the rows."""
        return [] if self.batching.is_collated_by_user or not len(self) else [tuple(sorted(self._batch))]


def _take_rows(batch: Mapping[str, Tensor], indices: Sequence[int]) -> dict[str, Tensor]:
    first = indices[0]
    if list(indices) == list(range(first, first + len(indices))):
        # Neighbors are a view of the batch.
        rows = slice(first, first + len(indices))
    else:
        rows = torch.tensor(indices, device="cpu")
    return {name: tensor[rows] for name, tensor in batch.items()}

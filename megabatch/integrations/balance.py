"""Which samples are in an update, in the order of another library's sampler, and which of them are this rank's."""

from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import DistributedSampler, Sampler, SequentialSampler

from megabatch.errors import PlanError


class DealtBatches(Sampler[list[int]]):
    """This rank's part of each batch of ``batch_size`` samples per rank; a DataLoader's ``batch_sampler``.

    No sample is repeated or, without ``drop_last``, left out: the last batch may have fewer samples for some ranks
    than for others, and none for some. Every rank has equally many batches.

    Args:
        sampler: Sample ids of an epoch, in order; the same on every rank.
        batch_size: Samples per rank.
        seed: With the epoch, decides the order of a sampler that draws from a generator.

    Raises `PlanError` for a sampler whose order may differ from rank to rank.
    """

    def __init__(
        self, sampler: Sampler[int], batch_size: int, *, rank: int, world: int, drop_last: bool, seed: int
    ) -> None:
        self.sampler = sampler
        self._size = batch_size * world
        self._rank, self._world, self._drop_last, self._seed = rank, world, drop_last, seed
        known = isinstance(sampler, SequentialSampler) or hasattr(sampler, "set_epoch") or hasattr(sampler, "generator")
        if isinstance(sampler, DistributedSampler) or (world > 1 and not known):
            raise PlanError(
                f"the order of samples is a {type(sampler).__name__}'s, which may differ from rank to rank; give a "
                "sampler with set_epoch(), the same on all ranks, and let this one deal"
            )
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch from here on."""
        self._epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            cast(Any, self.sampler).set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        if hasattr(self.sampler, "generator"):  # as Accelerate seeds it
            cast(Any, self.sampler).generator = torch.Generator().manual_seed(self._seed + self._epoch)
        batch: list[int] = []
        for sample in self.sampler:
            batch.append(sample)
            if len(batch) == self._size:
                yield batch[self._rank :: self._world]
                batch = []
        if batch and not self._drop_last:
            yield batch[self._rank :: self._world]

    def __len__(self) -> int:
        whole, rest = divmod(len(cast(Sized, self.sampler)), self._size)
        return whole + (rest > 0 and not self._drop_last)

"""Samples: a batch as samples, and any of them as one microbatch.

A batch is a mapping of tensors with samples in dim 0, or a list of samples (mappings of tensors of any length). It is
read as `Samples`, and a `Batching` makes microbatches of them: by default rows of a mapping are taken as they are, and
samples of a list are padded to the longest of their microbatch.
"""

import zlib
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from megabatch.core.contract import Prepare, Weigh
from megabatch.errors import PlanError
from megabatch.inspection.mappings import as_dict, is_dense
from megabatch.inspection.odd_values import to_dense_tensor
from megabatch.inspection.sample_kinds import plan_kinds
from megabatch.inspection.tree import clone, each_tensor, hash_tensors, memory_of, tensors_of
from megabatch.planning.partition import plan_share
from megabatch.planning.plan import CostModel, Plan

Batch = Mapping[str, Tensor] | Sequence[Any]
"""All samples of this rank."""
Microbatch = Any
"""The return value of collate: a mapping of tensors, unless the user's collate returns another object."""
Collate = Callable[[list[Any]], Microbatch]
Length = Callable[[Any], int]

HALF_TYPES = (torch.bfloat16, torch.float16)
STOPPED = "raised StopIteration: an iterator in it has ended, and not the data; give next() a default"


class Pad:
    """The checks of microbatches that a function of the user's collates. `RightPad` and `Padding` collate as well.

    Attributes:
        fills: Padding values that the user gave, by key.
        running_lengths: Lengths of the samples of the running microbatch, by padded key.
    """

    def __init__(self) -> None:
        self.fills: dict[str, float] = {}
        self.running_lengths: Mapping[str, list[int]] = {}

    def __call__(self, samples: list[Mapping[str, Any]], shape: tuple[int, int] | None = None) -> dict[str, Tensor]:
        """Return the samples as one microbatch, ``{name: [B, longest, ...]}``."""
        # The user's function collates, so that only subclasses are called.
        raise NotImplementedError

    def check(self, microbatch: Microbatch) -> None:
        """Raise `PlanError` for a microbatch that the model would misread."""

    def expect(self, microbatch: Microbatch) -> None:
        """Note the microbatch that runs next, before it is moved."""

    def watched(self) -> AbstractContextManager[None]:
        """Surround a call, in which a loss may take padding for tokens."""
        return nullcontext()


class Batching:
    """A collate function of the user's: turns samples into microbatches.

    Subclass it for another way: `Padded`, `OneRow` and `SharedPrefix` do.

    Attributes:
        is_collated_by_user: A function of the user's makes microbatches.
        is_repeatable: No function of the user's is called, which may draw random numbers.
        has_rows: A sample is a row of its microbatch.
        shape_problem: The reason why `Shapes` cannot fill its microbatches. None: it can.
        has_own_plan: `plan` splits samples by a rule that no `Planner` of the user's replaces.
    """

    is_collated_by_user = True
    is_repeatable = False
    has_rows = True
    shape_problem: str | None = "a collate function other than OneRow, which decides the shape itself"
    has_own_plan = False

    def __init__(self, collate: Collate, pad: Pad | None = None) -> None:
        self._collate = collate
        self.pad = Pad() if pad is None else pad

    @property
    def origin(self) -> "Batching":
        """The batching of the accumulator. One that was made for the plan of a call returns the one it was made of."""
        return self

    def for_microbatches(self) -> "Batching":
        """Return the batching of the samples of a microbatch, which the accumulator then calls."""
        return self

    def new_planner(self, usual: Any) -> Any:
        """Return what makes the planner of calls, in place of the ``usual`` one."""
        return usual

    def check_model(self, wrapper: Any, limits: tuple[int | None, int | None]) -> None:
        """Try the model with this batching. Raise `PlanError` if they do not go together. Collective.

        Args:
            wrapper: The model's wrapper.
            limits: Samples and tokens of a microbatch, each None where it is no limit.
        """

    def samples(self, batch: Batch, length: Length | None = None, part: Prepare | None = None) -> "Samples":
        """Return a batch as samples; see `Samples`. A batch may bring its own class of them, as `Deferred` does."""
        new_samples: type[Samples] = getattr(type(batch), "samples_class", Samples)
        if new_samples is Samples and isinstance(batch, Mapping):
            from megabatch.core.row_samples import RowSamples

            new_samples = RowSamples
        return new_samples(batch, self, length, part)

    def collate(self, samples: list[Any], rows: Sequence[int]) -> Microbatch:
        """Return samples as one microbatch. ``rows`` are their numbers in the batch."""
        microbatch = self._collate(samples)
        self.pad.check(microbatch)
        return microbatch

    def collate_rows(self, samples: dict[str, Tensor], rows: Sequence[int]) -> Microbatch:
        """Return samples that are rows of tensors as one microbatch."""
        return self.collate(split_rows(samples), rows)

    def owned(self, microbatch: Microbatch, moved: Microbatch) -> Microbatch:
        """Return ``moved``, the microbatch on its device, on memory of its own, so that a loss may write to it."""
        return self.copied(microbatch, moved)

    def copied(self, microbatch: Microbatch, moved: Microbatch) -> Microbatch:
        """Return ``moved`` with copies of the tensors that it shares with ``microbatch``."""
        if moved is microbatch:
            return clone(moved)
        originals = set(map(id, tensors_of(microbatch)))
        return each_tensor(moved, lambda tensor: tensor.clone() if id(tensor) in originals else tensor)

    def kinds(self, samples: list[Any]) -> list[Hashable] | None:
        """Return the kind of each sample where several differ; see `Samples.kinds`."""
        return None

    def plan(
        self, samples: "Samples", lengths: Sequence[int], limits: tuple[int | None, int | None], cost: CostModel | None
    ) -> Plan:
        """Return the plan of one rank, unpriced. No microbatch has samples of two kinds.

        ``limits`` are samples and tokens of a microbatch.
        """
        kinds = samples.kinds()
        if kinds is None:
            return plan_share(lengths, *limits, cost)
        return plan_kinds(kinds, lengths, *limits, cost)

    def check_plan(self, samples: "Samples", plan: Plan) -> None:
        """Raise `PlanError` if a plan that was made before is of another batching, or of other samples."""
        if plan.padded != self.has_rows:
            raise PlanError(
                "plan is of samples that lie in one row, or that are padded, and these are not; make another"
            )
        if plan.shared:
            raise PlanError("plan is of samples that share prefixes, and these do not; make another")
        self.check_kinds(samples, plan.microbatches)

    def check_kinds(self, samples: "Samples", microbatches: Sequence[Sequence[int]]) -> None:
        """Raise `PlanError` for a microbatch with samples of two kinds, which padding would change."""
        kinds = samples.kinds()
        if kinds is None:
            return
        for rows in microbatches:
            if len({kinds[row] for row in rows}) > 1:
                raise PlanError(
                    f"samples {', '.join(map(str, rows))} of one microbatch differ in their keys or in sizes that are "
                    "not padded; cut them apart"
                )

    def check(self, samples: "Samples", plan: Plan, hooks: Any) -> None:
        """Raise `LossContractError` for a loss, by its `LossHooks`, whose weight these samples do not have."""

    def surround_call(self, model: Any, plan: Plan, num_microbatches: int) -> AbstractContextManager[None]:
        """Surround the microbatches of a call, and watch how its loss calls the model."""
        return self.pad.watched()


class Samples:
    """A list of samples: how many, how long, and any of them as one microbatch. Other batches have subclasses.

    Attributes:
        is_list: True if the batch is a list of samples, which may have unequal lengths.
        is_in_memory: False if samples are loaded in their turn.
        part: Returns the loss's view of a collated microbatch on this rank.
        lengths: Tokens of each sample that plans count, of which ``len()`` is the number.
        num_samples: Samples of the batch. ``len()`` is larger if samples are cut into chunks.
        num_tokens: Tokens of the batch without padding. The number of samples if these are images.
    """

    is_list = True
    is_in_memory = True

    def __init__(
        self,
        batch: Batch,
        batching: Batching,
        length: Length | None = None,
        part: Prepare | None = None,
    ) -> None:
        """Measure the samples of a batch.

        Args:
            batch: All samples of this rank.
            batching: Makes microbatches of them.
            length: The user's length of a sample; None counts the size of dim 0 of a sample's first tensor.
            part: Returns the loss's view of a collated microbatch on this rank. None returns the microbatch.
        """
        self.batching = batching
        self._length = length
        self.part = part or _unchanged
        self._batch: Any = self._read(batch)
        self.lengths: list[int] = self._measure()
        self.num_samples = len(self.lengths)
        self.num_tokens = self._count_tokens()

    def _read(self, batch: Any) -> Any:
        if not isinstance(batch, Sequence) or isinstance(batch, str | bytes):
            raise PlanError(
                f"the batch is a {type(batch).__name__}; expected a mapping of tensors with samples in dim 0, "
                "or a list of samples"
            )
        return list(cast(Sequence[Any], batch))

    def _measure(self) -> list[int]:
        length = self._length or sample_length
        try:
            lengths = [int(length(sample)) for sample in self._batch]
        except StopIteration as error:
            raise PlanError(f"the function length= {STOPPED}") from error
        return self._refuse_empty(lengths)

    def _refuse_empty(self, lengths: list[int]) -> list[int]:
        if 0 in lengths and self._length is None:
            raise PlanError(
                f"sample {lengths.index(0)} of the batch has length 0; leave it out, or give length= if it has tokens "
                "elsewhere"
            )
        return lengths

    def _count_tokens(self) -> int:
        """Return the real tokens, without padding. Where no sample has a length, return the samples."""
        may_be_images = self._length is None and len(set(self.lengths)) == 1
        if may_be_images and self._are_images():
            return self.num_samples
        return sum(self.lengths)

    def _are_images(self) -> bool:
        """Return True for images [C, H, W]: their dim 0 counts nothing."""
        value: Any = next(iter(self.one_view(0).values()))
        return isinstance(value, Tensor) and value.ndim > 2 and value.is_floating_point()

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, indices: Sequence[int]) -> Microbatch:
        """Collate the samples at ``indices``, on the device of the batch."""
        try:
            return self.part(self.take_whole(indices))
        except StopIteration as error:
            raise PlanError(f"collate, or prepare= of the loss, {STOPPED}") from error

    def take_whole(self, indices: Sequence[int]) -> Microbatch:
        """Collate the samples at ``indices``, without the loss's view of them."""
        return self.batching.collate([self._batch[index] for index in indices], indices)

    def weigh(
        self, microbatches: Sequence[tuple[int, ...]], weigh: Weigh
    ) -> tuple[tuple[Microbatch, ...], Iterable[object]]:
        """Return the microbatches, collated, and the weight of each one. A deferred batch keeps none of them."""
        if self.batching.is_collated_by_user:
            collated = self._take_all(microbatches)
        else:
            collated = tuple(map(self.take, microbatches))
        return collated, map(weigh, collated)

    def _take_all(self, microbatches: Sequence[tuple[int, ...]]) -> tuple[Microbatch, ...]:
        """Take every microbatch of the user's collate. Copy them if it fills the same buffers again."""
        collated: list[Microbatch] = []
        earlier_addresses: set[int] = set()
        for rows in microbatches:
            collated.append(self.take(rows))
            addresses = memory_of(collated[-1])
            if not addresses.isdisjoint(earlier_addresses):
                return tuple(clone(self.take(rows)) for rows in microbatches)
            earlier_addresses |= addresses
        return tuple(collated)

    def given_weight(self, rows: Sequence[int]) -> float | None:
        """Return the weight that the user gave for samples; None if none was given."""
        return None

    def check_names(
        self, microbatch: Microbatch, announced: dict[str, float], count: Callable[[Microbatch], dict[str, float]]
    ) -> None:
        """Raise `LossContractError` if ``weigh`` counts other terms in a planned microbatch than were announced."""

    def in_turn(self, microbatches: Sequence[Sequence[int]]) -> Generator[Microbatch]:
        """Yield each of ``microbatches``."""
        yield from map(self.take, microbatches)

    def dummy_rows(self, plan: Plan) -> tuple[int, ...]:
        """Return the samples of a dummy microbatch: those of the last, whose shape a compiled model knows."""
        return plan.microbatches[-1]

    def dummy(self) -> Microbatch:
        """Return the last sample as a microbatch of its own."""
        return self.take([len(self) - 1])

    def expect(self, microbatch: Microbatch) -> None:
        """Note the microbatch that runs next, before it is moved."""
        self.batching.pad.expect(microbatch)

    def owned(self, microbatch: Microbatch, moved: Microbatch) -> Microbatch:
        """Return ``moved``, the microbatch on its device, on memory of its own, so that a loss may write to it."""
        return self.batching.owned(microbatch, moved)

    def kinds(self) -> list[Hashable] | None:
        """Return the kind of each sample: its keys, and sizes that are not padded. None if all are of one kind.

        Samples of one microbatch are of one kind. Kinds are not known of a batch that is loaded later, and of samples
        that the user's collate function puts together.
        """
        return self.batching.kinds(self._batch)

    def forget_early(self) -> None:
        """Free the microbatches of a deferred batch that were taken before their turn."""

    def copy_last(self) -> "Samples":
        """Return the last sample. Rows of a mapping are copied, so that keeping one does not keep the batch."""
        return Samples(self._batch[-1:], self.batching.origin, self._length, self.part)

    def one_view(self, index: int) -> Any:
        """Return the sample at ``index``, on the memory of the batch."""
        return self._batch[index]

    def one(self, index: int) -> Any:
        """Return the sample at ``index``, on its own memory."""
        return clone(self.one_view(index))

    def join_outputs(self, outputs: list[Any], *, trim: bool) -> list[Any]:
        """Return the output of each sample of the batch, given those of the samples that plans count."""
        return outputs

    def held(self) -> object:
        """Return the batch, as far as it is in memory."""
        return self._batch

    def keys(self) -> list[tuple[str, ...]]:
        """Return each set of keys of samples once; none before samples are loaded or if the user's collate chooses."""
        if self.batching.is_collated_by_user:
            return []
        mappings = [sample for sample in self._batch if isinstance(sample, Mapping)]
        return sorted({tuple(sorted(map(str, mapping.keys()))) for mapping in mappings})

    def fingerprint(self) -> int:
        """Hash all lengths and the last sample's numbers."""
        checksum = zlib.crc32(repr(self.lengths).encode())
        return hash_tensors(self.one_view(-1), checksum) if self.lengths else checksum


def _unchanged(microbatch: Microbatch) -> Microbatch:
    return microbatch


def sample_length(sample: Any) -> int:
    """Return the tokens of a sample: the size of dim 0 of its first tensor, 1 for a scalar.

    This is the default ``length`` of a `GradientAccumulator`. Raises `PlanError` for a sample that is no mapping of
    tensors.
    """
    name, value = next(iter(as_dict(sample).items()))
    first = value if is_dense(value) else to_dense_tensor(name, value)
    return first.size(0) if first.ndim else 1


def split_rows(rows: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return each row of tensors as a sample."""
    size = len(next(iter(rows.values())))
    return [{name: tensor[row] for name, tensor in rows.items()} for row in range(size)]

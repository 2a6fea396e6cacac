"""What the encode of a joint loss gives: checked on every rank, gathered from all, held against what it gave before."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.engine.random_state import RandomState
from megabatch.errors import LossContractError
from megabatch.torch_private import is_dtensor, pytree
from megabatch.wrappers.mesh import DataRanks

ROWS = "a tensor, or a tuple or mapping of tensors, with one row per sample"
Cut = Sequence[Sequence[int]]  # a rank's samples by microbatch; () is a dummy microbatch


@dataclass(frozen=True)
class Encoded:
    """What encode gave for one microbatch without a graph, and where the random numbers stood before."""

    leaves: list[Any]  # tensors [B, ...], if encode keeps its contract
    structure: pytree.TreeSpec
    random: RandomState

    @property
    def kind(self) -> str:
        """What must be the same everywhere, in words."""
        named, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(self.leaves, self.structure))
        return ", ".join(f"{pytree.keystr(path)} {leaf.dtype} {tuple(leaf.shape[1:])}".strip() for path, leaf in named)


class EncodingReport(NamedTuple):
    """What a rank tells the others of its representations."""

    rank: int  # in the world
    num_samples: int
    kind: str
    fault: str | None


def keep_encoding(encoded: Any, random: RandomState) -> Encoded:
    """What encode returned, copied: a view would keep what it was cut from, the last hidden states say."""
    leaves, structure = pytree.tree_flatten(encoded)
    return Encoded([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure, random)


def report_encoding(ranks: DataRanks, encodings: Sequence[Encoded], cut: Cut) -> list[EncodingReport]:
    """What every rank has, in the order of `DataRanks.exchange`; a fault of one is raised on all."""
    fault = _fault(encodings, cut)
    kind = "" if fault else encodings[0].kind
    told: list[EncodingReport] = ranks.exchange_objects(EncodingReport(_world_rank(), sum(map(len, cut)), kind, fault))
    for number, each in enumerate(told):
        where = f"data rank {number % ranks.degree}"
        if each.fault is not None:
            raise LossContractError(each.fault if len(told) == 1 else f"{where} of {ranks.degree}: {each.fault}")
        if each.kind != told[0].kind:
            raise LossContractError(
                f"encode gives {told[0].kind} on data rank 0 and {each.kind} on {where}; "
                "give rows of one shape and dtype on all"
            )
    return told


def _fault(encodings: Sequence[Encoded], cut: Cut) -> str | None:
    """What is wrong with a rank's representations, if anything is."""
    for index, (encoded, rows) in enumerate(zip(encodings, cut, strict=True)):
        if not encoded.leaves:
            return f"encode returned nothing; expected {ROWS}"
        for leaf in encoded.leaves:
            if not isinstance(leaf, Tensor) or is_dtensor(leaf):
                return f"encode returned a {type(leaf).__name__}; expected {ROWS}"
            if leaf.ndim == 0 or (rows and len(leaf) != len(rows)):
                return f"encode returned the shape {tuple(leaf.shape)} for {len(rows)} samples; expected {ROWS}"
        if encoded.kind != encodings[0].kind:
            return (
                f"encode gives {encodings[0].kind} for microbatch 0 and {encoded.kind} for microbatch {index}; "
                "give rows of one shape and dtype, padded to one length if need be"
            )
    return None


def gather_encodings(
    ranks: DataRanks, encodings: Sequence[Encoded], cut: Cut, told: Sequence[EncodingReport]
) -> tuple[list[Tensor], slice]:
    """Representations of all samples, by rank and then as in its batch, and which of them are this rank's.

    The host does not wait. Where they can carry a gradient, they are leaves that do.
    """
    data = told[: ranks.degree]
    sizes = [each.num_samples for each in data]
    order = sorted(range(len(data)), key=lambda number: data[number].rank)
    encoded_rows = [row for rows in cut for row in rows]
    places = sorted(range(len(encoded_rows)), key=encoded_rows.__getitem__)
    wholes: list[Tensor] = []
    for parts in zip(*(encoded.leaves for encoded in encodings), strict=True):
        own = torch.cat([part[: len(rows)] for part, rows in zip(parts, cut, strict=True)])  # [n, ...]
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: len(own)] = in_order(own, places)
        gathered = ranks.gather(padded)  # [ranks, most, ...]
        whole = torch.cat([gathered[number, : sizes[number]] for number in order])  # [N, ...]
        wholes.append(whole.requires_grad_(_is_continuous(whole)))
    me = [each.rank for each in told].index(_world_rank()) % ranks.degree
    start = sum(sizes[number] for number in order[: order.index(me)])
    return wholes, slice(start, start + sizes[me])


def in_order(tensor: Tensor, order: list[int]) -> Tensor:
    """The rows of a tensor in another order, in memory of their own."""
    if order == list(range(len(order))):
        return tensor.clone()
    index = torch.tensor(
        order, device="cpu", pin_memory=tensor.device.type == "cuda"
    )  # a copy from there does not wait
    return tensor.index_select(0, index.to(tensor.device, non_blocking=True))


def check_drift(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """Whether representations are further apart than rounding explains; bool on their device."""
    return torch.stack([_differ(before, after.detach()) for before, after in zip(first, second, strict=True)]).any()


def _differ(before: Tensor, after: Tensor) -> Tensor:
    if not _is_continuous(before):
        return (before != after).any()
    dtype = torch.promote_types(before.dtype, torch.float32)
    distance = torch.linalg.vector_norm(after - before, dtype=dtype)
    size = torch.linalg.vector_norm(before, dtype=dtype)
    return (
        distance > torch.finfo(before.dtype).eps ** 0.5 * size
    )  # false for what is not a number, which the total shows


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _world_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0

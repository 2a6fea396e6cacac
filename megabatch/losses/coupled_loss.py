"""A loss that couples samples, computed from the representations of all samples (GradCache, arXiv 2101.06983).

1. Encode each microbatch without a graph, and keep only its representations.
2. Gather the representations of all data ranks, compute the loss, and differentiate it with respect to them.
3. Encode each microbatch again with the same random numbers, and run its backward from these gradients.

The loss may couple any number of samples in the memory of one microbatch.
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.core.call import CallAgreement, MicrobatchStep, PreparedBatch, iterate_steps, with_dummies
from megabatch.core.contract import Term, describe_missing_gradient, differentiable, terms_of
from megabatch.core.gradients import separate_gradients
from megabatch.core.mesh import DataRanks
from megabatch.core.samples import Microbatch
from megabatch.core.update import OpenUpdate
from megabatch.core.wrapper import Wrapper
from megabatch.errors import LossContractError, PlanError, in_one_line
from megabatch.inspection import random_state
from megabatch.inspection.error_kinds import agreeing, is_out_of_memory
from megabatch.inspection.loss_graph import graph_leaves
from megabatch.inspection.random_state import RandomState
from megabatch.inspection.tree import to_device
from megabatch.torch_private.classes import is_dtensor
from megabatch.torch_private.operations import pytree

ROWS = "a tensor, or a tuple or mapping of tensors, with one row per sample"
Cut = Sequence[Sequence[int]]  # a rank's samples by microbatch; () is a dummy microbatch


@dataclass(frozen=True)
class JointLoss:
    """A loss that couples samples, such as a contrastive loss.

    A plain loss over a microbatch would see only the negatives of that microbatch. This one sees all samples of the
    call, on all data ranks, in the memory of one microbatch (GradCache, arXiv 2101.06983). Samples of different calls
    are not coupled: the update's loss is the sum of the calls' totals over the sum of their weights.

    Each microbatch is encoded twice with the same random numbers: once without a graph, and once for the gradient. If
    its representations differ the second time, the call raises `LossContractError`. On a device ``update.finite`` is
    false instead. A module that keeps statistics, such as batch norm, updates them twice.

    Args:
        encode: ``encode(model, microbatch)`` returns representations: a tensor, or a tuple or mapping of tensors. Each
            has the shape [B, ...], with samples in dim 0 and rows of one shape in every microbatch and on every rank.
            Class labels may be among them.
        loss: ``loss(representations)`` returns ``(total, weight)``, or a mapping of names to such pairs. Each tensor
            has the shape [N, ...] and holds all samples of the call: those of rank 0, then those of rank 1, each in
            the order of its batch. The items of a tuple are passed as positional arguments,
            ``contrast(queries, documents)``. Weights are numbers. The loss must not draw random numbers. It gets a
            trainable parameter from ``encode``, one row per sample: ``temperature.expand(len(queries))``.

    `forward_backward` returns the sums on data rank 0, and zeros on the others.
    """

    encode: Callable[[Any, Any], Any]
    loss: Callable[..., Any]

    def run_call(self, call: Any) -> dict[str, Term]:
        """Run the microbatches of a call in place of the accumulator. Return this rank's sums."""
        return run_coupled_loss(self, call.model, call.prepared, call.agreement, call.wrapper, call.opened)


@dataclass(frozen=True)
class Encoded:
    """The output of encode for one microbatch, without a graph, and the random state before it."""

    leaves: list[Any]  # tensors [B, ...], if encode keeps its contract
    structure: pytree.TreeSpec
    random: RandomState

    @property
    def kind(self) -> str:
        """Structure, dtypes and row shapes, which must be the same in all microbatches and ranks."""
        named, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(self.leaves, self.structure))
        return ", ".join(f"{pytree.keystr(path)} {leaf.dtype} {tuple(leaf.shape[1:])}".strip() for path, leaf in named)


class EncodingReport(NamedTuple):
    """A rank's report about its representations."""

    rank: int  # in the world
    num_samples: int
    kind: str
    fault: str | None


def keep_encoding(encoded: Any, random: RandomState) -> Encoded:
    """Copy the output of encode: a view would keep its base in memory, for example the last hidden states."""
    leaves, structure = pytree.tree_flatten(encoded)
    return Encoded([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure, random)


def report_encoding(
    ranks: DataRanks, encodings: Sequence[Encoded], cut: Cut, failure: Exception | None = None
) -> list[EncodingReport]:
    """Return the reports of all ranks, in the order of `DataRanks`. Raise a fault or a failure of one rank on all."""
    fault = describe_fault(encodings, cut) if failure is None else f"encode failed ({in_one_line(failure)})"
    kind = "" if fault else encodings[0].kind
    reports: list[EncodingReport] = ranks.exchange_objects(
        EncodingReport(_world_rank(), sum(map(len, cut)), kind, fault)
    )
    if failure is not None:
        raise failure
    for number, report in enumerate(reports):
        where = f"data rank {number % ranks.degree}"
        if report.fault is not None:
            raise LossContractError(report.fault if len(reports) == 1 else f"{where} of {ranks.degree}: {report.fault}")
        if report.kind != reports[0].kind:
            raise LossContractError(
                f"encode gives {reports[0].kind} on data rank 0 and {report.kind} on {where}; "
                "give rows of one shape and dtype on all"
            )
    return reports


def describe_fault(encodings: Sequence[Encoded], cut: Cut) -> str | None:
    """Return a description of the fault in a rank's representations, or None."""
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
    ranks: DataRanks, encodings: Sequence[Encoded], cut: Cut, reports: Sequence[EncodingReport]
) -> tuple[list[Tensor], slice]:
    """Return the representations of all samples, and the slice that is this rank's.

    Each tensor has the shape [N, ...], in the order of the ranks and of each rank's batch. Floating-point and complex
    tensors are leaves that require a gradient. The host does not wait for the device.
    """
    data = reports[: ranks.degree]
    sizes = [report.num_samples for report in data]
    # Mesh order may differ from the order of ranks, which users index by.
    order = sorted(range(len(data)), key=lambda number: data[number].rank)
    encoded_rows = [row for rows in cut for row in rows]
    places = sorted(range(len(encoded_rows)), key=encoded_rows.__getitem__)  # from the cut back to the batch's order
    representations: list[Tensor] = []
    for parts in zip(*(encoded.leaves for encoded in encodings), strict=True):
        local_rows = torch.cat([part[: len(rows)] for part, rows in zip(parts, cut, strict=True)])  # [n, ...]
        padded = local_rows.new_zeros(max(sizes), *local_rows.shape[1:])  # a gather needs one shape on all ranks
        padded[: len(local_rows)] = in_order(local_rows, places)
        gathered = ranks.gather_on_device(padded)  # [ranks, most, ...]
        representation = torch.cat([gathered[number, : sizes[number]] for number in order])  # [N, ...]
        representations.append(representation.requires_grad_(_is_continuous(representation)))
    me = [report.rank for report in reports].index(_world_rank()) % ranks.degree
    start = sum(sizes[number] for number in order[: order.index(me)])
    return representations, slice(start, start + sizes[me])


def in_order(tensor: Tensor, order: list[int]) -> Tensor:
    """Return a copy of a tensor with its rows in another order."""
    if order == list(range(len(order))):
        return tensor.clone()
    # A copy from pinned memory does not wait for the device.
    index = torch.tensor(order, device="cpu", pin_memory=tensor.device.type == "cuda")
    return tensor.index_select(0, index.to(tensor.device, non_blocking=True))


def check_drift(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """Return a bool tensor: True if representations differ by more than rounding explains."""
    return torch.stack([_differ(before, after.detach()) for before, after in zip(first, second, strict=True)]).any()


def _differ(before: Tensor, after: Tensor) -> Tensor:
    if not _is_continuous(before):
        return (before != after).any()
    dtype = torch.promote_types(before.dtype, torch.float32)
    # Two runs of one kernel may round differently. Half of the dtype's digits is far above that, and far below dropout.
    distance = torch.linalg.vector_norm(after - before, dtype=dtype)
    size = torch.linalg.vector_norm(before, dtype=dtype)
    return distance > torch.finfo(before.dtype).eps ** 0.5 * size  # False for NaN, which the total shows


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _world_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@dataclass(frozen=True)
class CoupledCall:
    """One call of a joint loss, with its model, samples, ranks and open update."""

    joint: JointLoss
    model: Any
    prepared: PreparedBatch
    agreement: CallAgreement
    wrapper: Wrapper
    opened: OpenUpdate

    @property
    def cut(self) -> tuple[tuple[int, ...], ...]:
        """This rank's samples by microbatch; () is a dummy microbatch."""
        return with_dummies(self.prepared.plan, self.agreement.num_microbatches).microbatches

    def microbatches(self) -> Generator[Microbatch]:
        """Yield this rank's microbatches on the CPU, then dummy microbatches up to the number of the other ranks."""
        yield from self.prepared.microbatches()
        for rows in self.cut:
            if not rows:
                assert self.agreement.dummy is not None  # some rank has more than this one
                yield self.agreement.dummy()


def run_coupled_loss(
    joint: JointLoss,
    model: Any,
    prepared: PreparedBatch,
    agreement: CallAgreement,
    wrapper: Wrapper,
    opened: OpenUpdate,
) -> dict[str, Term]:
    """Add a call's gradient to the open update. Return its sums on data rank 0, and zeros on the others."""
    call, ranks = CoupledCall(joint, model, prepared, agreement, wrapper, opened), wrapper.ranks
    _check_whole_samples(ranks)
    cut = call.cut
    if not cut:
        opened.count_call(agreement)
        return {}
    encodings, failure = list[Encoded](), None
    try:
        encodings = _encode(call)
    except Exception as error:
        # Where forwards meet, the other ranks wait in one of them and not for a report.
        if ranks.is_alone or wrapper.forwards_meet or wrapper.writes_buffers or is_out_of_memory(error):
            raise
        failure = error
    with agreeing():
        reports = report_encoding(ranks, encodings, cut, failure)
    representations, local_rows = gather_encodings(ranks, encodings, cut, reports)
    sums, gradients = _couple(call, representations, encodings[0].structure)
    encoded_rows, sizes = [row for rows in cut for row in rows], [len(rows) for rows in cut]
    local_gradients = [
        None if gradient is None else in_order(gradient[local_rows], encoded_rows).split(sizes)
        for gradient in gradients
    ]
    del representations, gradients  # before the second pass, which needs the memory
    _report_drift(call, _backward(call, encodings, local_gradients), sums)
    return sums


def _check_whole_samples(ranks: DataRanks) -> None:
    if ranks.pipeline is not None or ranks.context_degree > 1:
        axis = "cp" if ranks.pipeline is None else "pp"
        raise PlanError(
            f"a JointLoss needs whole samples on every rank, but the mesh has the axis {axis!r}; use data axes and tp"
        )


def _encode(call: CoupledCall) -> list[Encoded]:
    """Return the representations of every microbatch, without a graph."""
    encodings: list[Encoded] = []
    with torch.no_grad(), contextlib.closing(call.microbatches()) as microbatches:
        for microbatch in microbatches:
            random = random_state.note(call.wrapper.device)
            moved = call.prepared.samples.owned(microbatch, to_device(microbatch, call.wrapper.device))
            encodings.append(keep_encoding(call.joint.encode(call.model, moved), random))
            del microbatch, moved  # before the next is made
    return encodings


def _couple(
    call: CoupledCall, representations: list[Tensor], structure: pytree.TreeSpec
) -> tuple[dict[str, Term], Sequence[Tensor | None]]:
    """Compute the loss over all samples. Return its sums, and the gradient of every representation."""
    terms = _loss_of_all(call, pytree.tree_unflatten(representations, structure))
    names = differentiable(terms)
    _check_reach([terms[name].total for name in names], representations)
    # A weight on the host makes the divisor known before the second pass.
    weights = {name: weight for name in names if isinstance(weight := terms[name].weight, float)}
    if len(weights) < len(names):
        weights = {}  # only the device knows, and reading it would wait
    call.opened.count_call(replace(call.agreement, weights=weights))
    step = MicrobatchStep(None, 0, weights, is_dummy=False)
    objective = call.opened.objective(terms, step)
    # Every rank has computed the same terms: they are counted once.
    counts = all(group.rank() == 0 for group in call.wrapper.ranks.data_groups)
    sums = call.opened.add(terms, replace(step, is_dummy=not counts))
    # Each rank differentiates the whole loss, so its own rows have their full gradient without a reduction.
    leaves = [representation for representation in representations if representation.requires_grad]
    gradients = iter(torch.autograd.grad(objective, leaves, allow_unused=True))
    return sums, [next(gradients) if representation.requires_grad else None for representation in representations]


def _loss_of_all(call: CoupledCall, representations: Any) -> dict[str, Term]:
    """Call the loss on the representations. Raises `LossContractError` if it draws random numbers on several ranks."""
    random = random_state.note(call.wrapper.device)
    terms = terms_of(
        call.joint.loss(*representations) if isinstance(representations, tuple) else call.joint.loss(representations)
    )
    if call.wrapper.ranks.degree > 1 and not random_state.note(call.wrapper.device).same_as(random):
        raise LossContractError(
            "the loss of a JointLoss drew random numbers, which differ from rank to rank; draw them in encode"
        )
    return terms


def _check_reach(totals: Sequence[Tensor], representations: list[Tensor]) -> None:
    """Raise if a total depends on a leaf that is no representation, since its gradient would be lost."""
    for leaf in graph_leaves(totals):
        if not any(leaf is representation for representation in representations):
            raise LossContractError(
                f"the loss of a JointLoss reaches a trainable parameter of shape {tuple(leaf.shape)} by itself; return "
                "what it needs from encode, one row per sample: temperature.expand(len(queries))"
            )


def _backward(call: CoupledCall, encodings: list[Encoded], gradients: Sequence[Sequence[Tensor] | None]) -> Tensor:
    """Encode every microbatch again and run its backward. Return a bool tensor, True if its representations changed."""
    drifted = torch.zeros((), dtype=torch.bool, device=call.wrapper.device)
    with contextlib.closing(iterate_steps(call.prepared, call.agreement, None, call.wrapper)) as steps:
        for step in steps:
            encoded = encodings[step.index]
            with random_state.replay(encoded.random):
                leaves = pytree.tree_leaves(call.joint.encode(call.model, step.microbatch))
            if not step.is_dummy:
                drifted |= check_drift(encoded.leaves, leaves)
            _differentiate(leaves, [None if of_leaf is None else of_leaf[step.index] for of_leaf in gradients], step)
            separate_gradients(call.wrapper.accumulating)
            del step, leaves  # with the microbatch and its graph, before the next is made
    return drifted


def _differentiate(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None], step: MicrobatchStep) -> None:
    """Run the backward from the representations that carry a gradient. A dummy microbatch's gradients are zeros."""
    carrying = [leaf for leaf, gradient in zip(leaves, gradients, strict=True) if _carries(leaf, gradient)]
    if not carrying:
        raise LossContractError(
            f"no representation carries a gradient, which encode gives; {describe_missing_gradient()}"
        )
    carried = [gradient for leaf, gradient in zip(leaves, gradients, strict=True) if _carries(leaf, gradient)]
    torch.autograd.backward(carrying, list(map(torch.zeros_like, carrying)) if step.is_dummy else carried)


def _carries(leaf: Tensor, gradient: Tensor | None) -> bool:
    return leaf.requires_grad and gradient is not None


def _report_drift(call: CoupledCall, drifted: Tensor, sums: dict[str, Term]) -> None:
    """Raise an error on every rank if representations drifted. On a device, make the update not finite instead."""
    if drifted.device.type == "cpu":
        if any(has_drifted for (has_drifted,) in call.wrapper.ranks.exchange_numbers([bool(drifted)])):
            raise LossContractError(
                "encode gave other representations for the same microbatch the second time; let nothing in it change "
                "from call to call, and draw random numbers from torch's own generators"
            )
        return
    # Reading the flag would wait for the device, so it goes into the sums as NaN.
    nothing = {name: Term(torch.where(drifted, torch.nan, 0.0), 0.0) for name in sums}
    call.opened.add(nothing, MicrobatchStep(None, 0, {}, is_dummy=False))

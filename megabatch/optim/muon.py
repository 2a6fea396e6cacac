"""Muon under sharding: each matrix is gathered by one rank, orthogonalized there, and sent back in shards.

The momentum stays where its shard is. Matrices go in rounds, one for each rank that shares them, by two all-to-alls.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from megabatch.errors import PlanError
from megabatch.torch_private import adjusted_muon_rate, is_dtensor, newton_schulz, step_hooks, unhooked

Group = dict[str, Any]  # "params", and their options
MUON_OPTION = "ns_steps"  # an option that only groups of matrices have


class Muon(torch.optim.Muon):
    """torch's Muon for matrices and another optimizer for the rest, with the bits of one process on any shards.

    The update of a matrix is its momentum, orthogonalized by torch's own Newton-Schulz iteration in bfloat16, which
    needs the whole matrix. Where FSDP2 or HSDP shards it, one rank gathers it, orthogonalizes it and sends the shards
    back: two all-to-alls for as many matrices as ranks share them, of 2 bytes a weight each. The matrices of a round
    cost about the same, so that no rank waits long. Replicas of HSDP repeat the work, and so do the ranks of DDP,
    without messages. Every rank must step, and must have gradients of the same parameters.

    Its parameter groups are those of the matrices and then those of ``others``. Schedulers, hooks, `state_dict` and
    `torch.distributed.checkpoint` work on all of them. The momentum is sharded as the parameter is. `LowBits` takes it
    for bfloat16 parameters.

    Args:
        matrices: Parameters with two dimensions, or groups of them; `split_parameters` finds them.
        others: The optimizer of the other parameters, with its own rates: ``AdamW(others, lr=3e-4)``. Its states are
            taken over, and this optimizer steps it.
        lr: Learning rate of the matrices.
        adjust_lr_fn: "match_rms_adamw" scales updates so that AdamW's learning rate and weight decay fit. "original"
            is for the rates of Muon's author, near 0.02.
        **options: ``weight_decay``, ``momentum``, ``nesterov``, ``ns_steps``, ... of `torch.optim.Muon`.

    Raises:
        PlanError: A matrix is sharded over several mesh axes (tensor parallelism), a parameter is in both optimizers,
            or ``others`` has step hooks.
        ValueError: From torch, for a parameter without two dimensions, or for an option.
    """

    others: Optimizer | None

    def __init__(
        self, matrices: Iterable[Tensor] | Iterable[Group], others: Optimizer | None = None, *,
        lr: float = 1e-3, adjust_lr_fn: str | None = "match_rms_adamw", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(matrices, lr=lr, adjust_lr_fn=adjust_lr_fn, **options)  # pyright: ignore[reportArgumentType]
        held = {each for group in self.param_groups for each in group["params"]}
        for each in held:
            _sharding(each)
        self.others = others
        if others is None:
            return
        for hook in step_hooks(others):
            raise PlanError(
                f"{type(others).__name__} has the step hook {getattr(hook, '__name__', type(hook).__name__)!r}; "
                "register it on Muon, whose step it belongs to"
            )
        if any(each in held for group in others.param_groups for each in group["params"]):
            raise PlanError(f"a matrix is also a parameter of {type(others).__name__}; give each to one optimizer")
        self.param_groups.extend(others.param_groups)
        self.state.update(others.state)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every parameter that has a gradient. Collective for shards.

        Args:
            closure: Computes the gradients again and returns the loss; it runs once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for matrices in self.rounds(group) if self.orthogonalizes(group) else ():
                    self._step_round(group, matrices)
            if self.others is not None:
                self.others.param_groups = [each for each in self.param_groups if not self.orthogonalizes(each)]
                self.others.state = self.state
                unhooked(type(self.others).step)(self.others)
        return loss

    @staticmethod
    def orthogonalizes(group: Group) -> bool:
        """Return True for a parameter group of matrices, False for one of ``others``."""
        return MUON_OPTION in group

    @staticmethod
    def rounds(group: Group) -> Iterator[list[Tensor]]:
        """Yield the matrices with a gradient in rounds: at most one for each rank that shares them, by falling cost.

        The ranks of a round wait for the most costly matrix, so that matrices of like cost go together.
        """
        by_sharding: dict[_Sharding | None, list[Tensor]] = {}
        for each in group["params"]:
            if each.grad is not None:
                by_sharding.setdefault(_sharding(each), []).append(each)
        for sharding, matrices in by_sharding.items():
            matrices.sort(key=lambda each: newton_schulz_cost(*each.shape), reverse=True)
            width = 1 if sharding is None else sharding.num_ranks
            yield from (matrices[start : start + width] for start in range(0, len(matrices), width))

    def _step_round(self, group: Group, matrices: Sequence[Tensor]) -> None:
        updates = [self._add_to_momentum(group, each) for each in matrices]

        def orthogonalize(update: Tensor) -> Tensor:
            return newton_schulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])

        sharding = _sharding(matrices[0])
        if sharding is None:
            updates = list(map(orthogonalize, updates))
        else:
            updates = sharding.orthogonalize([each.shape for each in matrices], updates, orthogonalize)
        lr = float(group["lr"])
        for matrix, update in zip(matrices, updates, strict=True):
            rate = adjusted_muon_rate(lr, group["adjust_lr_fn"], matrix.shape)
            weight = _local(matrix)
            # In float32, whose sums do not depend on the size of a shard as those of bfloat16 do on a CPU.
            moved = weight.to(torch.promote_types(weight.dtype, torch.float32))
            moved.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-rate)
            if moved is not weight:
                weight.copy_(moved)

    def _add_to_momentum(self, group: Group, matrix: Tensor) -> Tensor:
        """Add a gradient to its momentum and return the update of this rank's part, in bfloat16."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad, memory_format=torch.preserve_format)
        gradient, buffer = _local(matrix.grad), _local(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        # A copy: the iteration divides its matrix in place, which is the momentum where that is bfloat16.
        return torch.empty_like(update, dtype=torch.bfloat16, memory_format=torch.contiguous_format).copy_(update)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "others": self.others}


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable parameters for `Muon` and those for another optimizer.

    Muon is for the matrices of hidden layers. The others are vectors, tensors of more dimensions (convolutions, experts
    in one tensor), embeddings, and the head: what a transformers model has outside of its ``base_model``, or the last
    module with a matrix of any other model.

    Args:
        model: With or without shards of FSDP2; before DDP.

    Returns:
        Matrices [out, in], and the rest, each in the model's order.
    """
    modules = list(model.modules())
    outside = [each for each in modules if isinstance(each, nn.Embedding)]
    base = getattr(model, "base_model", None)
    if isinstance(base, nn.Module):
        inside = {id(each) for each in base.modules()}
        outside += [each for each in modules if id(each) not in inside]
    else:
        with_matrix = [each for each in modules if any(one.ndim == 2 for one in each.parameters(recurse=False))]
        outside += with_matrix[-1:]
    left = {id(each) for module in outside for each in module.parameters(recurse=False)}
    trained = [each for each in model.parameters() if each.requires_grad]
    matrices = [each for each in trained if each.ndim == 2 and id(each) not in left]
    taken = {id(each) for each in matrices}
    return matrices, [each for each in trained if id(each) not in taken]


def newton_schulz_cost(num_rows: int, num_columns: int) -> int:
    """Return the multiplications of a step of the iteration on a matrix, which works on the smaller side's products."""
    small, large = sorted((num_rows, num_columns))
    return small * small * (2 * large + small)


class _Sharding(NamedTuple):
    """One axis of a mesh over which a matrix is cut along a dimension."""

    mesh: Any
    axis: int  # of the mesh
    dim: int  # of the matrix

    @property
    def num_ranks(self) -> int:
        return self.mesh.size(self.axis)

    def orthogonalize(
        self, shapes: Sequence[torch.Size], updates: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Return this rank's parts of orthogonalized matrices: rank k of the axis gathers the k-th. Collective.

        Args:
            shapes: Of the whole matrices, at most one for each rank.
            updates: This rank's parts, of one dtype.
            function: Orthogonalizes a whole matrix.
        """
        rank, group = self.mesh.get_local_rank(self.axis), self.mesh.get_group(self.axis)
        shard_sizes = [each.numel() for each in updates] + [0] * (self.num_ranks - len(updates))
        parts = self._part_shapes(shapes[rank]) if rank < len(shapes) else [torch.Size([0])] * self.num_ranks
        part_sizes = [each.numel() for each in parts]
        sent = torch.cat([each.flatten() for each in updates])
        gathered = sent.new_empty(sum(part_sizes))
        dist.all_to_all_single(gathered, sent, part_sizes, shard_sizes, group=group)
        if rank < len(shapes):
            pieces = zip(gathered.split(part_sizes), parts, strict=True)
            whole = function(torch.cat([piece.view(shape) for piece, shape in pieces], self.dim))
            pieces = whole.split([each[self.dim] for each in parts], self.dim)
            gathered = torch.cat([each.flatten() for each in pieces])
        dist.all_to_all_single(sent, gathered, shard_sizes, part_sizes, group=group)
        pieces = sent.split(shard_sizes)[: len(updates)]
        return [piece.view_as(each) for piece, each in zip(pieces, updates, strict=True)]

    def _part_shapes(self, shape: torch.Size) -> list[torch.Size]:
        """Return the shapes of a matrix's parts by rank: those of ``torch.chunk``, the last ones may be empty."""
        size = -(-shape[self.dim] // self.num_ranks)
        ends = [min(shape[self.dim], size * (rank + 1)) for rank in range(self.num_ranks)]
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return [torch.Size([each, shape[1]] if self.dim == 0 else [shape[0], each]) for each in sizes]


def _sharding(matrix: Tensor) -> _Sharding | None:
    """Return the axis that a matrix is sharded over, or None for a whole one. Raise `PlanError` for several axes."""
    if not is_dtensor(matrix):
        return None
    cut = [(axis, each) for axis, each in enumerate(matrix.placements) if not each.is_replicate()]
    if not cut:
        return None
    from torch.distributed.tensor import Shard  # slow, and already imported where there is a DTensor

    if len(cut) > 1 or type(cut[0][1]) is not Shard:
        raise PlanError(
            f"Muon takes matrices that are whole, or sharded over one axis, and one of shape {tuple(matrix.shape)} is "
            f"laid over ranks as {tuple(matrix.placements)}; leave tensor parallelism out, or use AdamW"
        )
    return _Sharding(matrix.device_mesh, cut[0][0], cut[0][1].dim % 2)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part."""
    return tensor.to_local() if is_dtensor(tensor) else tensor

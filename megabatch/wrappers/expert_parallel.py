"""Expert parallelism: ranks along the mesh axis ``ep`` see different samples, and each holds some of the experts.

A forward sends every token to the ranks that hold its experts, and the backward sends the gradients back. The gradient
of an expert is therefore a sum over the ranks of its ``ep`` group before anything is reduced. It is then summed over
the ranks that hold the same experts, and every other gradient over all data ranks.

Experts are DTensors over an axis ``ep``, as transformers' ``DistributedConfig(ep_size=)`` and torchtitan make them.
"""

import contextlib
from collections.abc import Collection, Generator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megabatch.core.gradients import Gradients
from megabatch.core.mesh import DataRanks
from megabatch.core.wrapper import Choice, Wrapper, local, stranding
from megabatch.errors import PlanError
from megabatch.inspection.checksum import checksum
from megabatch.inspection.mesh_axes import CONTEXT_AXES, DATA_AXES, EXPERT_AXIS, groups_of, is_expert
from megabatch.inspection.model_facts import with_config
from megabatch.torch_private.classes import is_dtensor, is_fsdp2
from megabatch.torch_private.fsdp2_groups import sharded_parameters
from megabatch.torch_private.module_members import has_compiled
from megabatch.torch_private.operations import TorchDispatchMode, pytree
from megabatch.torch_private.process_groups import group_named, is_boxed_group, root_mesh
from megabatch.wrappers.checks import find_dispatches, is_outer_wrapper, refuse_unknown
from megabatch.wrappers.collective_order import END, OrderedWrapper
from megabatch.wrappers.exact_gradients import ExactGradients
from megabatch.wrappers.fsdp2 import FSDP2Wrapper, groups_of_info, managed_groups, managed_ids
from megabatch.wrappers.rank_sums import agree_on_layouts, sum_over_ranks

SAMPLE_AXES = (*DATA_AXES, EXPERT_AXIS)  # ranks along these see different samples
SHARING_AXES = (*CONTEXT_AXES, "tp", "pp")  # ranks along these see the same samples
# Attributes of configs and of layers that bound the tokens of an expert.
CAPACITIES = (
    "capacity_factor", "expert_capacity", "expert_capacity_factor", "moe_expert_capacity_factor", "drop_tokens",
)  # fmt: skip


class ExpertParallelWrapper(OrderedWrapper):
    """Experts on ranks of their own in a model without a wrapper: both kinds of gradients are summed once per update.

    Raises `PlanError` on all ranks if ranks that hold the same experts begin with other weights.
    """

    kind_name = "expert parallelism"
    forwards_meet = True  # ranks exchange tokens in every layer of experts

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(model, DataRanks(groups_of(mesh, SAMPLE_AXES)[::-1]))
        self._replica_groups = [group for group in groups_of(mesh, DATA_AXES) if group.size() > 1]
        self._layers = modules_with_experts(model)
        self._watch = SummedOutputs(model)
        self._check_replicas(mesh.get_local_rank(EXPERT_AXIS))

    def accumulate_in(self, wide: Gradients) -> None:
        refuse_same_bits(wide)
        super().accumulate_in(wide)

    @property
    def is_microbatch_local(self) -> bool:
        return False  # every forward exchanges tokens

    def choose(self, policy: str) -> Choice:
        policy, _ = super().choose(policy)
        return policy, "no wrapper: every rank keeps the gradient of what it holds, summed once per update"

    def before_agreement(self, *, is_new: bool) -> None:
        self.collective_order.want_comparison(is_new=is_new)

    @contextlib.contextmanager
    def microbatch(self, policy: str, *, last: bool) -> Generator[None]:
        with contextlib.ExitStack() as hooks:
            for number, layer in enumerate(self._layers.values()):
                hooks.enter_context(layer.register_forward_pre_hook(partial(self._meet, 2 * number)))
                hooks.enter_context(layer.register_forward_hook(partial(self._watch_backward, 2 * number + 1)))
            with self._watch.of_first_microbatch():
                yield
            self.meet(END)

    def describe_collective(self, number: int) -> str:
        if number < 0:
            return super().describe_collective(number)
        collective = "return gradients" if number % 2 else "exchange tokens"
        return f"{collective} of {list(self._layers)[(number & 0xFFFFFFFF) // 2]!r}"

    def finish_update(self) -> None:
        """Sum the gradients of experts over their copies, and all others over all data ranks."""
        self.collective_order.reset()
        with torch.no_grad():
            agree_on_layouts(self.parameters, self.ranks, self._wide)
            experts: list[Tensor] = []
            dense: list[Tensor] = []
            for parameter in self.parameters:
                if parameter.grad is not None:
                    (experts if is_expert(parameter) else dense).append(local(parameter.grad))
            for group in self._replica_groups:
                sum_over_ranks(experts, group)
            for group in self.ranks.groups:
                sum_over_ranks(dense, group)

    def discard(self) -> None:
        self.collective_order.reset()

    def _meet(self, number: int, *_: object) -> None:
        self.meet(number)

    def _watch_backward(self, number: int, _layer: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._meet, number))

    def _check_replicas(self, expert_rank: int) -> None:
        """Compare the weights of experts between the ranks that hold the same ones."""
        experts = [(name, expert) for name, expert in self._model.named_parameters() if is_expert(expert)]
        sums = [int(checksum(local(expert.detach()))) % 2**48 for _, expert in experts]
        rows = [row[1:] for row in self.ranks.exchange_numbers([expert_rank, *sums]) if row[0] == expert_rank]
        places = [place for place, checksums in enumerate(zip(*rows, strict=True)) if len(set(checksums)) > 1]
        if [True] in self.ranks.exchange_numbers([bool(places)]):
            # A rank whose own copies agree names the first expert.
            name, _ = experts[min(places, default=0)]
            raise PlanError(
                f"parameter {name!r} has other weights on ranks that hold the same experts; seed all ranks alike "
                "before the model is made, or load one checkpoint on all"
            )


class ExpertParallelFSDP2(FSDP2Wrapper):
    """FSDP2 around experts on ranks of their own: every group of parameters is summed over its own mesh."""

    def __init__(self, model: nn.Module, modules: list[FSDPModule], ranks: DataRanks) -> None:
        super().__init__(model, modules, ranks)
        self.kind_name = f"{self.kind_name} and expert parallelism"
        self._watch = SummedOutputs(model)

    def accumulate_in(self, wide: Gradients) -> None:
        refuse_same_bits(wide)
        super().accumulate_in(wide)

    @contextlib.contextmanager
    def microbatch(self, policy: str, *, last: bool) -> Generator[None]:
        with super().microbatch(policy, last=last), self._watch.of_first_microbatch():
            yield


class SummedOutputs(TorchDispatchMode):
    """Refuses a model whose ranks along ``ep`` add up the outputs of experts, as ranks that share samples do.

    The backward of such a sum gives experts the gradient of one rank's samples alone.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._layers = modules_with_experts(model)
        experts = filter(is_expert, model.parameters())
        self._groups = [dist.get_process_group_ranks(expert.device_mesh.get_group(EXPERT_AXIS)) for expert in experts]
        self._widths: set[int] = set()  # of tensors that were summed
        self._is_first = not has_compiled(model)  # a compiler leaves a forward alone in which a mode is open

    @contextlib.contextmanager
    def of_first_microbatch(self) -> Generator[None]:
        """Look at the first microbatch. Raise `PlanError` after it, on the ranks that have seen such a sum."""
        if not self._is_first:
            yield
            return
        self._is_first = False
        widths: dict[int, str] = {}

        def note_width(name: str, _layer: nn.Module, _inputs: Any, output: Any) -> None:
            widths.update(dict.fromkeys(_widths_of(output), name))

        with contextlib.ExitStack() as hooks:
            for name, layer in self._layers.items():
                hooks.enter_context(layer.register_forward_hook(partial(note_width, name)))
            with self:
                yield
        if summed := widths.keys() & self._widths:
            raise stranding(
                PlanError(
                    f"ranks along 'ep' sum the outputs of the experts of {widths[summed.pop()]!r}, as if they shared "
                    "samples; name the axis 'tp' and give these ranks the same samples, or exchange tokens"
                )
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # the operations inside of it come here
        is_sum = func.namespace in ("c10d", "_c10d_functional") and "allreduce" in func.__name__.replace("_", "")
        if is_sum and dist.get_process_group_ranks(_group_among(args)) in self._groups:
            self._widths |= _widths_of(args)
        return func(*args, **(kwargs or {}))


def _widths_of(values: Any) -> set[int]:
    """Return the sizes of the last dim of all tensors that have several."""
    return {leaf.shape[-1] for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.ndim > 1}


def modules_with_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold experts on ranks of their own, by name."""
    return {
        name: module for name, module in model.named_modules() if any(map(is_expert, module.parameters(recurse=False)))
    }


def wrapper_of_experts(model: nn.Module, inner: nn.Module, mesh: DeviceMesh | None) -> Wrapper:
    """Return the wrapper of a model with experts on ranks of their own.

    Args:
        model: The model as it was given.
        inner: The same without ``torch.compile``.
        mesh: The mesh that the accumulator was given, or None.

    Raises:
        PlanError: A wrapper, a mesh, a layout or a layer whose gradient would not be exact.
    """
    if is_outer_wrapper(inner):
        raise PlanError(
            f"the model has experts on ranks of their own (mesh axis 'ep') in {type(inner).__name__}, which would sum "
            "the gradients of different experts; shard with fully_shard, or leave the wrapper out"
        )
    _refuse_shared_samples(inner)
    _refuse_capacity(inner)
    _check_placements(inner)
    if modules := list(filter(is_fsdp2, inner.modules())):
        return ExpertParallelFSDP2(model, modules, _sharded_ranks(model, modules, mesh))
    refuse_unknown(inner)
    return ExpertParallelWrapper(model, _plain_mesh(inner, mesh))


def refuse_same_bits(wide: Gradients) -> None:
    """Raise `PlanError` for `SameBits`."""
    if isinstance(wide, ExactGradients):
        raise PlanError(
            "SameBits and experts are on ranks of their own (mesh axis 'ep'), where an expert adds the tokens of "
            "several ranks in one product; keep every expert on every rank, or leave SameBits out"
        )


def _group_among(arguments: Sequence[Any]) -> dist.ProcessGroup:
    """Return the process group of a collective, which its operation names or holds in a box."""
    boxed = [argument for argument in arguments if is_boxed_group(argument)]
    return dist.ProcessGroup.unbox(boxed[0]) if boxed else group_named(arguments[-1])


def _plain_mesh(model: nn.Module, mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the mesh of all data ranks, with the axis ``ep``."""
    meshes = [parameter.device_mesh for parameter in filter(is_dtensor, model.parameters())]
    for stray in meshes:
        if stray != meshes[0] or stray.mesh_dim_names != (EXPERT_AXIS,):
            raise PlanError(
                f"a parameter is a DTensor over the mesh axes {stray.mesh_dim_names} that no wrapper manages; make "
                "experts DTensors over one mesh of the axis 'ep', and shard over data axes with fully_shard"
            )
    mesh = root_mesh(meshes[0]) if mesh is None else mesh
    _refuse_axes(mesh, {*(mesh.mesh_dim_names or (None,))}.difference(SAMPLE_AXES))
    if EXPERT_AXIS not in (mesh.mesh_dim_names or ()) or mesh[EXPERT_AXIS] != meshes[0]:
        raise PlanError("the mesh has other ranks along 'ep' than the experts of the model; give both the same mesh")
    if mesh.size() < dist.get_world_size():
        raise PlanError(
            f"experts are on {mesh.size()} of {dist.get_world_size()} processes, and what the others do is not known; "
            f"give mesh= with the axes of all, from {', '.join(SAMPLE_AXES)}"
        )
    return mesh


def _sharded_ranks(model: nn.Module, modules: list[FSDPModule], mesh: DeviceMesh | None) -> DataRanks:
    """Return the ranks that see different samples: those over which FSDP2 reduces what is no expert."""
    groups = managed_groups(model, modules)
    dense = [group for group in groups if not any(map(is_expert, sharded_parameters(group)))]
    if not dense:
        raise PlanError(
            "every parameter is an expert on ranks of its own, so the ranks that see different samples are not known; "
            "call fully_shard on the root too"
        )
    info = dense[0].mesh_info
    if any(group.mesh_info.mesh != info.mesh for group in dense):
        raise PlanError("parameters that are no experts are sharded over different meshes; use one mesh for all")
    everyone = _ranks_of(info.mesh)
    managed = managed_ids(dense)
    for name, parameter in model.named_parameters():
        if is_expert(parameter):
            if _ranks_of(parameter.device_mesh) != everyone:
                raise PlanError(
                    f"expert {name!r} is on {parameter.device_mesh.size()} ranks with its copies, and FSDP2 reduces "
                    f"other parameters over {len(everyone)}; shard experts over the data ranks that are left beside "
                    "'ep'"
                )
        elif parameter.requires_grad and id(parameter) not in managed:
            raise PlanError(
                f"parameter {name!r} is no expert and is sharded together with experts, over the ranks that hold the "
                "same ones; call fully_shard on the experts alone first"
            )
    _refuse_axes(root_mesh(info.mesh), SHARING_AXES)
    if mesh is not None:
        _refuse_axes(mesh, SHARING_AXES)
        if _ranks_of(mesh) != everyone:
            raise PlanError(
                f"the mesh has {mesh.size()} data ranks but FSDP2 reduces over {len(everyone)}, or over others; give "
                "both the same mesh"
            )
    return DataRanks(groups_of_info(info))


def _ranks_of(mesh: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist())


def _refuse_axes(mesh: DeviceMesh, axes: Collection[str | None]) -> None:
    """Raise `PlanError` for axes of several ranks that do not go with ``ep``."""
    for axis, size in zip(mesh.mesh_dim_names or (None,), mesh.mesh.shape, strict=False):
        if size > 1 and axis in axes:
            raise PlanError(
                f"mesh axis {axis!r} has {size} ranks beside 'ep'; expert parallelism is exact with the data "
                f"axes {', '.join(DATA_AXES)} alone, so leave out cp, tp and pp, and name the axes of all data ranks"
            )


def _refuse_shared_samples(model: nn.Module) -> None:
    """Refuse transformers' experts whose ranks share one batch, by its tensor parallelism or without it."""
    for module in model.modules():
        if (size := getattr(module, "_tp_size", None)) not in (None, 1):
            raise PlanError(
                f"the model was made with tp_size={size} beside its experts, so that ranks share samples; give "
                "DistributedConfig fsdp_size= and ep_size=, and leave tp_size out"
            )
    for dispatch in find_dispatches(model):
        if (size := dispatch.implementation.tp_mesh.size()) > 1:
            raise PlanError(
                f"the experts of {dispatch.name!r} are dealt out along 'ep', but {size} ranks share their samples "
                "(tp_mesh of apply_expert_parallelism); name the axis 'tp' in the mesh, or give a tp_mesh of one rank"
            )


def _refuse_capacity(model: nn.Module) -> None:
    """Refuse experts that drop tokens above a capacity: which ones depends on the cut and on other ranks' samples."""
    config: Any = getattr(with_config(model), "config", None)
    for owner in (config, *model.modules()):
        for name in CAPACITIES:
            if value := getattr(owner, name, None):
                raise PlanError(
                    f"{name} is {value!r}, so experts drop tokens, and which ones depends on the cut; dispatch without "
                    f"a capacity ({name} = None)"
                )


def _check_placements(model: nn.Module) -> None:
    """Refuse parameters over ``ep`` that are not whole experts."""
    for name, parameter in model.named_parameters():
        if is_expert(parameter):
            placement = parameter.placements[parameter.device_mesh.mesh_dim_names.index(EXPERT_AXIS)]
            if not placement.is_shard() or placement.dim != 0:
                raise PlanError(
                    f"parameter {name!r} is {placement} over the mesh axis 'ep'; shard experts there by their number, "
                    "Shard(0), and leave every other parameter out of it"
                )

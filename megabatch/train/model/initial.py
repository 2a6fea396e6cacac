"""Initial: memory and weights for a model that has neither, a block at a time; a sharded model is never whole anywhere.

Fresh weights are defined block by block: torch's generator is seeded by the run's seed and the block's name, and the
model's own rules run on that block, on the CPU. They are therefore the same, to the bit, for every wrapper, number of
ranks and device.
"""

import contextlib
import hashlib
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

INITIALIZED = "_is_hf_initialized"  # transformers' mark on a tensor that its rules leave as it is


class Saved(Protocol):
    """Weights that are somewhere else, in a file say, and can be read in part."""

    def read(self, names: list[str], rows: slice | None) -> Tensor | None:
        """Rows of a tensor, or all of it, by any of its names; None where it has none of them."""
        ...


@dataclass(frozen=True)
class Unit:
    """What is initialised at a time: a block with all that is below it, or the tensors of one other module."""

    name: str
    module: nn.Module
    owner: PreTrainedModel  # whose rules hold for it
    is_whole: bool  # with what is below it

    def modules(self) -> list[nn.Module]:
        return list(self.module.modules()) if self.is_whole else [self.module]


@contextlib.contextmanager
def seeded(seed: int, name: str) -> Generator[None, None, None]:
    """Surrounds what draws from torch's own generator on the CPU, which is afterwards as it was."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest[:7], "little"))
        yield


def plan_units(model: PreTrainedModel, blocks: Mapping[str, nn.Module]) -> list[Unit] | None:
    """The units of a model on the meta device, in order; None where its rules do not say how each tensor begins.

    Such a model (one that fills a tensor in its constructor only) has to be made whole.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            units = list(units_of("", model, model, set(blocks)))
            return None if untouched(model, units) else units
    except Exception:  # rules that look at values, of which the meta device has none
        return None


def units_of(name: str, module: nn.Module, owner: PreTrainedModel, blocks: set[str]) -> Iterator[Unit]:
    """Children before parents, as transformers initialises; a module whose rules reach into those below is one unit."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    if name in blocks or reaches_down(module, owner):
        yield Unit(name, module, owner, is_whole=True)
        return
    for child_name, child in module.named_children():
        yield from units_of(f"{name}.{child_name}".removeprefix("."), child, owner, blocks)
    if own_tensors(module):
        yield Unit(name, module, owner, is_whole=False)


def reaches_down(module: nn.Module, owner: PreTrainedModel) -> bool:
    """Whether the module's rules write to tensors of those below it; on the meta device, where writing is free."""
    own = {id(tensor) for tensor in own_tensors(module).values()}
    below = [tensor for each in module.modules() for tensor in own_tensors(each).values() if id(tensor) not in own]
    versions = [tensor._version for tensor in below]
    with torch.no_grad(), guard_torch_init_functions():
        cast(Any, owner)._init_weights(module)
    return versions != [tensor._version for tensor in below]


def untouched(model: nn.Module, units: list[Unit]) -> list[str]:
    """Names of the tensors that the model's rules never write; on the meta device."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    versions = {name: tensor._version for name, tensor in tensors.items()}
    for unit in units:
        initialize(unit)
    return [name for name, tensor in tensors.items() if tensor._version == versions[name] and tensor.numel()]


def initialize(unit: Unit) -> None:
    """Run the model's own rules on the unit."""
    with torch.no_grad(), guard_torch_init_functions():
        if unit.is_whole:
            apply_rules(unit.module, unit.owner)
        else:
            cast(Any, unit.owner)._init_weights(unit.module)


def apply_rules(module: nn.Module, owner: PreTrainedModel) -> None:
    """What transformers' ``initialize_weights`` does: children first, each by the rules of the model it belongs to."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child in module.children():
        apply_rules(child, owner)
    cast(Any, owner)._init_weights(module)


def fill(model: nn.Module, units: list[Unit], seed: int, device: torch.device, saved: Saved | None = None) -> None:
    """Give every tensor of the model its memory on the device, and its values: the saved ones, else fresh ones.

    Parameters that are cut or sharded get this rank's part, and nothing is ever whole but one unit.
    """
    pending = Pending(model, device)
    for tensor, names in list(pending.names.items()) if saved is not None else []:
        pending.settle_saved(tensor, names, cast(Saved, saved))
    for unit in units:
        tensors = [tensor for each in unit.modules() for tensor in own_tensors(each).values()]
        wholes = {tensor: pending.put_whole(tensor) for tensor in tensors if tensor in pending.names}
        if wholes:
            with seeded(seed, unit.name):
                initialize(unit)
        for tensor in list(wholes):
            pending.settle(tensor, wholes.pop(tensor))
    for tensor in (*model.parameters(), *model.buffers()):
        if hasattr(tensor, INITIALIZED):
            delattr(tensor, INITIALIZED)


class Pending:
    """The tensors of a model that have no memory yet, and every name and place of each: tied ones have several."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.names: dict[Tensor, list[str]] = {}
        self._places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        self._device = device
        for path, module in model.named_modules():
            for name, tensor in own_tensors(module).items():
                self.names.setdefault(tensor, []).append(f"{path}.{name}".removeprefix("."))
                self._places.setdefault(tensor, []).append((module, name))

    def put_whole(self, tensor: Tensor) -> Tensor:
        """Put a whole tensor of zeros on the CPU where the one without memory stands."""
        return self._put(tensor, torch.zeros(tensor.shape, dtype=tensor.dtype))

    def settle(self, tensor: Tensor, whole: Tensor) -> None:
        """Put into its place what stays of a whole tensor: all of it, or this rank's part."""
        self._settle(tensor, whole.detach()[region_of(tensor)].clone() if is_cut(tensor) else whole.detach())

    def settle_saved(self, tensor: Tensor, names: list[str], saved: Saved) -> None:
        """Put into its place what is saved of a tensor, if it is."""
        if not is_cut(tensor):
            part = saved.read(names, None)
        else:
            rows, *others = region_of(tensor)
            part = saved.read(names, rows)
            part = None if part is None else part[(slice(None), *others)].contiguous()
        if part is not None:
            self._settle(tensor, part)

    def _settle(self, tensor: Tensor, values: Tensor) -> None:
        values = values.to(self._device, tensor.dtype)
        final = shard_like(tensor, values) if isinstance(tensor, DTensor) else values
        setattr(self._put(tensor, final), INITIALIZED, True)
        del self.names[tensor], self._places[tensor]

    def _put(self, tensor: Tensor, new: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        for module, name in self._places[tensor]:
            setattr(module, name, new)
        return new


def is_cut(tensor: Tensor) -> bool:
    """Whether this rank may hold a part of the tensor only."""
    return isinstance(tensor, DTensor)


def region_of(tensor: Tensor) -> tuple[slice, ...]:
    """What this rank holds of a tensor that is cut along one or more axes of a mesh: a range of each dim.

    The last axis cuts first: FSDP2 shards what tensor parallelism has left. Each cuts in torch.chunk's way.
    """
    laid = cast(DTensor, tensor)
    starts, sizes = [0] * laid.ndim, list(laid.shape)
    for axis in reversed(range(laid.device_mesh.ndim)):
        placement = laid.placements[axis]
        if placement.is_replicate():
            continue
        dim = cast(Shard, placement).dim
        chunk = -(-sizes[dim] // laid.device_mesh.size(axis))
        before = min(chunk * laid.device_mesh.get_local_rank(axis), sizes[dim])
        starts[dim], sizes[dim] = starts[dim] + before, min(chunk, sizes[dim] - before)
    local = cast(Any, laid)._local_tensor.shape
    assert tuple(sizes) == tuple(local), f"{sizes} of {tuple(laid.shape)} as {laid.placements}, and {local} is there"
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def shard_like(tensor: DTensor, local: Tensor) -> DTensor:
    """This rank's shard, placed as the tensor without memory is."""
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's own parameters and buffers, by their names in it."""
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}

"""Weights of a model: fresh ones, made a block at a time, or those of files, read by the shard.

Torch's generator is seeded by the run's seed and a block's name, and the model's own rules run on that block, on the
CPU. Fresh weights are therefore the same, to the bit, for every wrapper, number of ranks and device, and a sharded
model is never whole anywhere.
"""

import contextlib
import hashlib
import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import guard_torch_init_functions
from transformers.utils.hub import cached_file

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.config import ModelConfig
from megabatch.train.config.recipe_paths import check_weights
from megabatch.train.model.architecture import construct, silence
from megabatch.train.model.frozen import four_bit_options, kind_of, prepare_four_bits
from megabatch.train.parallel.wrap import blocks_of, dtype_of
from megabatch.train.runtime.plugins import blamed, load_function

# Mark of transformers on a tensor that its rules leave as it is.
INITIALIZED = "_is_hf_initialized"
# Tensors in a line.
NUM_NAMED = 3
WHOLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


class Saved(Protocol):
    """Weights that are somewhere else, in a file say, and can be read in part."""

    def read(self, names: list[str], rows: slice | None) -> Tensor | None:
        """Rows of a tensor, or all of it, by any of its names; None where it has none of them."""
        ...


@dataclass(frozen=True)
class Unit:
    """A block with all that is below it, or the tensors of another module, initialized at once."""

    name: str
    module: nn.Module
    owner: PreTrainedModel  # whose rules hold for it
    is_whole: bool  # with what is below it

    def modules(self) -> list[nn.Module]:
        return list(self.module.modules()) if self.is_whole else [self.module]


@dataclass(frozen=True)
class ModelSource:
    """A model, and how its weights come into it."""

    model: nn.Module
    text: str  # in words
    units: list[Unit] | None = None  # the model is an outline, to be filled by them; None: it has its weights
    saved: Saved | None = None  # where its weights are; None: they are fresh


def own_source(config: ModelConfig, seed: int) -> ModelSource:
    """Return the module that model.function makes, whole."""
    name = cast(str, config.function)
    function = load_function(name, "model.function")
    with seeded(seed, "model.function"), blamed(f"model.function {name!r}", "mend it, or model.options"):
        model = function(**config.options)
    if isinstance(model, list | tuple | Mapping):
        models: Any = model
        try:
            model = nn.ModuleDict(models) if isinstance(models, Mapping) else nn.ModuleList(models)
        except (TypeError, KeyError) as error:
            raise MegabatchError(
                f"model.function {name!r} returns a {type(models).__name__} that is none of torch modules "
                f"({in_one_line(error)}); return modules, in a mapping by names"
            ) from None
    if not isinstance(model, nn.Module):
        raise MegabatchError(
            f"model.function {name!r} returns a {type(model).__name__}; expected a torch module: return one"
        )
    return ModelSource(model.to(dtype_of(config)), f"{type(model).__name__} of {name}, made whole on every rank")


def is_several(model: nn.Module) -> bool:
    """Return True for a container of several models, which has no forward of its own."""
    return type(model) in (nn.ModuleList, nn.ModuleDict)


def models_of(model: nn.Module) -> list[nn.Module]:
    return list(model.children()) if is_several(model) else [model]


def fresh_source(
    outline: PreTrainedModel, config: ModelConfig, architecture: PreTrainedConfig, seed: int
) -> ModelSource:
    """Return the outline, to be filled with fresh weights, or the whole model if they cannot be made by the block."""
    text = f"{type(outline).__name__}, fresh weights of run.seed = {seed}"
    units = plan_units(outline, blocks_of(outline))
    if units is not None:
        return ModelSource(outline, text, units)
    with seeded(seed, ""):
        model = construct(config, architecture)
    return ModelSource(model, f"{text}, made whole on every rank: its rules do not say how each of its tensors begins")


def saved_source(
    outline: PreTrainedModel, config: ModelConfig, architecture: PreTrainedConfig, seed: int, *, sharded: bool
) -> ModelSource:
    check_weights(cast(str, config.name))
    text = f"{type(outline).__name__}, weights of {config.name}"
    if not sharded:
        return ModelSource(*load_whole(config, architecture, seed, text))
    saved, units = saved_weights(cast(str, config.name)), plan_units(outline, blocks_of(outline))
    if saved is not None and units is not None and saved.fits(outline):
        return ModelSource(outline, f"{text}, each rank reads its shard", units, saved)
    text = f"{text}, read whole on every rank: its files do not name the tensors as the model does"
    return ModelSource(*load_whole(config, architecture, seed, text))


def load_whole(config: ModelConfig, architecture: PreTrainedConfig, seed: int, text: str) -> tuple[nn.Module, str]:
    """Return the model with the weights of model.name, and in words which of them were not there."""
    options = four_bit_options(config)
    if config.attention is not None:
        options["attn_implementation"] = config.attention
    try:
        with silence(), seeded(seed, ""):
            model, report = cast(Any, AutoModelForCausalLM).from_pretrained(
                config.name, config=architecture, dtype=dtype_of(config), trust_remote_code=False,
                output_loading_info=True, **options,
            )  # fmt: skip
    except Exception as error:
        raise MegabatchError(
            f"cannot read the weights of model.name = {config.name!r} ({in_one_line(error)}); "
            "name a folder that save_pretrained has written, or an id of the hub that can be reached from here"
        ) from None
    missing = sorted(report["missing_keys"])
    if missing:
        more = ", ..." if len(missing) > NUM_NAMED else ""
        count = "1 of its tensors is" if len(missing) == 1 else f"{len(missing)} of its tensors are"
        text = f"{text}; {count} not there and fresh: {', '.join(missing[:NUM_NAMED])}{more}"
    if config.quantize is not None:
        prepare_four_bits(model, config)
        text = f"{text}; linear layers in {kind_of(config)}"
    return model, text


@contextlib.contextmanager
def seeded(seed: int, name: str) -> Generator[None, None, None]:
    """Seed torch's generator on the CPU, and restore it afterwards."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest[:7], "little"))
        yield


def plan_units(model: PreTrainedModel, blocks: Mapping[str, nn.Module]) -> list[Unit] | None:
    """Return the units of a model on the meta device, in order; None where its rules do not say how each tensor begins.

    Such a model (one that fills a tensor in its constructor only) has to be made whole.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            units = list(units_of("", model, model, set(blocks)))
            return None if untouched(model, units) else units
    except Exception:
        # These rules look at values, of which the meta device has none.
        return None


def units_of(name: str, module: nn.Module, owner: PreTrainedModel, blocks: set[str]) -> Iterator[Unit]:
    """Children before parents, as transformers initializes; a module whose rules reach into those below is one unit."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    if name in blocks or reaches_down(module, owner):
        yield Unit(name, module, owner, is_whole=True)
        return
    for child_name, child in module.named_children():
        yield from units_of(f"{name}.{child_name}".removeprefix("."), child, owner, blocks)
    if own_tensors(module):
        yield Unit(name, module, owner, is_whole=False)


def reaches_down(module: nn.Module, owner: PreTrainedModel) -> bool:
    """Return True if the module's rules write to tensors of modules below it. On the meta device writing is free."""
    ids = {id(tensor) for tensor in own_tensors(module).values()}
    below = [tensor for part in module.modules() for tensor in own_tensors(part).values() if id(tensor) not in ids]
    versions = [tensor._version for tensor in below]
    with torch.no_grad(), guard_torch_init_functions():
        cast(Any, owner)._init_weights(module)
    return versions != [tensor._version for tensor in below]


def untouched(model: nn.Module, units: list[Unit]) -> list[str]:
    """Return the names of the tensors that the model's rules never write. On the meta device."""
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
    """Initialise as transformers' ``initialize_weights``: children first, each by the rules of its own model."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child in module.children():
        apply_rules(child, owner)
    cast(Any, owner)._init_weights(module)


def fill(
    model: nn.Module, units: list[Unit], seed: int, device: torch.device, saved: Saved | None = None,
    weights_on: torch.device | None = None,
) -> None:  # fmt: skip
    """Give every tensor of the model its memory on the device, and its values: the saved ones, else fresh ones.

    Parameters that are cut or sharded get this rank's part, and nothing is ever whole but one unit. They are on the
    device ``weights_on``, if that is another one.
    """
    pending = Pending(model, device, weights_on or device)
    for tensor, names in list(pending.names.items()) if saved is not None else []:
        rows, *slices = region_of(tensor) if isinstance(tensor, DTensor) else [None]
        part = cast(Saved, saved).read(names, rows)
        if part is not None:
            pending.settle(tensor, part[(slice(None), *slices)].contiguous() if slices else part)
    for unit in units:
        tensors = [tensor for module in unit.modules() for tensor in own_tensors(module).values()]
        wholes = {tensor: pending.put(tensor) for tensor in tensors if tensor in pending.names}
        if wholes:
            with seeded(seed, unit.name):
                initialize(unit)
        for tensor in list(wholes):
            full = wholes.pop(tensor).detach()
            pending.settle(tensor, full[region_of(tensor)].clone() if isinstance(tensor, DTensor) else full)
    for tensor in (*model.parameters(), *model.buffers()):
        if hasattr(tensor, INITIALIZED):
            delattr(tensor, INITIALIZED)


class Pending:
    """The tensors of a model that have no memory yet, and every name and place of each: tied ones have several."""

    def __init__(self, model: nn.Module, device: torch.device, weights_on: torch.device) -> None:
        self.names: dict[Tensor, list[str]] = {}
        self._places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        self._device, self._weights_on = device, weights_on
        for path, module in model.named_modules():
            for name, tensor in own_tensors(module).items():
                self.names.setdefault(tensor, []).append(f"{path}.{name}".removeprefix("."))
                self._places.setdefault(tensor, []).append((module, name))

    def settle(self, tensor: Tensor, values: Tensor) -> None:
        """Put values into their place: all of a tensor, or this rank's part."""
        values = values.to(self._weights_on if isinstance(tensor, nn.Parameter) else self._device, tensor.dtype)
        if isinstance(tensor, DTensor):
            # from_local would change the device.
            part, values = values, torch.empty_like(tensor, device=values.device)
            cast(DTensor, values).to_local().copy_(part)
        setattr(self.put(tensor, values), INITIALIZED, True)
        del self.names[tensor], self._places[tensor]

    def put(self, tensor: Tensor, new: Tensor | None = None) -> Tensor:
        """Put a tensor where the one without memory stands; None: a whole one of zeros, on the CPU."""
        new = torch.zeros(tensor.shape, dtype=tensor.dtype) if new is None else new
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        for module, name in self._places[tensor]:
            setattr(module, name, new)
        return new


def region_of(tensor: Tensor) -> tuple[slice, ...]:
    """Return the range of each dim that this rank holds of a tensor cut along axes of a mesh.

    The last axis cuts first: FSDP2 shards what tensor parallelism has left. Each cuts in torch.chunk's way.
    """
    sharded = cast(DTensor, tensor)
    starts, sizes = [0] * sharded.ndim, list(sharded.shape)
    for axis in reversed(range(sharded.device_mesh.ndim)):
        placement = sharded.placements[axis]
        if placement.is_replicate():
            continue
        dim = cast(Shard, placement).dim
        chunk = -(-sizes[dim] // sharded.device_mesh.size(axis))
        before = min(chunk * sharded.device_mesh.get_local_rank(axis), sizes[dim])
        starts[dim], sizes[dim] = starts[dim] + before, min(chunk, sizes[dim] - before)
    local = cast(Any, sharded)._local_tensor.shape
    assert tuple(sizes) == tuple(local), (
        f"{sizes} of {tuple(sharded.shape)} as {sharded.placements}, and {local} is there"
    )
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


@dataclass(frozen=True)
class SavedWeights:
    """Weights in safetensors files, of which any part can be read."""

    files: Mapping[str, str]  # name of a tensor → its file

    def read(self, names: list[str], rows: slice | None) -> Tensor | None:
        for name in names:
            if name in self.files:
                with opened(self.files[name]) as file:
                    return file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        return None

    def fits(self, model: nn.Module) -> bool:
        """Return True if each parameter and saved buffer is there, by one of its names and in its shape."""
        availability: dict[Tensor, bool] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            is_here = name in self.files and self.shape(name) == tuple(tensor.shape)
            availability[tensor] = availability.get(tensor, False) or is_here
        return all(availability.values())

    def shape(self, name: str) -> tuple[int, ...]:
        with opened(self.files[name]) as file:
            return tuple(file.get_slice(name).get_shape())


def saved_weights(name: str) -> SavedWeights | None:
    """Return the safetensors files of a folder or a hub id; None where it has none."""
    with silence():
        if (index := file_of(name, INDEX_FILE)) is not None:
            try:
                files = dict[str, str](json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise MegabatchError(f"cannot read {index} ({in_one_line(error)}); copy or download it again") from None
            paths = {file: file_of(name, file) for file in set(files.values())}
            for file, path in paths.items():
                if path is None:
                    raise MegabatchError(
                        f"model.name is {name!r}, whose {INDEX_FILE} lists {file}, which is not there; copy or "
                        "download it again"
                    )
            return SavedWeights({tensor: cast(str, paths[file]) for tensor, file in files.items()})
        path = file_of(name, WHOLE_FILE)
    if path is None:
        return None
    with opened(path) as file:
        return SavedWeights(dict.fromkeys(file.keys(), path))


@contextlib.contextmanager
def opened(path: str) -> Generator[Any]:
    """Return a file of weights. Raises `MegabatchError` where it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise MegabatchError(
            f"cannot read the weights in {path} ({in_one_line(error)}); copy or download it again"
        ) from None


def file_of(name: str, file: str) -> str | None:
    """Return the path of a file of a folder or a hub id; None where it is not there."""
    return cached_file(name, file, _raise_exceptions_for_missing_entries=False)

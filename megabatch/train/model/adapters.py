"""The parameters that a recipe trains: LoRA adapters by peft, or all that model.freeze does not name.

peft makes the layers, before the model has memory and before it is wrapped. The first numbers of adapters follow from
run.seed and their names, as fresh weights do. They are the same for every wrapper and number of ranks.
"""

import fnmatch
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, cast

import torch
from torch import Tensor, nn

from megabatch.errors import MegabatchError, in_one_line, install_command
from megabatch.train.config import ModelConfig
from megabatch.train.model.architecture import silence
from megabatch.train.model.frozen import shape_of, stored
from megabatch.train.model.weights import ModelSource, Saved, seeded
from megabatch.train.parallel.wrap import dtype_of

# Peft's name of a single adapter.
ADAPTER = "default"
# Part of the names of an adapter's own parameters.
MARK = ".lora_"
# Part of the names of modules inside an adapter.
INSIDE = ".base_layer."
# Others look at the base's weights, or change them.
BEGINNINGS = (True, "gaussian")
TAKEN = (
    "r", "lora_alpha", "target_modules", "lora_dropout", "bias", "use_rslora", "lora_bias", "rank_pattern",
    "alpha_pattern", "layers_to_transform", "layers_pattern", "exclude_modules", "fan_in_fan_out", "init_lora_weights",
    "modules_to_save",
)  # fmt: skip
# peft trains copies of these modules; the trainer trains the modules themselves.
WHOLE = "modules_to_save"


def choose_trained(model: nn.Module, config: ModelConfig) -> list[str]:
    """Put in adapters and freeze as the recipe says. Return descriptions."""
    words = [] if config.lora is None else [adapt(model, config)]
    return [*words, freeze(model, config.freeze)] if config.freeze else words


def freeze(model: nn.Module, patterns: list[str]) -> str:
    """Freeze the parameters that the patterns match, tied ones by any of their names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matched = fnmatch.filter(parameters, pattern)
        if not matched:
            raise MegabatchError(
                f"model.freeze has {pattern!r}, which matches no parameter; the nearest name is "
                f"{get_close_matches(pattern, parameters, n=1, cutoff=0.0)[0]}"
            )
        for name in matched:
            parameters[name].requires_grad_(False)
    num_all, num_trained = num_parameters(model)
    if not num_trained:
        raise MegabatchError("model.freeze matches every parameter; leave some to be trained")
    return f"frozen: {num_all - num_trained:,} of {num_all:,} parameters"


def num_parameters(model: nn.Module) -> tuple[int, int]:
    """Return how many numbers the parameters stand for, of all and of those that are trained."""
    sizes = [(shape_of(parameter).numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)


def left_out(model: nn.Module, config: ModelConfig) -> frozenset[str]:
    """Return the names of the parameters that checkpoints do not have: those of the base of adapters."""
    if config.lora is None:
        return frozenset()
    return frozenset(
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and MARK not in name
    )


def adapt(model: nn.Module, config: ModelConfig) -> str:
    """Put adapters into the model and freeze the rest; what was done, in words. Raises `MegabatchError`."""
    lora, modules = lora_config(config), dict(model.named_modules())
    targets = lora.target_modules
    # peft ignores a target if there are others.
    for target in targets if isinstance(targets, list | set | tuple) else ():
        named("target_modules", target, modules)
    is_outline = any(parameter.is_meta for parameter in model.parameters())
    try:
        with silence():
            peft().inject_adapter_in_model(lora, model, adapter_name=ADAPTER, low_cpu_mem_usage=is_outline)
    except Exception as error:
        raise MegabatchError(
            f"peft refuses model.lora ({in_one_line(error)}); change it: the model has {there_are(modules)}"
        ) from None
    layers = dict(layers_of(model))
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(lora, key) or ():
            if not any(re.fullmatch(rf"(.*\.)?({pattern})", name) for name in layers):
                raise MegabatchError(
                    f"model.lora.{key} has {pattern!r}, which matches no layer with an adapter; those are "
                    f"{there_are(layers)}"
                )
    for layer in layers.values():
        weight = layer.get_base_layer().weight
        dtype = weight.dtype if weight.is_floating_point() else dtype_of(config)
        for name, parameter in layer.named_parameters():
            if "lora_" in name:
                # bfloat16 would round most steps away.
                parameter.data = parameter.data.to(torch.float32 if dtype == torch.bfloat16 else dtype)
    whole_targets = (config.lora or {}).get(WHOLE) or []
    if not isinstance(whole_targets, list):
        raise MegabatchError(
            f'model.lora.{WHOLE} is {whole_targets!r}; give a list of names of modules: ["lm_head"], say'
        )
    for target in cast("list[object]", whole_targets):
        for name in named(WHOLE, target, dict(model.named_modules())):
            train_whole(model, name)
    return words_of(model, layers)


def lora_config(config: ModelConfig) -> Any:
    """Return peft's LoraConfig of ``model.lora``. Raises `MegabatchError` for a key or a value that it cannot have."""
    options = dict(config.lora or {})
    for key in sorted(options.keys() - TAKEN):
        near = get_close_matches(key, TAKEN, n=1, cutoff=0.6)
        raise MegabatchError(
            f"unknown key model.lora.{key}; "
            + (f"the nearest key is {near[0]}" if near else f"it takes {', '.join(TAKEN)}: leave it out")
        )
    if (begins := options.get("init_lora_weights", True)) not in BEGINNINGS:
        raise MegabatchError(
            f"model.lora.init_lora_weights is {begins!r}, whose adapters change the base from the start; set "
            'it to true or "gaussian"'
        )
    for key in ("bias", WHOLE):
        if config.dtype == "bfloat16" and options.get(key, "none") not in ("none", []):
            raise MegabatchError(
                f"model.lora.{key} is {options[key]!r} and model.dtype 'bfloat16', in which small steps are lost; "
                f'leave {key} out, or set dtype to "float32"'
            )
    options.pop(WHOLE, None)
    try:
        return peft().LoraConfig(**options)
    except (TypeError, ValueError) as error:
        raise MegabatchError(f"peft refuses model.lora ({in_one_line(error)}); change it there") from None


def peft() -> Any:
    """Return the package. Raises `MegabatchError` where it is not installed."""
    try:
        with silence():
            return importlib.import_module("peft")
    except ModuleNotFoundError as error:
        raise MegabatchError(
            f"model.lora is set and {error.name} is not installed; {install_command('peft')}"
        ) from None


def named(key: str, target: object, modules: Mapping[str, nn.Module]) -> list[str]:
    names = [name for name in modules if f".{name}".endswith(f".{target}")]
    if not names:
        raise MegabatchError(
            f"model.lora.{key} has {target!r}, which no module is called; the model has {there_are(modules)}"
        )
    return names


def train_whole(model: nn.Module, name: str) -> None:
    """Unfreeze a module's own weights. Raises `MegabatchError` if they are tied, or an adapter is in it."""
    owners = owners_of(model)
    for part, parameter in model.get_submodule(name).named_parameters():
        shared = owners[id(parameter)]
        if len(stored(parameter)) > 1:
            raise MegabatchError(f"model.lora.{WHOLE} has {name!r}, which is in four bits; leave it out there")
        if len(shared) > 1 or MARK in f".{part}":
            problem = f"is tied ({', '.join(shared)})" if len(shared) > 1 else "has an adapter as well"
            raise MegabatchError(f"model.lora.{WHOLE} has {name!r}, which {problem}; leave it out of one of them")
        parameter.requires_grad_(True)


def owners_of(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by its id."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return owners


def there_are(modules: Mapping[str, nn.Module]) -> str:
    """Return the last parts of the names of modules that have a matrix."""
    with_matrix = [name for name, module in modules.items() if getattr(getattr(module, "weight", None), "ndim", 0) >= 2]
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in with_matrix))


def words_of(model: nn.Module, layers: Mapping[str, nn.Module]) -> str:
    """Describe what is trained."""
    num_all, num_trained = num_parameters(model)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    beside = sum(MARK not in name for name in trained)
    beside_text = f" and {beside} weights beside them" if beside else ""
    (dtype,) = {str(parameter.dtype).removeprefix("torch.") for parameter in trained.values()}
    return (
        f"lora: {num_trained:,} of {num_all:,} parameters are trained, in {dtype}: adapters of {len(layers)} layers "
        f"({there_are(layers)}){beside_text}; checkpoints have nothing else of the model"
    )


def layers_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Return the layers that have an adapter, by name."""
    kind = importlib.import_module("peft.tuners.lora").LoraLayer
    return ((name, module) for name, module in model.named_modules() if isinstance(module, kind))


def begun(source: ModelSource, config: ModelConfig, seed: int) -> ModelSource:
    """Return the source of a model with adapters: what they begin with is in it, or with what has yet to be filled."""
    lora, first = lora_config(config), dict[str, Tensor]()
    for path, layer in layers_of(source.model):
        parts = [getattr(layer, kind) for kind in layer.adapter_layer_names if len(getattr(layer, kind))]
        device = next(parts[0].parameters()).device
        for part in parts:
            part.to_empty(device="cpu")
        with seeded(seed, f"{path}{MARK}"), torch.no_grad():
            layer.reset_lora_parameters(ADAPTER, lora.init_lora_weights)
        first |= {
            f"{path}.{name}": weight.detach().clone() for name, weight in layer.named_parameters() if "lora_" in name
        }
        for part in parts:
            part.to(device)
    return source if source.units is None else replace(source, saved=WithFirst(first, source.saved))


@dataclass(frozen=True)
class WithFirst:
    """Weights of a model with adapters: their first numbers, and a base that is saved under the names it has alone."""

    first: Mapping[str, Tensor]
    base: Saved | None  # None: fresh

    def read(self, names: list[str], rows: slice | None) -> Tensor | None:
        tensor = next((self.first[name] for name in names if name in self.first), None)
        if tensor is not None:
            return tensor if rows is None else tensor[rows]
        return None if self.base is None else self.base.read([name.replace(INSIDE, ".") for name in names], rows)


def stir(model: nn.Module, seed: int) -> None:
    """Fill the half of each adapter that is zero at first, since the gradient of its other half is zero too."""
    for name, parameter in model.named_parameters():
        if MARK in name and not parameter.any():
            with seeded(seed, name), torch.no_grad():
                parameter.normal_(std=0.02)

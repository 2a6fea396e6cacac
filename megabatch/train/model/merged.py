"""Merged: a run's adapters as a folder of peft's own, or in the weights of the model that they were trained on."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig

from megabatch.errors import MegabatchError
from megabatch.train.checkpoints.metadata import first_difference, read_meta
from megabatch.train.config import Config
from megabatch.train.model.adapters import ADAPTER, MARK, WHOLE, merge, peft, whole_of
from megabatch.train.model.architecture import architecture_of, outline
from megabatch.train.model.build import identity_of
from megabatch.train.model.frozen import choose_trained, left_out, sealed
from megabatch.train.model.initial import fill
from megabatch.train.model.quantized import dequantize, quantize
from megabatch.train.model.source import fresh_source, load_whole, own_source
from megabatch.train.model.wrap import blocks_of
from megabatch.train.runtime.ranks import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"))
WEIGHTS = "adapter_model.safetensors"  # peft's name
INSIDE_PEFT = "base_model.model."  # what peft's own model has before the names of the one in it


@dataclass(frozen=True)
class Adapter:
    """Adapters without their base, to be saved."""

    model: nn.Module  # that they go into; its weights are not looked at
    config: Config
    tensors: Mapping[str, Tensor]

    def save_pretrained(self, folder: Path) -> None:
        """Write what peft's ``PeftModel.from_pretrained(base, folder)`` reads."""
        lora = cast(Any, self.model).peft_config[ADAPTER]
        lora.base_model_name_or_path, lora.inference_mode = self.config.model.name, True
        lora.task_type = "CAUSAL_LM" if self.config.model.function is None else None
        whole = whole_of(self.model, self.config.model)
        state = peft().get_peft_model_state_dict(
            self.model, state_dict=dict(self.tensors), adapter_name=ADAPTER, save_embedding_layers=False
        )
        lora.modules_to_save = (self.config.model.lora or {}).get(WHOLE)
        lora.save_pretrained(str(folder))
        state |= {name: each for name, each in self.tensors.items() if name.startswith(tuple(f"{it}." for it in whole))}
        named = {f"{INSIDE_PEFT}{name}": each.contiguous() for name, each in state.items()}
        save_file(named, folder / WEIGHTS, metadata={"format": "pt"})


def adapter_of(config: Config, tensors: Mapping[str, Tensor], checkpoint: Path) -> Adapter:
    """The adapters of a checkpoint. Raises `MegabatchError` where it is not of this recipe's."""
    if config.model.function is not None:
        model = own_source(config.model, config.run.seed).model
    else:
        model = outline(config.model, architecture_of(config.model))
    choose_trained(model, config.model)
    return Adapter(model, config, trained_of(model, tensors, checkpoint))


def trained_of(model: nn.Module, tensors: Mapping[str, Tensor], checkpoint: Path) -> dict[str, Tensor]:
    """What the checkpoint has of the model's parameters: the adapters, and what is trained beside them."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or MARK in name:
            if name not in tensors or tensors[name].shape != parameter.shape:
                raise MegabatchError(
                    f"{checkpoint} has no {name} of shape {list(parameter.shape)}, which the run's config.toml asks "
                    "for; put back the recipe that it was made with"
                )
            found[name] = tensors[name]
    return found


def merged_model(model: nn.Module, config: Config, tensors: Mapping[str, Tensor], checkpoint: Path) -> nn.Module:
    """The base with a checkpoint's adapters in its weights. Raises `MegabatchError` where the base is another."""
    if config.model.quantize is not None:
        quantize(model, config.model)
    choose_trained(model, config.model)
    check_base(model, config, checkpoint)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in trained_of(model, tensors, checkpoint).items():
            parameters[name].copy_(tensor)
        dequantize(model)
        merge(model)
    return model


def base_model(config: Config) -> nn.Module:
    """The model of ``model.name`` or ``model.config`` as training began with it, on the CPU."""
    architecture, seed = architecture_of(config.model), config.run.seed
    if config.model.name is not None:
        model, _ = load_whole(config.model, architecture, seed, "")
        with contextlib.suppress(OSError):  # not every model has one
            cast(Any, model).generation_config = GenerationConfig.from_pretrained(config.model.name)
        return model
    empty = outline(config.model, architecture)
    source = fresh_source(empty, blocks_of(empty), config.model, architecture, seed)
    if source.units is not None:
        fill(source.model, source.units, seed, ALONE.device)
    return source.model


def check_base(model: nn.Module, config: Config, checkpoint: Path) -> None:
    """Raise where a frozen weight is not the one that the adapters were trained on."""
    here = sealed(identity_of(model), model, left_out(model, config.model), ALONE)["parameters"]
    difference = first_difference(read_meta(checkpoint)["parameters"], json.loads(json.dumps(here)))
    if difference is not None:
        name, there, now = difference
        raise MegabatchError(
            f"{checkpoint} was trained on another base: the parameter {name} is {there} there and {now} here; let "
            "model.name of the run's config.toml be the base that it was trained on"
        )

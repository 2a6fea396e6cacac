"""Export: a run's model as a folder that transformers' from_pretrained reads, whole or not there."""

import contextlib
import os
import shutil
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from transformers import GenerationConfig

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.checkpoints.paths import BEST, POINTER, checkpoints_of, named_by, path_of, step_of, steps_of
from megabatch.train.checkpoints.retention import Checkpoints, ValidCheckpoint
from megabatch.train.checkpoints.tensor_files import SafePlanner, SafeReader, reason_of, without_group_warning
from megabatch.train.config import Config, ModelConfig
from megabatch.train.config.recipe import load_config
from megabatch.train.model.architecture import architecture_of, construct, outline
from megabatch.train.model.initial import fill, plan_units
from megabatch.train.model.merged import Adapter, adapter_of, base_model, merged_model
from megabatch.train.model.quantized import kind_of
from megabatch.train.model.silence import quiet
from megabatch.train.model.source import own_source
from megabatch.train.model.tokenizer import load_tokenizer
from megabatch.train.model.wrap import blocks_of
from megabatch.train.runtime.ranks import Ranks

RECIPE = "config.toml"  # of a run's folder
MODEL, AVERAGE = "learner.model.", "average."  # where a checkpoint has the weights, and their average
ALONE = Ranks(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class Checkpointed:
    """A checkpoint's weights by name."""

    tensors: Mapping[str, Tensor]
    num_averaged: int

    def read(self, names: list[str], rows: slice | None) -> Tensor | None:
        found = next((self.tensors[name] for name in names if name in self.tensors), None)
        return found if found is None or rows is None else found[rows]


def export(run_folder: Path, to: Path, *, step: int | str | None, merged: bool = False) -> str:
    """Write the model of a run's checkpoint and its tokenizer into a new folder; says what was written.

    ``step`` is a checkpoint's number, "best" or "latest"; None: the best where one is kept, else the latest. With
    optim.ema_decay it is the average of the weights. Of a run with model.lora it is the folder of an adapter, as peft
    reads it; ``merged``: the whole model, with the adapters in its weights.

    Raises `MegabatchError`, and leaves nothing behind, where that cannot be done.
    """
    check_target(to)
    config = config_of(run_folder)
    chosen = find_checkpoint(run_folder, step)
    checkpoint = chosen.path
    weights = read_weights(checkpoint)
    model: Any = exported(config, weights, checkpoint, merged=merged)
    with writing(to) as beside, quiet():
        model.save_pretrained(beside)
        tokenizer = load_tokenizer(config.model)
        if tokenizer is not None:
            tokenizer.save_pretrained(beside)
        for path in beside.rglob("*.safetensors"):
            path.chmod(next(beside.glob("*config.json")).stat().st_mode)  # they are made for the owner's eyes alone
    which = "the average of the weights" if weights.num_averaged else "the weights"
    kind = (
        adapter_text(model, run_folder)
        if isinstance(model, Adapter)
        else f"{type(model).__name__}, {config.model.dtype}, safetensors"
    )
    said = f"wrote {which} of {checkpoint} to {to}: {kind}"
    return "\n".join([*(f"warning: {line}" for line in chosen.warnings), said])


def exported(config: Config, weights: Checkpointed, checkpoint: Path, *, merged: bool) -> nn.Module | Adapter:
    """What is to be saved: the run's model, or its adapters alone."""
    if config.model.lora is None:
        if merged:
            raise MegabatchError("--merged is given and the run has no model.lora, so nothing to merge; leave it out")
        return loaded_model(config, weights, checkpoint)
    if not merged:
        return adapter_of(config, weights.tensors, checkpoint)
    base = base_model(config) if config.model.function is None else own_model(config)
    return merged_model(base, config, weights.tensors, checkpoint)


def adapter_text(adapter: Adapter, run_folder: Path) -> str:
    """What a folder with adapters is, and how it is used."""
    model = adapter.config.model
    base = model.name or f"{model.function or 'fresh weights'} with run.seed = {adapter.config.run.seed}"
    base += "" if model.quantize is None else f" in {kind_of(model)}"
    return (
        f"adapters without their base, {base}; load them with peft's PeftModel.from_pretrained(base, folder), or "
        f"write the whole model with `megabatch export {run_folder} --merged --to FOLDER`"
    )


def check_target(to: Path) -> None:
    """Raise where the folder holds something, is none, or is the one that a shell is in: it is put in place as a whole,
    and the shell would stay in the one that was there before."""
    if resolved(to) == resolved(Path.cwd()):
        raise MegabatchError(f"--to is {to}, the folder that you are in; name a folder that is new, or another one")
    to = resolved(to)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        kind = "is not empty" if to.is_dir() else "is a file"
        raise MegabatchError(f"--to is {to}, which {kind}; name a folder that is new or empty")


def config_of(run_folder: Path) -> Config:
    """The recipe of a run."""
    if not (run_folder / RECIPE).is_file():
        raise MegabatchError(f"{run_folder} has no {RECIPE}, so it is no run of megabatch's; name the folder of a run")
    return load_config(run_folder / RECIPE, [])


def find_checkpoint(run_folder: Path, step: int | str | None) -> ValidCheckpoint:
    """The checkpoint of that step, "best" or "latest"; None: the best where one is kept, else the latest.

    In place of one that is damaged it is the newest whole one up to the latest, unless it was asked for by name.
    """
    kept, shelf = steps_of(run_folder), Checkpoints(run_folder)
    if not kept:
        raise MegabatchError(f"{run_folder} has no checkpoint yet; export it when it has saved one (run.save_every)")
    name = named_by(checkpoints_of(run_folder) / BEST)
    if step == POINTER or (step is None and not name):
        return shelf.latest_valid(ALONE)
    number = step if isinstance(step, int) else step_of(name)
    found = path_of(run_folder, number) if number is not None else checkpoints_of(run_folder) / (name or BEST)
    if number is None or number not in kept:
        problem = "is not there or not whole"
    elif (damage := shelf.damage(number, ALONE)) is None:
        return ValidCheckpoint(found)
    else:
        problem = f"is damaged ({damage})"
    if step is None:
        chosen = shelf.latest_valid(ALONE)
        return ValidCheckpoint(chosen.path, (f"{found}, the best one, {problem}", *chosen.warnings))
    has = ", ".join(str(number) for number in kept)
    raise MegabatchError(f"{found} {problem}; this run has the steps {has}: choose with --step")


def read_weights(checkpoint: Path) -> Checkpointed:
    """The weights of a checkpoint, averaged where it has an average; without a process group."""
    try:
        described = SafeReader(checkpoint).read_metadata().state_dict_metadata
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in described.items()
            if isinstance(entry, TensorStorageMetadata) and name.startswith((MODEL, AVERAGE))
        }
        with without_group_warning():
            load_state(state, storage_reader=SafeReader(checkpoint), planner=SafePlanner(), no_dist=True)
    except (Exception, CheckpointException) as error:  # whatever a damaged file makes its reader raise
        reason = reason_of(error) if isinstance(error, CheckpointException) else in_one_line(error)
        raise MegabatchError(f"{checkpoint} is damaged ({reason}); choose an earlier step with --step") from None
    tensors = {name.removeprefix(MODEL): tensor for name, tensor in state.items() if name.startswith(MODEL)}
    averages = {name.removeprefix(AVERAGE): tensor for name, tensor in state.items() if name.startswith(AVERAGE)}
    rounded = {name: average.to(tensors[name].dtype) for name, average in averages.items()}
    return Checkpointed({**tensors, **rounded}, len(averages))


def loaded_model(config: Config, weights: Checkpointed, checkpoint: Path) -> nn.Module:
    """The run's model on the CPU, with these weights."""
    if config.model.function is not None:
        model = own_model(config)
        check_weights(model, weights, checkpoint)
    else:
        model = filled_model(config.model, weights, checkpoint)
    with torch.no_grad():
        for names, tensor in named_tensors(model):
            tensor.copy_(cast(Tensor, weights.read(names, None)))
    return model


def check_weights(model: nn.Module, weights: Checkpointed, checkpoint: Path) -> None:
    """Raise where the checkpoint is not of this model."""
    for names, tensor in named_tensors(model):
        saved = weights.read(names, None)
        if saved is None or saved.shape != tensor.shape:
            raise MegabatchError(
                f"{checkpoint} has no {names[0]} of shape {list(tensor.shape)}, which the run's {RECIPE} asks for; "
                "put back the recipe that it was made with"
            )


def named_tensors(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """What a checkpoint has of a model, each once with every name that it goes by."""
    names: dict[Tensor, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, []).append(name)
    return [(each, tensor) for tensor, each in names.items()]


def own_model(config: Config) -> nn.Module:
    """The module of model.function, if it knows how to be saved."""
    model = own_source(config.model, config.run.seed).model
    if not callable(getattr(model, "save_pretrained", None)):
        raise MegabatchError(
            f"model.function makes a {type(model).__name__}, which has no save_pretrained to export it with; "
            "give it that method, or read the checkpoint with torch.distributed.checkpoint"
        )
    return model


def filled_model(config: ModelConfig, weights: Checkpointed, checkpoint: Path) -> nn.Module:
    """transformers' model as the recipe describes it, with the weights in it where they fit."""
    architecture = architecture_of(config)
    model = outline(config, architecture)
    check_weights(model, weights, checkpoint)
    units = plan_units(model, blocks_of(model))
    if units is None:
        model = construct(config, architecture)
    else:
        fill(model, units, 0, torch.device("cpu"), weights)
    if config.name is not None:
        with contextlib.suppress(OSError), quiet():  # not every model has one
            cast(Any, model).generation_config = GenerationConfig.from_pretrained(config.name)
    return model


def resolved(path: Path) -> Path:
    """The path without "..", "." and links, so that it has a name and a parent; a loop of links is left as it is."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def writing(to: Path) -> Generator[Path, None, None]:
    """A folder beside, which becomes ``to`` at a good end and is gone at any other."""
    place = resolved(to)
    beside = place.with_name(f"{place.name}.tmp")
    try:
        shutil.rmtree(beside, ignore_errors=True)  # left by an export that was killed
        beside.mkdir(parents=True)
        yield beside
        os.replace(beside, place)
    except OSError as error:
        raise MegabatchError(
            f"cannot write {to} ({in_one_line(error)}); make room for it, or name another --to"
        ) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)

"""Export: the weights of a run's checkpoint, as a folder that transformers' from_pretrained reads or for a new run."""

import contextlib
import json
import os
import tempfile
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from transformers import GenerationConfig

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.checkpoints.exported_tokenizer import save_tokenizer
from megabatch.train.checkpoints.metadata import DamagedError, describe_versions, first_difference, read_meta
from megabatch.train.checkpoints.paths import BEST, POINTER, checkpoints_of, named_by, path_of, step_of, steps_of
from megabatch.train.checkpoints.retention import Checkpoints, ValidCheckpoint
from megabatch.train.checkpoints.tensor_files import SafePlanner, SafeReader, reason_of, without_group_warning
from megabatch.train.config import Config, ModelConfig
from megabatch.train.config.recipe import load_config
from megabatch.train.model.adapters import ADAPTER, INSIDE, MARK, WHOLE, layers_of, lora_config, owners_of, peft
from megabatch.train.model.architecture import architecture_of, construct, load_tokenizer, outline, silence
from megabatch.train.model.frozen import dequantize, described, kind_of, sealed
from megabatch.train.model.weights import fill, fresh_source, load_whole, own_source, plan_units
from megabatch.train.parallel.wrap import blocks_of, dtype_of
from megabatch.train.runtime.files import new_folder
from megabatch.train.runtime.ranks import ONE_RANK, Ranks
from megabatch.train.trust import check_trust

# The recipe in the folder of a run.
RECIPE = "config.toml"
# Prefixes of the weights in a checkpoint, and of their average.
MODEL, AVERAGE = "learner.model.", "average."
# Prefix of the model's names in a PeftModel.
INSIDE_PEFT = "base_model.model."


@dataclass(frozen=True)
class Checkpointed:
    """A checkpoint's weights by name."""

    tensors: Mapping[str, Tensor]
    num_averaged: int

    def read(self, names: list[str], rows: slice | None) -> Tensor | None:
        tensor = next((self.tensors[name] for name in names if name in self.tensors), None)
        return tensor if tensor is None or rows is None else tensor[rows]


def export(
    run_folder: Path, to: Path, *, step: int | str | None, merged: bool = False, is_trusted: bool = False
) -> str:
    """Write the model of a run's checkpoint and its tokenizer into a new folder; says what was written.

    ``step`` is a checkpoint's number, "best" or "latest"; None: the best where one is kept, else the latest. With
    optim.ema_decay it is the average of the weights. Of a run with model.lora it is the folder of an adapter, as peft
    reads it; ``merged``: the whole model, with the adapters in its weights.

    ``is_trusted``: run a model.function although the run's folder may be somebody else's.

    Raises `MegabatchError`, and leaves nothing behind, where that cannot be done.
    """
    check_target(to)
    config = config_of(run_folder, is_trusted=is_trusted)
    chosen = find_checkpoint(run_folder, step)
    checkpoint = chosen.path
    weights = read_weights(checkpoint)
    model: Any = exported(config, weights, checkpoint, merged=merged)
    with writing(to) as beside, silence():
        model.save_pretrained(beside)
        tokenizer = load_tokenizer(config.model)
        unread = "" if tokenizer is None else save_tokenizer(tokenizer, beside)
        for path in beside.rglob("*.safetensors"):
            # Temporary files are readable by their owner alone.
            path.chmod(next(beside.glob("*config.json")).stat().st_mode)
    which = "the average of the weights" if weights.num_averaged else "the weights"
    kind = f"{type(model).__name__}, {config.model.dtype}, safetensors"
    if isinstance(model, Adapter):
        base = config.model.name or f"{config.model.function or 'fresh weights'} with run.seed = {config.run.seed}"
        base += "" if config.model.quantize is None else f" in {kind_of(config.model)}"
        kind = (
            f"adapters without their base, {base}; load them with peft's PeftModel.from_pretrained(base, folder), or "
            f"write the whole model with `megabatch export {run_folder} --merged --to FOLDER`"
        )
    warnings = [*chosen.warnings, *describe_versions(checkpoint), *([unread] if unread else [])]
    return "\n".join([*(f"warning: {line}" for line in warnings), f"wrote {which} of {checkpoint} to {to}: {kind}"])


def exported(config: Config, weights: Checkpointed, checkpoint: Path, *, merged: bool) -> Any:
    """Return an object whose ``save_pretrained`` writes the run's model, or its adapters alone."""
    if config.model.lora is None:
        if merged:
            raise MegabatchError("--merged is given and the run has no model.lora, so nothing to merge; leave it out")
        return loaded_model(config, weights, checkpoint)
    adapter = Adapter.of(config, weights, checkpoint)
    return merged_model(adapter, checkpoint) if merged else adapter


def check_target(to: Path) -> None:
    """Raise if the target is not empty, is no folder, or is the working directory.

    The export replaces the folder as a whole. A shell inside would stay in the old one.
    """
    if resolved(to) == resolved(Path.cwd()):
        raise MegabatchError(f"--to is {to}, the folder that you are in; name a folder that is new, or another one")
    to = resolved(to)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        kind = "is not empty" if to.is_dir() else "is a file"
        raise MegabatchError(f"--to is {to}, which {kind}; name a folder that is new or empty")


def config_of(run_folder: Path, *, is_trusted: bool) -> Config:
    """Return the recipe of a run whose functions may run."""
    if not (run_folder / RECIPE).is_file():
        problem = f"has no {RECIPE}, so it is no run of megabatch's" if run_folder.is_dir() else "is no folder"
        raise MegabatchError(f"{run_folder} {problem}; give the folder of a run, for example runs/stdlib")
    if not is_trusted:
        check_trust(run_folder / RECIPE, is_run=True)
    return load_config(run_folder / RECIPE, [])


def find_checkpoint(run_folder: Path, step: int | str | None) -> ValidCheckpoint:
    """Return the checkpoint of that step, "best" or "latest"; None: the best where one is kept, else the latest.

    In place of one that is damaged it is the newest whole one up to the latest, unless it was asked for by name.
    """
    steps, shelf = steps_of(run_folder), Checkpoints(run_folder)
    if not steps:
        raise MegabatchError(f"{run_folder} has no checkpoint yet; export it when it has saved one (run.save_every)")
    name = named_by(checkpoints_of(run_folder) / BEST)
    if step == POINTER or (step is None and not name):
        return shelf.latest_valid(ONE_RANK)
    number = step if isinstance(step, int) else step_of(name)
    path = path_of(run_folder, number) if number is not None else checkpoints_of(run_folder) / (name or BEST)
    if number is None or number not in steps:
        problem = "is not there or not whole"
    elif (damage := shelf.damage(number, ONE_RANK)) is None:
        return ValidCheckpoint(path)
    else:
        problem = f"is damaged ({damage})"
    if step is None:
        chosen = shelf.latest_valid(ONE_RANK)
        return ValidCheckpoint(chosen.path, (f"{path}, the best one, {problem}", *chosen.warnings))
    has = ", ".join(str(number) for number in steps)
    raise MegabatchError(f"{path} {problem}; this run has the steps {has}: choose with --step")


def read_weights(checkpoint: Path) -> Checkpointed:
    """Return the weights of a checkpoint, averaged where it has an average; without a process group."""
    try:
        described = SafeReader(checkpoint).read_metadata().state_dict_metadata
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in described.items()
            if isinstance(entry, TensorStorageMetadata) and name.startswith((MODEL, AVERAGE))
        }
        with without_group_warning():
            load_state(state, storage_reader=SafeReader(checkpoint), planner=SafePlanner(), no_dist=True)
    except (Exception, CheckpointException) as error:
        reason = reason_of(error) if isinstance(error, CheckpointException) else in_one_line(error)
        raise MegabatchError(f"{checkpoint} is damaged ({reason}); choose an earlier step with --step") from None
    tensors = {name.removeprefix(MODEL): tensor for name, tensor in state.items() if name.startswith(MODEL)}
    averages = {name.removeprefix(AVERAGE): tensor for name, tensor in state.items() if name.startswith(AVERAGE)}
    rounded = {name: average.to(tensors[name].dtype) for name, average in averages.items()}
    return Checkpointed({**tensors, **rounded}, len(averages))


def loaded_model(config: Config, weights: Checkpointed, checkpoint: Path) -> nn.Module:
    if config.model.function is not None:
        model = own_model(config)
        check_weights(model, weights, checkpoint)
    else:
        architecture = architecture_of(config.model)
        model = outline(config.model, architecture)
        check_weights(model, weights, checkpoint)
        units = plan_units(model, blocks_of(model))
        if units is None:
            model = construct(config.model, architecture)
        else:
            fill(model, units, 0, torch.device("cpu"), weights)
        add_generation_config(model, config.model)
    with torch.no_grad():
        for names, tensor in named_tensors(model):
            tensor.copy_(cast(Tensor, weights.read(names, None)))
    return model


def own_model(config: Config) -> nn.Module:
    model = own_source(config.model, config.run.seed).model
    if not callable(getattr(model, "save_pretrained", None)):
        raise MegabatchError(
            f"model.function makes a {type(model).__name__}, which has no save_pretrained to export it with; "
            "give it that method, or read the checkpoint with torch.distributed.checkpoint"
        )
    return model


def add_generation_config(model: nn.Module, config: ModelConfig) -> None:
    """Take over the generation config of model.name, which not every model has."""
    if config.name is not None:
        with contextlib.suppress(OSError), silence():
            cast(Any, model).generation_config = GenerationConfig.from_pretrained(config.name)


def check_weights(model: nn.Module, weights: Checkpointed, checkpoint: Path) -> None:
    for names, tensor in named_tensors(model):
        check_saved(names[0], tensor, weights.read(names, None), checkpoint)


def check_saved(name: str, tensor: Tensor, saved: Tensor | None, checkpoint: Path) -> None:
    if saved is None or saved.shape != tensor.shape:
        raise MegabatchError(
            f"{checkpoint} has no {name} of shape {list(tensor.shape)}, which the run's {RECIPE} asks for; "
            "put back the recipe that it was made with"
        )


def named_tensors(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Return the tensors that a checkpoint has of a model, each once with all of its names."""
    names: dict[Tensor, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, []).append(name)
    return [(aliases, tensor) for tensor, aliases in names.items()]


@dataclass(frozen=True)
class Adapter:
    """Adapters without their base, to be saved by peft."""

    config: Config
    model: Any  # a PeftModel, whose weights are not looked at
    state: Mapping[str, Tensor]  # by the names in it

    @classmethod
    def of(cls, config: Config, weights: Checkpointed, checkpoint: Path) -> "Adapter":
        """Take the adapters of a checkpoint, and the weights that were trained beside them."""
        if config.model.function is not None:
            base = own_source(config.model, config.run.seed).model
        else:
            base = outline(config.model, architecture_of(config.model))
        lora = lora_config(config.model)
        lora.modules_to_save = (config.model.lora or {}).get(WHOLE)
        lora.base_model_name_or_path = config.model.name
        lora.task_type = "CAUSAL_LM" if config.model.function is None else None
        with silence():
            model = peft().PeftModel(base, lora, low_cpu_mem_usage=True)
        state = dict[str, Tensor]()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or MARK in name:
                saved_name = name.removeprefix(INSIDE_PEFT).replace(f".{WHOLE}.{ADAPTER}.", ".")
                saved = weights.tensors.get(saved_name)
                check_saved(saved_name, parameter, saved, checkpoint)
                state[name] = cast(Tensor, saved)
        return cls(config, model, state)

    def save_pretrained(self, folder: Path) -> None:
        """Write what ``PeftModel.from_pretrained(base, folder)`` reads."""
        self.model.save_pretrained(str(folder), state_dict=dict(self.state), save_embedding_layers=False)


def merged_model(adapter: Adapter, checkpoint: Path) -> nn.Module:
    """Return the base with adapters in its weights. Raises `MegabatchError` if they were trained on another base."""
    config = adapter.config
    base = base_model(config) if config.model.function is None else own_model(config)
    check_base(base, checkpoint)
    dequantize(base, dtype_of(config.model))
    with tempfile.TemporaryDirectory() as folder, silence():
        adapter.save_pretrained(Path(folder))
        model = peft().PeftModel.from_pretrained(base, folder)
    owners = owners_of(model)
    for path, layer in layers_of(model):
        names = [name.removeprefix(INSIDE_PEFT) for name in owners[id(layer.get_base_layer().weight)]]
        if len(names) > 1:
            raise MegabatchError(
                f"{path.removeprefix(INSIDE_PEFT)} has an adapter and shares its matrix ({', '.join(names)}), which "
                "merging would change for both; leave --merged out"
            )
    return model.merge_and_unload()


def base_model(config: Config) -> nn.Module:
    """Return the model of ``model.name`` or ``model.config`` as training began with it, on the CPU."""
    architecture, seed = architecture_of(config.model), config.run.seed
    if config.model.name is not None:
        model, _ = load_whole(config.model, architecture, seed, "")
        add_generation_config(model, config.model)
        return model
    source = fresh_source(outline(config.model, architecture), config.model, architecture, seed)
    if source.units is not None:
        fill(source.model, source.units, seed, ONE_RANK.device)
    return source.model


def check_base(base: nn.Module, checkpoint: Path) -> None:
    """Raise where a frozen weight is not the one that the adapters were trained on."""
    saved: dict[str, list[object]] = read_meta(checkpoint)["parameters"]
    there = {name.replace(INSIDE, "."): fields for name, fields in saved.items() if MARK not in name}
    here = described(base)
    # Those with a checksum.
    names = [name for name in there if name in here and len(there[name]) > len(here[name])]
    sums = sealed({"parameters": here}, base, names, ONE_RANK)["parameters"]
    difference = first_difference(there, json.loads(json.dumps(sums)))
    if difference is not None:
        name, was, now = difference
        raise MegabatchError(
            f"{checkpoint} was trained on another base: the parameter {name} is {was} there and {now} here; let "
            "model.name of the run's config.toml be the base that it was trained on"
        )


def resolved(path: Path) -> Path:
    """Return the path without "..", "." and links, with a name and a parent. A loop of links is left as it is."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def writing(to: Path) -> Generator[Path, None, None]:
    """Yield a folder that becomes ``to``. What it lacks is one line."""
    try:
        with new_folder(resolved(to)) as beside:
            yield beside
    except OSError as error:
        raise MegabatchError(
            f"cannot write {to} ({in_one_line(error)}); make room for it, or name another --to"
        ) from None


def load_initial_weights(run: Path, model: nn.Module, left_out: Collection[str], ranks: Ranks) -> str:
    """Read the weights of a run's best checkpoint, else of its latest, into a model; of `optim.ema_decay` the average.

    The optimizer, the schedule and the position in the data stay new. Collective.

    Args:
        run: Folder of the run.
        model: The model without its DDP wrapper, in whatever layout.
        left_out: Names of the parameters that checkpoints do not have: the base of adapters.
        ranks: Of which the main one chooses the checkpoint.

    Returns:
        What was read, in words.

    Raises:
        MegabatchError: The run has no whole checkpoint, or its model has other parameters.
    """
    checkpoint = Path(ranks.on_main(lambda: str(find_checkpoint(run, None).path), str(run), verb="read"))
    described = SafeReader(checkpoint).read_metadata().state_dict_metadata
    state = get_model_state_dict(model)
    wanted: dict[str, Tensor] = {}
    # An average has a tied parameter once.
    first_names: dict[int, str] = {}
    tied = {
        name: first_names.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    for name, tensor in state.items():
        if name in left_out or not isinstance(tensor, Tensor):
            continue
        average = f"{AVERAGE}{tied.get(name, name)}"
        key = average if average in described else f"{MODEL}{name}"
        saved = described.get(key)
        there = list(saved.size) if isinstance(saved, TensorStorageMetadata) else "missing"
        if there != list(tensor.shape):
            raise MegabatchError(
                f"run.init_from is {run}, and its model is another: {name} is {there} there and {list(tensor.shape)} "
                f"here; take the section [model] of {run}/config.toml, or leave run.init_from out"
            )
        wanted[key] = tensor
    try:
        with without_group_warning():
            load_state(
                wanted, storage_reader=SafeReader(checkpoint), planner=SafePlanner(), no_dist=not dist.is_initialized()
            )
    except CheckpointException as error:
        raise DamagedError(checkpoint, reason_of(error)) from None
    set_model_state_dict(model, state)
    which = "the average of the weights" if any(key.startswith(AVERAGE) for key in wanted) else "the weights"
    return f"begins with {which} of {checkpoint}"

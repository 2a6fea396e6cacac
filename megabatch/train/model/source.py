"""Source: where a model and its weights come from: a config, a folder or the hub, or a function of the user's own."""

import contextlib
import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.config import ModelConfig
from megabatch.train.model.architecture import construct
from megabatch.train.model.initial import Saved, Unit, plan_units, seeded
from megabatch.train.model.precision import dtype_of
from megabatch.train.model.silence import quiet
from megabatch.train.runtime.plugins import load_function

NUM_NAMED = 3  # tensors in a line
WHOLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Source:
    """A model, and how its weights come into it."""

    model: nn.Module
    text: str  # in words
    units: list[Unit] | None = None  # the model is an outline, to be filled by them; None: it has its weights
    saved: Saved | None = None  # where its weights are; None: they are fresh


@dataclass(frozen=True)
class SavedWeights:
    """Weights in safetensors files, of which any part can be read."""

    files: Mapping[str, str]  # name of a tensor → its file

    def read(self, names: list[str], rows: slice | None) -> Tensor | None:
        for name in (name for name in names if name in self.files):
            with opened(self.files[name]) as file:
                return file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        return None

    def fits(self, model: nn.Module) -> bool:
        """Whether every parameter and saved buffer of the model is there, by one of its names and in its shape."""
        found: dict[Tensor, bool] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            is_here = name in self.files and self.shape(name) == tuple(tensor.shape)
            found[tensor] = found.get(tensor, False) or is_here
        return all(found.values())

    def shape(self, name: str) -> tuple[int, ...]:
        with opened(self.files[name]) as file:
            return tuple(file.get_slice(name).get_shape())


def own_source(config: ModelConfig, seed: int) -> Source:
    """The module that model.function makes, whole."""
    name = cast(str, config.function)
    function = load_function(name, "model.function")
    with seeded(seed, "model.function"):
        try:
            model = function(**config.options)
        except Exception as error:  # whatever the user's function raises
            raise MegabatchError(
                f"model.function {name!r} raises {in_one_line(error)}; mend it, or model.options"
            ) from None
    if not isinstance(model, nn.Module):
        raise MegabatchError(
            f"model.function {name!r} returns a {type(model).__name__}; expected a torch module: return one"
        )
    return Source(model.to(dtype_of(config)), f"{type(model).__name__} of {name}, made whole on every rank")


def fresh_source(
    outline: PreTrainedModel, blocks: Mapping[str, nn.Module], config: ModelConfig, architecture: PreTrainedConfig,
    seed: int,
) -> Source:  # fmt: skip
    """The outline, to be filled with fresh weights; or the whole model, where they cannot be made by the block."""
    text = f"{type(outline).__name__}, fresh weights of run.seed = {seed}"
    units = plan_units(outline, blocks)
    if units is not None:
        return Source(outline, text, units)
    with seeded(seed, ""):
        whole = construct(config, architecture)
    return Source(whole, f"{text}, made whole on every rank: its rules do not say how each of its tensors begins")


def saved_source(
    outline: PreTrainedModel, blocks: Mapping[str, nn.Module], config: ModelConfig, architecture: PreTrainedConfig,
    seed: int, *, sharded: bool,
) -> Source:  # fmt: skip
    """The outline, to be filled from its files by the shard; or the whole model, where that is not asked or not to be
    had."""
    text = f"{type(outline).__name__}, weights of {config.name}"
    if not sharded:
        return Source(*load_whole(config, architecture, seed, text))
    saved, units = saved_weights(cast(str, config.name)), plan_units(outline, blocks)
    if saved is not None and units is not None and saved.fits(outline):
        return Source(outline, f"{text}, each rank reads its shard", units, saved)
    text = f"{text}, read whole on every rank: its files do not name the tensors as the model does"
    return Source(*load_whole(config, architecture, seed, text))


def load_whole(config: ModelConfig, architecture: PreTrainedConfig, seed: int, text: str) -> tuple[nn.Module, str]:
    """The model with the weights of model.name, and in words which of them were not there."""
    backend = {} if config.attention is None else {"attn_implementation": config.attention}
    try:
        with quiet(), seeded(seed, ""):
            model, report = cast(Any, AutoModelForCausalLM).from_pretrained(
                config.name, config=architecture, dtype=dtype_of(config), trust_remote_code=False,
                output_loading_info=True, **backend,
            )  # fmt: skip
    except Exception as error:  # what is wrong with its files, or the way to the hub
        raise MegabatchError(
            f"cannot read the weights of model.name = {config.name!r} ({in_one_line(error)}); "
            "name a folder that save_pretrained has written, or an id of the hub that can be reached from here"
        ) from None
    missing = sorted(report["missing_keys"])
    if missing:
        more = ", ..." if len(missing) > NUM_NAMED else ""
        count = "1 of its tensors is" if len(missing) == 1 else f"{len(missing)} of its tensors are"
        text = f"{text}; {count} not there and fresh: {', '.join(missing[:NUM_NAMED])}{more}"
    return model, text


def saved_weights(name: str) -> SavedWeights | None:
    """The safetensors files of a folder or a hub id; None where it has none."""
    with quiet():
        if (index := file_of(name, INDEX_FILE)) is not None:
            placed = placed_by(Path(index))
            paths = {file: listed(name, file) for file in set(placed.values())}
            return SavedWeights({tensor: paths[file] for tensor, file in placed.items()})
        whole = file_of(name, WHOLE_FILE)
    if whole is None:
        return None
    with opened(whole) as file:
        return SavedWeights(dict.fromkeys(file.keys(), whole))


def placed_by(index: Path) -> dict[str, str]:
    """The file of each tensor."""
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MegabatchError(f"cannot read {index} ({in_one_line(error)}); copy or download it again") from None


def listed(name: str, file: str) -> str:
    """The path of a file that an index lists."""
    path = file_of(name, file)
    if path is None:
        raise MegabatchError(
            f"model.name is {name!r}, whose {INDEX_FILE} lists {file}, which is not there; copy or download it again"
        )
    return path


@contextlib.contextmanager
def opened(path: str) -> Generator[Any]:
    """A file of weights. Raises `MegabatchError` where it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise MegabatchError(
            f"cannot read the weights in {path} ({in_one_line(error)}); copy or download it again"
        ) from None


def file_of(name: str, file: str) -> str | None:
    """The path of a file of a folder or a hub id; None where it is not there."""
    return cached_file(name, file, _raise_exceptions_for_missing_entries=False)

"""The config and the tokenizer of a recipe's model, read by transformers and checked before there are weights."""

import contextlib
import difflib
import inspect
import json
import re
import warnings
from collections.abc import Generator
from copy import deepcopy
from logging import CRITICAL, getLogger
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.config import Config, ModelConfig
from megabatch.train.config.recipe_paths import check_model_folder, check_tokenizer_folder
from megabatch.train.data.stream import check_positions
from megabatch.train.parallel.wrap import dtype_of

# Loggers that warn of missing kernels and of sums in two steps.
LOUD = ("bitsandbytes", "torch.distributed.tensor._redistribute")
# Keys of model.config that the trainer sets.
OWNED_KEYS = {
    "dtype": "set model.dtype",
    "torch_dtype": "set model.dtype",
    "use_cache": "the trainer sets it (false while it trains): leave it out",
    "attn_implementation": "set model.attention",
}
# Implementations of attention and experts in transformers' own code.
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
# Names of torch's dtypes.
DTYPES = re.compile(r"\b(Double|Float|Half|BFloat16|Float16|Float32|Float64)\b")
BYTES, BYTES_CLASS = "bytes", "ByT5Tokenizer"
# Mark in the tokenizer_config.json of an export, whose class has a tokenizer.json.
BYTES_MARK = "megabatch_bytes"
BYTES_TEMPLATE = """\
{% for message in messages %}{{ message['role'] + ': ' }}{% if message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}\
{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


def architecture_of(config: ModelConfig) -> PreTrainedConfig:
    """Return transformers' config for ``model.name`` or ``model.config``. Raises `MegabatchError` in one line."""
    with silence():
        architecture = saved_architecture(config.name) if config.name is not None else new_architecture(config)
    for key in ("num_hidden_layers", "vocab_size"):
        value = getattr(architecture, key, None)
        if isinstance(value, int) and value < 1:
            # transformers builds a model without layers or without a vocabulary all the same.
            name = architecture.attribute_map.get(key, key)
            raise MegabatchError(f"model.config.{name} is {value}; it must be at least 1: change it there")
    check_own_code(architecture, config)
    return architecture


def new_architecture(config: ModelConfig) -> PreTrainedConfig:
    """Return the config for ``model.config``. Unlike transformers, refuse unknown keys."""
    keys = dict(config.config or {})
    model_type = keys.pop("model_type", None)
    if not isinstance(model_type, str):
        raise MegabatchError('model.config has no model_type; add one, model_type = "llama" say')
    try:
        default = AutoConfig.for_model(model_type)
    except ValueError:
        near = difflib.get_close_matches(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=1, cutoff=0.0)[0]
        raise MegabatchError(
            f"model.config.model_type is {model_type!r}, which transformers does not know; the nearest type is {near}"
        ) from None
    for key in sorted(OWNED_KEYS.keys() & keys):
        raise MegabatchError(f"model.config.{key} is not the recipe's to set; {OWNED_KEYS[key]}")
    declared = default.to_dict().keys()
    for key in keys:
        if key not in declared and not _is_read(key, keys[key], default):
            near = difflib.get_close_matches(key, declared, n=1, cutoff=0.0)[0]
            raise MegabatchError(
                f"unknown key model.config.{key} for model_type {model_type!r}; the nearest key is {near}"
            )
    try:
        return AutoConfig.for_model(model_type, **keys)
    except Exception as error:
        raise refused(config, error) from None


def _is_read(key: str, value: Any, default: PreTrainedConfig) -> bool:
    """Return True for a key that the family takes undeclared: an alias, an older name, or one that its layers read."""
    # Its validation raises types of its dependencies. The config is built again later.
    with contextlib.suppress(Exception):
        config = AutoConfig.for_model(default.model_type, **{key: deepcopy(value)}).to_dict()
        if {name: setting for name, setting in config.items() if name != key} != default.to_dict():
            return True
    try:
        family = inspect.getmodule(MODEL_FOR_CAUSAL_LM_MAPPING[type(default)])
    except KeyError:
        return False
    return bool(re.search(rf"\bconfig\.{key}\b|\(config, \"{key}\"", inspect.getsource(cast(ModuleType, family))))


def saved_architecture(name: str) -> PreTrainedConfig:
    """Return the config of a folder or a hub id."""
    check_model_folder(name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        raise MegabatchError(
            f"cannot read the config of model.name = {name!r} ({in_one_line(error)}); "
            "name a folder that save_pretrained has written, or an id of the hub that can be reached from here"
        ) from None
    if getattr(config, "quantization_config", None) is not None:
        raise MegabatchError(
            f"model.name is {name!r}, whose weights are saved quantized; name the model that they were made from, with "
            "model.lora and model.quantize for a base in four bits"
        )
    return config


def check_own_code(architecture: PreTrainedConfig, config: ModelConfig) -> None:
    """Raise for an implementation that transformers would take from a repository of the hub, and run."""
    attention = config.attention or getattr(architecture, "_attn_implementation", None)
    experts = getattr(architecture, "_experts_implementation", None)
    for names in (attention, experts):
        for name in names.values() if isinstance(names, dict) else (names,):
            if name is not None and name not in IMPLEMENTATIONS and not is_installed(str(name)):
                raise MegabatchError(
                    f"{key_of(config)} asks for the implementation {name!r}, which is no code of transformers or not "
                    f"installed here; set model.attention to {' or '.join(IMPLEMENTATIONS[:2])}, or change its config"
                )
    for part in vars(architecture).values():
        if isinstance(part, PreTrainedConfig):
            check_own_code(part, config)


def is_installed(name: str) -> bool:
    """Return True for a package of kernels that this machine has; in place of another, transformers asks the hub."""
    installed = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
    return name in installed and installed[name]()


def positions_of(architecture: PreTrainedConfig) -> int | None:
    """Return the number of positions of the model, or None if its config does not say."""
    positions = getattr(architecture.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None


def positions_for_stream(config: Config) -> int | None:
    """Return the positions of a model that is trained on a stream; None where samples are known beforehand."""
    if not config.data.streaming or config.model.function is not None:
        return None
    return positions_of(architecture_of(config.model))


def vocabulary_for_own(config: Config) -> int | None:
    """Return the vocabulary of a model of transformers that is trained on data.function; None for any other."""
    if config.data.function is None or config.model.function is not None:
        return None
    return architecture_of(config.model).get_text_config().vocab_size


def check_fit(architecture: PreTrainedConfig, longest_tokens: int | None, tokenizer: Any) -> None:
    """Raise where the model has no embedding for a token or a position of the data."""
    text, positions = architecture.get_text_config(), positions_of(architecture)
    if longest_tokens is not None:
        check_positions("a sample", longest_tokens, positions)
    num_tokens = 0 if tokenizer is None else len(tokenizer)
    if num_tokens > text.vocab_size:
        raise MegabatchError(
            f"the tokenizer has {num_tokens} tokens and the model a vocabulary of {text.vocab_size}; "
            f"set model.config.vocab_size to {num_tokens}, or model.tokenizer to the model's own"
        )


def check_attention(config: ModelConfig, device: torch.device) -> None:
    """Raise for an attention backend that cannot train on this machine, naming those that can."""
    available = backends(device)
    if config.attention is not None and config.attention not in available:
        raise MegabatchError(
            f"model.attention is {config.attention!r}, which cannot train on this machine's {device.type}; "
            f"take one of {', '.join(available)}, or leave it out"
        )


def backends(device: torch.device) -> list[str]:
    """Return the attention backends of transformers that run forward and backward here."""
    on_gpu = device.type == "cuda"
    availability = {
        "sdpa": True,
        "eager": True,
        # On a CPU it has no backward.
        "flex_attention": on_gpu,
        "flash_attention_2": on_gpu and is_flash_attn_2_available(),
        "flash_attention_3": on_gpu and is_flash_attn_3_available(),
    }
    return [name for name, available in availability.items() if available]


def outline(config: ModelConfig, architecture: PreTrainedConfig) -> PreTrainedModel:
    """Return the model on the meta device, without memory."""
    with torch.device("meta"):
        return construct(config, architecture)


def construct(config: ModelConfig, architecture: PreTrainedConfig) -> PreTrainedModel:
    """Return the model as transformers makes it. Raises `MegabatchError` in one line."""
    check_own_code(architecture, config)
    backend = {} if config.attention is None else {"attn_implementation": config.attention}
    try:
        with silence():
            model = cast(Any, AutoModelForCausalLM).from_config(
                architecture, dtype=dtype_of(config), trust_remote_code=False, **backend
            )
    except Exception as error:
        raise refused(config, error) from None
    check_tied(model)
    return model


def check_tied(model: Any) -> None:
    """Raise `MegabatchError` for weights that the config ties and the model has twice: they would be trained apart."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tied_name in getattr(model, "all_tied_weights_keys", {}).items():
        if parameters.get(name) is not parameters.get(tied_name):
            raise MegabatchError(
                f"{type(model).__name__} has {name} apart from {tied_name}, which its config ties; upgrade "
                "transformers, or set model.config.tie_word_embeddings = false"
            )


def refused(config: ModelConfig, error: Exception) -> MegabatchError:
    """Return the error for a config of which transformers makes no causal language model."""
    key = key_of(config)
    if "Unrecognized configuration class" in str(error):
        return MegabatchError(f"{key} is not of a causal language model that transformers knows; choose one that is")
    if isinstance(error, RuntimeError) and DTYPES.search(str(error)):
        return MegabatchError(
            f"a layer of {key} does not compute in model.dtype = {config.dtype!r} ({in_one_line(error)}); set "
            "model.dtype to another, float32 or bfloat16 say"
        )
    return MegabatchError(f"transformers refuses {key} ({in_one_line(error)}); change it there")


def key_of(config: ModelConfig) -> str:
    return "model.config" if config.name is None else f"model.name = {config.name!r}"


def load_tokenizer(config: ModelConfig) -> Any:
    """Return the recipe's tokenizer, or None for a model.function without one. Raises `MegabatchError` in one line."""
    if config.tokenizer is None and config.function is not None:
        return None
    source = config.tokenizer or config.name or BYTES
    if source == BYTES:
        return ByT5Tokenizer(chat_template=BYTES_TEMPLATE)
    return read_tokenizer(source, "model.name" if config.tokenizer is None else "model.tokenizer")


def read_tokenizer(source: str, key: str) -> Any:
    """Return the tokenizer of a folder or a hub id, which the recipe gives as ``key``."""
    if Path(source).is_dir():
        check_tokenizer_folder(source, key)
    try:
        with silence():
            # For some families AutoTokenizer insists on another class.
            if is_bytes(Path(source)):
                return ByT5Tokenizer.from_pretrained(source)
            return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        raise MegabatchError(
            f"no tokenizer for {key} = {source!r} ({in_one_line(error)}); "
            'set model.tokenizer to a folder, to an id of the hub that can be reached from here, or to "bytes"'
        ) from None


def is_bytes(folder: Path) -> bool:
    described = folder / "tokenizer_config.json"
    if not described.is_file():
        return False
    values = json.loads(described.read_text(encoding="utf-8"))
    return values.get("tokenizer_class") == BYTES_CLASS or bool(values.get(BYTES_MARK))


@contextlib.contextmanager
def silence() -> Generator[None, None, None]:
    """Silence warnings and progress bars of transformers, bitsandbytes and DTensor, so that an error is one line."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    loud = [getLogger(name) for name in LOUD]
    levels = [logger.level for logger in loud]
    for logger in loud:
        logger.setLevel(CRITICAL)
    logging.set_verbosity(CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(verbosity)
        for logger, level in zip(loud, levels, strict=True):
            logger.setLevel(level)
        if bars:
            logging.enable_progress_bar()

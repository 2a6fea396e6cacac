"""Facts of a model that decide its padding: its config, arguments of its forward, tables of tokens and positions.

Of models that are not of transformers, little is known.
"""

import contextlib
import inspect
import itertools
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from torch import nn

from megabatch.inspection.mixing_causes import find_mixing_causes
from megabatch.torch_private.module_members import has_compiled, original_of

# Keys in transformers' configs of models that send tokens to experts, which may count them by the mask.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

IDS, MASK, POSITIONS = "input_ids", "attention_mask", "position_ids"
POSITION_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")  # keys of configs


class ModelFacts:
    """Facts of the trained models that decide how samples are padded.

    Args:
        models: The models that the loss calls.
    """

    def __init__(self, models: Iterable[Any]) -> None:
        self.called = list(models)
        unwrapped = map(with_config, self.called)
        self.models = [model for model in unwrapped if hasattr(model, "config")]

    def hands_on(self, mask_name: str) -> bool:
        """Return True if a mask under this name may be among the arguments that a loss gives to the model."""
        return all(_is_in_transformers(model) or _accepts(model, mask_name) for model in self.called)

    @cached_property
    def name(self) -> str:
        """The class of the first model of transformers."""
        return type(self.models[0]).__name__

    @cached_property
    def placeholders(self) -> set[int]:
        """Tokens of images and the like, which the model replaces before it looks them up."""
        tokens: set[int] = set()
        for model in self.models:
            named = vars(model.config).items()
            tokens |= {value for name, value in named if "token" in name and type(value) is int}
        return tokens

    @cached_property
    def looks_for_pads(self) -> bool:
        """True if a model that classifies reads config.pad_token_id in its forward, as a decoder does."""
        modules = itertools.chain.from_iterable(model.modules() for model in self.models)
        classifying = {type(module) for module in modules if "ForSequenceClassification" in type(module).__name__}
        codes = [getattr(inspect.unwrap(kind.forward), "__code__", None) for kind in classifying]
        return any("pad_token_id" in getattr(code, "co_names", ()) for code in codes)

    @cached_property
    def mixing(self) -> list[tuple[str, int]]:
        """Why models mix padding into tokens, and the most tokens of a row where they do not."""
        return list(itertools.chain.from_iterable(map(find_mixing_causes, self.models)))

    @cached_property
    def takes_mask(self) -> bool:
        """True if a model needs a mask to leave padding out, and takes one."""
        return any(_reads(model, MASK) and not is_causal(model) for model in self.readers)

    @cached_property
    def _models_inside(self) -> list[nn.Module]:
        return list(itertools.chain.from_iterable(map(_models_inside, self.called)))

    @cached_property
    def readers(self) -> list[Any]:
        """The models of transformers that read samples: the given ones, or those inside of a module of the user's."""
        return self.models + self._models_inside

    @cached_property
    def watched(self) -> list[nn.Module]:
        """The modules whose arguments are looked at, where a model needs a mask."""
        modules = [model for model in self.called if isinstance(model, nn.Module)]
        return [*filter(_is_in_transformers, modules), *self._models_inside]

    @cached_property
    def is_causal(self) -> bool:
        """True if no token sees padding on the right, whatever experts count."""
        return all(is_causal(model, with_experts=True) for model in self.readers)

    @cached_property
    def main_inputs(self) -> list[str]:
        """Names of the input that a mask describes: tokens, their embeddings, or what a model reads in their place."""
        declared = [str(getattr(model, "main_input_name", IDS)) for model in self.readers]
        return [*dict.fromkeys([IDS, "inputs_embeds", *declared])]

    @cached_property
    def vocab_size(self) -> int | None:
        """Rows of the smallest table of tokens; None where a model does not tell."""
        tables = [getattr(input_embeddings(model), "num_embeddings", None) for model in self.models]
        return min((size for size in tables if isinstance(size, int)), default=None)

    @cached_property
    def num_positions(self) -> int | None:
        """Rows of the smallest table of learned positions beside one of tokens; None for models without one."""
        return min(itertools.chain.from_iterable(map(_position_tables, self.models)), default=None)

    @cached_property
    def most_positions(self) -> int | None:
        """The longest row that the models may take, by their tables and configs; None if nothing limits it."""
        sizes: list[Any] = [self.num_positions]
        for model in self.models:
            sizes += [getattr(model.config, name, None) for name in POSITION_LIMITS]
        return min((size for size in sizes if isinstance(size, int) and size > 0), default=None)


def _is_in_transformers(model: Any) -> bool:
    return hasattr(with_config(model), "config")


def _models_inside(model: Any) -> list[nn.Module]:
    """Return the outermost models of transformers inside of a module that is none itself.

    A compiled module has none: hooks inside of it would be compiled too.
    """
    if not isinstance(model, nn.Module) or _is_in_transformers(model) or has_compiled(model):
        return []
    models: list[nn.Module] = []
    pending: list[nn.Module] = [model]
    while pending:
        module = pending.pop()
        if hasattr(module, "config") and hasattr(module, "main_input_name"):
            models.append(module)
        else:
            pending.extend(module.children())
    return models


def _accepts(model: Any, name: str) -> bool:
    """Return True if a module of the user's takes an argument of this name, or has no forward to take any."""
    module = with_config(model)
    if not isinstance(module, nn.Module) or type(module).forward is nn.Module.forward:
        return True
    parameters = inspect.signature(module.forward).parameters
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def input_embeddings(model: Any) -> Any:
    """Return the table of a model's tokens; None where it reads something else."""
    # transformers raises the second for images and the like.
    with contextlib.suppress(AttributeError, NotImplementedError):
        return model.get_input_embeddings()
    return None


def output_embeddings(model: Any) -> Any:
    """Return the layer that makes the logits of a module of transformers; None where it has none."""
    # transformers raises the second for models without logits.
    with contextlib.suppress(AttributeError, NotImplementedError):
        return model.get_output_embeddings()
    return None


def _position_tables(model: Any) -> Iterator[int]:
    """Yield the positions of each table that stands beside that of the tokens."""
    tokens = input_embeddings(model)
    for module in model.modules():
        children = dict(module.named_children())
        if tokens not in children.values():
            continue
        for name, table in children.items():
            if isinstance(table, nn.Embedding) and (name == "wpe" or "position" in name):
                # Some models begin with a later row.
                first = getattr(table, "offset", 0 if table.padding_idx is None else table.padding_idx + 1)
                yield table.num_embeddings - int(first)


def _reads(model: Any, name: str) -> bool:
    """Return True if the forward of a model, inside of its adapter, names an argument."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return name in inspect.signature(inner.forward).parameters


def with_config(model: Any) -> Any:
    """Unwrap a transformers model from DDP, FSDP1 or torch.compile; return the innermost module if there is none."""
    while not hasattr(model, "config"):
        inner = model.module if hasattr(model, "module") else original_of(model)
        if inner is model or not isinstance(inner, nn.Module):
            break
        model = inner
    return model


def list_configs(model: nn.Module) -> list[Any]:
    """Return the configs of a transformers model and of its text part; none for another model."""
    config: Any = getattr(with_config(model), "config", None)
    text_config = text_config_of(config)
    return [] if text_config is None else [config, text_config]


def text_config_of(config: Any) -> Any:
    """Return the config of the text part, of the config of a transformers model; None for any other value."""
    return config.get_text_config() if callable(getattr(config, "get_text_config", None)) else None


def is_causal(model: Any, *, with_experts: bool = False) -> bool:
    """Return True if no token of a transformers model sees a later one and a mask only hides some.

    The config and every layer with attention must say so. Other models are False: nothing is known of them. So are
    models that send tokens to experts, which may count them by the mask, unless ``with_experts``.
    """
    model = with_config(model)
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None:
        return False
    if getattr(config, "is_encoder_decoder", True) or getattr(config, "use_bidirectional_attention", None):
        return False
    if not with_experts and any(getattr(config, name, None) for name in EXPERTS):
        return False
    stated = {vars(module).get("is_causal") for module in model.modules()} - {None}
    return stated == {True}

"""Padding and attention masks: samples of unequal lengths in one microbatch that a model reads correctly.

The config of a transformers model names its pad token, and its forward an attention mask. Of other models nothing is
known: they get what `pad_right` makes.

A causal model needs no mask for padding on the right: no token sees it. Without a mask torch takes its fast attention
kernels, and nothing waits for a device to look at the mask. The results at masked positions do change, so no target may
lie there.

Some models mix padding into tokens whatever the mask says. `find_mixing_causes` knows those of transformers, and a
microbatch with padding is refused for them.
"""

import contextlib
import inspect
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from megabatch.batching.mixing_causes import find_mixing_causes
from megabatch.batching.samples import (
    IGNORED_LABEL,
    SHAPE,
    Microbatch,
    Pad,
    gather_columns,
    is_label,
    join_rows,
    stack_padded,
    without_labels,
)
from megabatch.errors import LossContractError, PlanError
from megabatch.torch_private.module_members import has_compiled, original_of
from megabatch.torch_private.operations import is_fake

IDS, MASK, POSITIONS = "input_ids", "attention_mask", "position_ids"
RIGHT_PADDED = "megabatch: padded on the right"  # in a microbatch, beside its mask
POSITION_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")  # keys of configs
# Keys in transformers' configs of models that send tokens to experts, which may count them by the mask.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
PATCHES_BY_GRID = {"image_grid_thw": "pixel_values", "video_grid_thw": "pixel_values_videos"}  # as Qwen-VL has them
DECODER = "decoder_"  # of inputs of a decoder, whose tokens see no padding on their right
MASKS = re.compile(r"(^|_)(mask|masks|position_ids|token_type_ids)(_|$)")  # keys that are no input by themselves
Form = tuple[int, int, bool]


class Padding(Pad):
    """The default collate function: pads samples on the right for a model, ``Padding([model])(samples)``.

    - ``input_ids`` and keys that end with it are padded with the model's pad token, where its config has one. A model
      that looks for its pad token, as the decoders that classify do, gets no other.
    - An ``attention_mask`` [B, T] is made where samples have none and the model needs it: one that takes a mask and is
      not known to be causal. A causal model with experts gets it where lengths are unequal, and none beside
      ``position_ids``: with a mask transformers no longer keeps packed documents apart. Tokens under X_input_ids get an
      X_attention_mask.
    - Image patches ``pixel_values`` [patches, D] beside ``image_grid_thw`` are concatenated, as Qwen-VL wants them.
    - Labels are padded with -100, everything else with 0; see `pad_right`.

    Args:
        models: The models that are trained.
        fills: Padding values of keys, in place of these.
    """

    def __init__(self, models: Iterable[Any], fills: Mapping[str, float] | None = None) -> None:
        super().__init__(fills)
        self._called = list(models)
        self._models = [inner for model in self._called if hasattr(inner := with_config(model), "config")]
        self._lengths = WeakTensorKeyDictionary()  # padded tensor of a microbatch -> lengths of its samples
        self._unreadable = WeakTensorKeyDictionary()  # those that a model may not read without a mask
        self._running = RunningMicrobatch({}, set(), set())

    def __call__(self, samples: list[Mapping[str, Any]], shape: tuple[int, int] | None = None) -> dict[str, Tensor]:
        """Return the samples as one microbatch, ``{name: [B, longest, ...]}``. Raises `PlanError` as `pad_right`.

        With a ``shape`` it has so many rows and tokens. Rows without a sample repeat the last one, with labels of -100.
        """
        length = None
        if shape is not None:
            filler = without_labels(samples[-1])
            samples, length = [*samples, *[filler] * (shape[0] - len(samples))], shape[1]
        columns = gather_columns(samples)
        for name in self.fills:
            if name not in columns:
                raise PlanError(f"Padded names {name!r} and the samples have the keys {list(samples[0])}")
        joined = _joined_keys(columns)
        ragged = {name for name, values in columns.items() if len(set(map(SHAPE, values))) > 1} - joined
        if length is not None:
            ragged.update(_stretched(columns, length))
        microbatch: dict[str, Tensor] = {}
        for name, values in columns.items():
            if name in joined:
                microbatch[name] = join_rows(name, values)
                continue
            fill = self.fills.get(name)
            if name in ragged and _holds_tokens(name):
                if self._looks_for_pads:
                    self._check_fill(name, fill)
                fill = self._pad_token if fill is None else fill
                fill = 0 if fill is None else fill
            microbatch[name] = stack_padded(name, values, fill, length)
        main = next((name for name in self._main_inputs if name in microbatch), None)
        if self._mixing and ragged:
            inputs = {name: value for name, value in microbatch.items() if name == main or self._is_read(name, main)}
            self._refuse_padding({name: value for name, value in inputs.items() if name in ragged})
        self._add_masks(microbatch, main, columns, ragged)
        for name in ragged:
            self._lengths[microbatch[name]] = list(map(len, columns[name]))
        self.check(microbatch)
        return microbatch

    def _is_read(self, name: str, main: str | None) -> bool:
        """Return True for tokens, and for the labels of which a text model makes the inputs of its decoder."""
        makes_inputs = name == "labels" and main == IDS
        return name.endswith(IDS) or (
            makes_inputs and any(getattr(model.config, "is_encoder_decoder", False) for model in self._models)
        )

    def _refuse_padding(self, padded: Mapping[str, Tensor]) -> None:
        """Raise `PlanError` where a model mixes the padding of an input into tokens."""
        for name, value in padded.items():
            cause = next((cause for cause, max_tokens in self._mixing if value.shape[1] > max_tokens), None)
            if cause is not None:
                raise PlanError(
                    f"samples of one microbatch have {name} of unequal lengths, and {cause}, so that padding changes "
                    "their gradient whatever the mask says; give micro_batch_size=1, or samples of one length"
                )

    def _check_fill(self, name: str, fill: float | None) -> None:
        """Raise `PlanError` where a model that looks for its pad token would get another."""
        if self._pad_token is None:
            raise PlanError(
                f"samples have {name} of unequal lengths and {self._name} finds the end of a sample by its pad token, "
                "which its config does not name; set model.config.pad_token_id"
            )
        if fill not in (None, self._pad_token):
            raise PlanError(
                f"Padded says {fill} for {name!r} and {self._name} finds the end of a sample by its pad token, "
                f"config.pad_token_id={self._pad_token}; leave it out of Padded"
            )

    @cached_property
    def _add_masks(self) -> Callable[..., None]:
        """The function that adds the masks of a microbatch. It adds none for models that need none, or take none."""
        return self._mask_padding if self.takes_mask else _mask_nothing

    def _mask_padding(
        self, microbatch: dict[str, Tensor], main: str | None, columns: Mapping[str, list[Tensor]], ragged: set[str]
    ) -> None:
        """Add masks to a microbatch, and note the padding that a model may not read without them."""
        for name in list(self._masked_inputs(microbatch, main)):
            if name in ragged or not self._is_causal:
                self._add_mask(microbatch, name, columns[name])
        self._note_unreadable(microbatch, ragged)

    def _masked_inputs(self, microbatch: Mapping[str, Tensor], main: str | None) -> Iterator[str]:
        """Yield the keys that get a mask: the main input, and tokens under other names."""
        if main is not None:
            yield main
        for name, value in microbatch.items():
            is_other = name != main and value.ndim == 2 and _holds_tokens(name) and not name.startswith(DECODER)
            if is_other and self._hands_on(_mask_name(name)):
                yield name

    def _add_mask(self, microbatch: dict[str, Tensor], name: str, values: list[Tensor]) -> None:
        """Add a mask of ones for tokens; to every microbatch of a model that is not causal, so losses have one."""
        is_placed = POSITIONS in microbatch and self._is_causal
        if microbatch[name].ndim > 1 and not is_placed and self._hands_on(_mask_name(name)):
            microbatch.setdefault(_mask_name(name), _mask(values, microbatch[name]))

    def _hands_on(self, mask_name: str) -> bool:
        """Return True if a mask under this name may be among the arguments that a loss gives to the model."""
        return all(_is_in_transformers(model) or _accepts(model, mask_name) for model in self._called)

    def _note_unreadable(self, microbatch: Mapping[str, Tensor], ragged: Iterable[str]) -> None:
        """Note the padded tensors that a model may take for its main input."""
        if POSITIONS in microbatch and self._is_causal:
            return
        for name in ragged:
            value = microbatch[name]
            if name.startswith(DECODER) or MASKS.search(name) is not None:
                continue
            num_dims = 3 if value.is_floating_point() else 2  # embeddings, or tokens
            may_be_input = num_dims == value.ndim and not is_label(name)
            if may_be_input or name.endswith(tuple(self._main_inputs)):
                self._unreadable[value] = True

    @property
    def running_lengths(self) -> Mapping[str, list[int]]:
        """The lengths of the running microbatch's samples, by padded key."""
        return self._running.lengths

    def expect(self, microbatch: Microbatch) -> None:
        """Note the microbatch that runs next, before it is moved."""
        named = microbatch if isinstance(microbatch, Mapping) else {}
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor) and value.ndim > 1}
        lengths = {name: self._lengths[value] for name, value in tensors.items() if value in self._lengths}
        padded = [value for value in tensors.values() if value in self._unreadable] if lengths else []
        unpadded = [value for value in tensors.values() if value not in self._unreadable] if padded else []
        self._running = RunningMicrobatch(lengths, set(map(_form, padded)), set(map(_form, unpadded)))

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """Raise `LossContractError` during a call for a loss that takes padding for tokens, or for classes."""

        def look(model: nn.Module, placed: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            if not self._running.padded or len(placed) > 1 or named.get(MASK) is not None:
                return
            main = next((named[name] for name in self._main_inputs if name in named), placed[0] if placed else None)
            if isinstance(main, Tensor) and main.ndim > 1 and self._running.pads(main):
                raise LossContractError(
                    f"samples are padded and the loss gives {type(with_config(model)).__name__} no attention_mask, so "
                    'that it takes padding for tokens; hand microbatch["attention_mask"] on (for tokens under '
                    'X_input_ids "X_attention_mask"), which is made where the model takes it, or give each sample one'
                )

        hooks = [module.register_forward_pre_hook(look, with_kwargs=True) for module in self._watched]
        try:
            yield
        except IndexError as error:
            labels = [name for name in self._running.lengths if is_label(name) and name not in self.fills]
            if not labels or str(error) != f"Target {IGNORED_LABEL} is out of bounds.":
                raise
            raise LossContractError(
                f"{' and '.join(map(repr, labels))} of samples are padded with {IGNORED_LABEL}, which the loss takes "
                f"for a class; give it ignore_index={IGNORED_LABEL}, or the GradientAccumulator "
                f"batching=Padded({{{labels[0]!r}: what the loss leaves out}})"
            ) from error
        finally:
            self._running = RunningMicrobatch({}, set(), set())
            for hook in hooks:
                hook.remove()

    def check(self, microbatch: Microbatch) -> None:
        """Raise `PlanError` for tokens beyond the vocabulary, and for padding that the model would take for tokens."""
        ids = microbatch.get(IDS) if isinstance(microbatch, Mapping) else None
        if not isinstance(ids, Tensor) or ids.device.type != "cpu" or ids.is_floating_point() or not ids.numel():
            return
        if is_fake(ids) or len(self._models) != 1:  # which of several models reads them is not known
            return
        if self._vocab_size is not None and int(ids.max()) >= self._vocab_size:
            beyond = set(ids[ids >= self._vocab_size].tolist()) - self._placeholders
            if beyond:
                raise PlanError(
                    f"input_ids has the token {min(beyond)} and the model's vocabulary has {self._vocab_size}; give "
                    "the tokenizer of the model, or model.resize_token_embeddings()"
                )
        num_tokens = 0 if ids.ndim != 2 or POSITIONS in microbatch else ids.shape[1]
        if self.num_positions is not None and num_tokens > self.num_positions:
            raise PlanError(
                f"a sample has {num_tokens} tokens and the model has {self.num_positions} positions; cut it, or leave "
                "it out"
            )
        if self._looks_for_pads:
            self._check_pads(ids, microbatch.get(MASK))

    def _check_pads(self, ids: Tensor, mask: Any) -> None:
        """Raise where a model that looks for its pad token would not find the padding."""
        if not isinstance(mask, Tensor) or mask.shape != ids.shape or mask.device != ids.device:
            return
        hidden = ids[(mask != 0).flip(1).cumsum(1).flip(1) == 0]  # behind the last token
        if len(hidden) and (self._pad_token is None or bool((hidden != self._pad_token).any())):
            raise PlanError(
                f"{self._name} finds the end of a sample by its pad token, config.pad_token_id={self._pad_token}, and "
                f"input_ids are padded with {int(hidden[0])}; pad with the token that the config names"
            )

    @property
    def _pad_token(self) -> int | None:
        """The pad token of the configs. Read anew each time: it is often set after the model is made."""
        pad_tokens: set[int] = set()
        for model in self._models:
            config: Any = model.config
            text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else None
            # A model without one has None, or -1.
            named = (getattr(model_config, "pad_token_id", None) for model_config in (config, text))
            pad_tokens.update([token for token in named if isinstance(token, int) and token >= 0][:1])
        if len(pad_tokens) > 1 and IDS not in self.fills:
            raise PlanError(
                f"the models have the pad tokens {sorted(pad_tokens)}, and samples are padded for all; say "
                'batching=Padded({"input_ids": ...})'
            )
        return next(iter(pad_tokens), None) if len(pad_tokens) < 2 else None

    @cached_property
    def _name(self) -> str:
        return type(self._models[0]).__name__

    @cached_property
    def _placeholders(self) -> set[int]:
        """Tokens of images and the like, which the model replaces before it looks them up."""
        configs = [vars(model.config) for model in self._models]
        return {value for config in configs for name, value in config.items() if "token" in name and type(value) is int}

    @cached_property
    def _looks_for_pads(self) -> bool:
        """True if a model that classifies reads config.pad_token_id in its forward, as a decoder does."""
        kinds = {type(module) for model in self._models for module in model.modules()}
        forwards = (inspect.unwrap(kind.forward) for kind in kinds if "ForSequenceClassification" in kind.__name__)
        return any("pad_token_id" in forward.__code__.co_names for forward in forwards if hasattr(forward, "__code__"))

    @cached_property
    def _mixing(self) -> list[tuple[str, int]]:
        return [cause for model in self._models for cause in find_mixing_causes(model)]

    @cached_property
    def takes_mask(self) -> bool:
        """True if a model needs a mask to leave padding out, and takes one."""
        return any(_reads(model, MASK) and not is_causal(model) for model in self._readers)

    @cached_property
    def _readers(self) -> list[Any]:
        """The models of transformers that read samples: the given ones, or those inside of a module of the user's."""
        return self._models + [inner for model in self._called for inner in _models_inside(model)]

    @cached_property
    def _watched(self) -> list[nn.Module]:
        """The modules whose arguments are looked at, where a model needs a mask."""
        if not self.takes_mask:
            return []
        modules = [model for model in self._called if isinstance(model, nn.Module)]
        full_models = [module for module in modules if _is_in_transformers(module)]
        return full_models + [inner for model in self._called for inner in _models_inside(model)]

    @cached_property
    def _is_causal(self) -> bool:
        """True if no token sees padding on the right, whatever experts count."""
        return all(is_causal(model, with_experts=True) for model in self._readers)

    @cached_property
    def _main_inputs(self) -> list[str]:
        """Names of the input that a mask describes: tokens, their embeddings, or what a model reads in their place."""
        declared = [str(getattr(model, "main_input_name", IDS)) for model in self._readers]
        return [*dict.fromkeys([IDS, "inputs_embeds", *declared])]

    @cached_property
    def _vocab_size(self) -> int | None:
        """Rows of the smallest table of tokens; None where a model does not tell."""
        return min((size for model in self._models if (size := _vocab_size_of(model)) is not None), default=None)

    @cached_property
    def num_positions(self) -> int | None:
        """Rows of the smallest table of learned positions beside one of tokens; None for models without one."""
        return min((size for model in self._models for size in _position_tables(model)), default=None)

    @cached_property
    def most_positions(self) -> int | None:
        """The longest row that the models may take, by their tables and configs; None if nothing limits it."""
        configs = [getattr(with_config(model), "config", None) for model in self._models]
        stated = [getattr(config, name, None) for config in configs for name in POSITION_LIMITS]
        return min((size for size in (self.num_positions, *stated) if isinstance(size, int) and size > 0), default=None)


def _joined_keys(columns: Mapping[str, list[Tensor]]) -> set[str]:
    """Return the keys of image patches [patches, D] and their grids, which models of transformers want in one row."""
    joined: set[str] = set()
    for grid, patches in PATCHES_BY_GRID.items():
        if grid in columns and patches in columns and columns[patches][0].ndim == 2:
            joined.add(patches)
            joined.update([grid] if columns[grid][0].ndim == 2 else [])
    return joined


class RunningMicrobatch(NamedTuple):
    """The padding of a microbatch. Tensors that a model may read are (rows, tokens, True for floating point)."""

    lengths: dict[str, list[int]]  # of samples, by padded key
    padded: set[Form]
    unpadded: set[Form]

    def pads(self, main: Tensor) -> bool:
        """Return True if a model's main input may have padding: a padded tensor, or several beside each other."""
        rows, tokens, is_floating = form = _form(main)
        if form in self.padded:
            return True
        return form not in self.unpadded and any(
            rows % padded_rows == 0 and tokens >= padded_tokens and kind == is_floating
            for padded_rows, padded_tokens, kind in self.padded
        )


def _mask_nothing(*_: object) -> None:
    """Add no mask: a causal model reads no padding on the right."""


def _form(tensor: Tensor) -> Form:
    return tensor.shape[0], tensor.shape[1], tensor.is_floating_point()


def _holds_tokens(name: str) -> bool:
    return name == IDS or name.endswith(f"_{IDS}")


def _mask_name(name: str) -> str:
    """Return the name of the mask of an input: X_attention_mask for X_input_ids, else attention_mask."""
    return name.removesuffix(IDS) + MASK if _holds_tokens(name) else MASK


def _is_in_transformers(model: Any) -> bool:
    return hasattr(with_config(model), "config")


def _models_inside(model: Any) -> list[nn.Module]:
    """Return the outermost models of transformers inside of a module that is none itself.

    A compiled module has none: hooks inside of it would be compiled too.
    """
    if not isinstance(model, nn.Module) or _is_in_transformers(model):
        return []
    if has_compiled(model):
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


def _stretched(columns: Mapping[str, list[Tensor]], length: int) -> list[str]:
    """Return the keys that have a value for each token, which are padded to ``length``."""
    names = [name for name, values in columns.items() if values[0].ndim]
    lengths = [len(value) for value in columns[names[0]]] if names else []
    for name in names:
        if [len(value) for value in columns[name]] != lengths or max(lengths) > length:
            raise PlanError(
                f"Shapes pads samples to {length} tokens, and {name!r} of a sample has another number of entries than "
                f"its {names[0]!r}; leave Shapes out"
            )
    return [name for name in names if min(lengths) < length]


def _tokens_of(model: Any) -> Any:
    """Return the table of a model's tokens; None where it reads something else."""
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # transformers raises the second for images and the like
        return None


def _vocab_size_of(model: Any) -> int | None:
    size = getattr(_tokens_of(model), "num_embeddings", None)
    return size if isinstance(size, int) else None


def _position_tables(model: Any) -> Iterator[int]:
    """Yield the positions of each table that stands beside that of the tokens."""
    tokens = _tokens_of(model)
    for module in model.modules():
        children = dict(module.named_children())
        if tokens is not None and any(child is tokens for child in children.values()):
            for name, table in children.items():
                if isinstance(table, nn.Embedding) and (name == "wpe" or "position" in name):
                    # Some models begin with a later row.
                    first = getattr(table, "offset", 0 if table.padding_idx is None else table.padding_idx + 1)
                    yield table.num_embeddings - int(first)


def _reads(model: Any, name: str) -> bool:
    """Return True if the forward of a model, inside of its adapter, names an argument."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return name in inspect.signature(inner.forward).parameters


def _mask(values: list[Tensor], padded: Tensor) -> Tensor:
    """Return ones for tokens: [B, T]."""
    lengths = torch.tensor([len(value) for value in values], device=padded.device)  # [B]
    return (torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]).long()


def next_targets(microbatch: Mapping[str, Any]) -> Tensor:
    """Return each position's target: ``shift_labels`` [B, T], or ``labels`` but the first of each row [B, T - 1].

    Raises `LossContractError` where the microbatch has neither.
    """
    shifted: Any = microbatch.get("shift_labels")
    targets: Any = microbatch.get("labels") if shifted is None else shifted
    if not isinstance(targets, Tensor) or targets.ndim != 2 or targets.is_floating_point():
        labels_given = "no labels" if targets is None else f"labels that are {_kind(targets)}"
        raise LossContractError(
            f"the samples have {labels_given} (their keys: {', '.join(map(str, microbatch))}); next_token wants labels "
            "[B, T] of whole numbers, or shift_labels"
        )
    return targets[:, 1:] if shifted is None else targets


def _kind(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def note_padding(microbatch: Microbatch) -> Microbatch:
    """Mark a microbatch on the CPU whose mask does no more than leave out padding on the right."""
    if not isinstance(microbatch, Mapping) or MASK not in microbatch:
        return microbatch
    if not _only_pads(cast(Mapping[str, Any], microbatch)):
        return microbatch
    return {**microbatch, RIGHT_PADDED: True}


def without_needless(model: Any, microbatch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the microbatch without the mark, and without a mask that the model does not need."""
    is_noted = microbatch.get(RIGHT_PADDED) or _only_pads(microbatch)
    needless = (RIGHT_PADDED, MASK) if is_noted and is_causal(model) else (RIGHT_PADDED,)
    return {name: value for name, value in microbatch.items() if name not in needless}


def is_causal(model: Any, *, with_experts: bool = False) -> bool:
    """Return True if no token of a transformers model sees a later one and a mask only hides some.

    The config and every layer with attention must say so. Other models are False: nothing is known of them. So are
    models that send tokens to experts, which may count them by the mask, unless ``with_experts``.
    """
    model = with_config(model)
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None or getattr(config, "is_encoder_decoder", True):
        return False
    if getattr(config, "use_bidirectional_attention", None):
        return False
    if not with_experts and any(getattr(config, name, None) for name in EXPERTS):
        return False
    attributes = [vars(module).get("is_causal") for module in model.modules()]
    stated = [attribute for attribute in attributes if attribute is not None]
    return bool(stated) and all(attribute is True for attribute in stated)


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
    return [config, config.get_text_config()] if callable(getattr(config, "get_text_config", None)) else []


def _only_pads(microbatch: Mapping[str, Any]) -> bool:
    """Return True if the mask does no more than leave out padding on the right.

    Beside positions it does more: without a mask transformers keeps documents apart where positions begin anew, and
    with one it does not look.
    """
    mask = microbatch.get(MASK)
    return POSITIONS not in microbatch and _is_right_padded(mask) and not _hides_targets(cast(Tensor, mask), microbatch)


def _hides_targets(mask: Tensor, microbatch: Mapping[str, Any]) -> bool:
    """Return True if a masked position has a target, as where labels are copied from padded input_ids."""
    targets = next_targets(microbatch)
    if targets.device != mask.device or len(targets) != len(mask) or targets.shape[1] > mask.shape[1]:
        return True  # it is not known
    return bool((targets[mask[:, : targets.shape[1]] == 0] != IGNORED_LABEL).any())


def _is_right_padded(mask: Any) -> bool:
    """Return True if ones precede zeros in each row of a mask [B, T] on the CPU; reading a device would wait."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.device.type != "cpu" or mask.is_floating_point():
        return False
    if is_fake(mask):  # it has no numbers
        return False
    is_real = mask != 0
    return not bool((is_real[:, 1:] & ~is_real[:, :-1]).any())

"""How samples of unequal lengths become one microbatch that a model takes for what they are.

A model of transformers tells its pad token and whether it reads an attention mask. Of other models nothing is known:
`pad_right` says what they get.
"""

import contextlib
import inspect
from collections.abc import Generator, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from megabatch.batching.attention_mask import MASK, POSITIONS, is_causal, with_config
from megabatch.batching.samples import Microbatch, check_keys, columns_of, stacked
from megabatch.errors import LossContractError, PlanError
from megabatch.torch_private import is_fake

IDS = "input_ids"


class Padding:
    """Pads samples on the right for a model, and checks microbatches that were made otherwise.

    - ``input_ids`` and keys that end with it are padded with the model's pad token, where its config has one. A model
      that looks for its pad token, as the decoders that classify do, gets no other.
    - An ``attention_mask`` [B, T] is made where samples have none and the model needs it: one that takes a mask and is
      not known to be causal. A causal model with experts gets it where lengths are unequal, and none beside
      ``position_ids``: with a mask transformers no longer keeps packed documents apart.
    - Labels are padded with -100, everything else with 0; see `pad_right`.

    Args:
        models: Those that are trained.
        fills: What to pad a key with instead, by key.
        names_collate: Whether the user has a collate function, which pads by itself.

    Raises `PlanError` for ``fills`` that are not numbers, and beside a collate function.
    """

    def __init__(
        self, models: Iterable[Any], fills: Mapping[str, float] | None = None, *, names_collate: bool = False
    ) -> None:
        if fills is not None and names_collate:
            raise PlanError(
                "padding= is for the default collate function, and collate= is given; leave one of them out"
            )
        for name, fill in (fills or {}).items():
            if isinstance(fill, bool) or not isinstance(cast(object, fill), int | float):
                raise PlanError(f"padding= says {fill!r} for {name!r}; expected a number")
        self._fills = dict(fills or {})
        self._called = list(models)
        self._models = [inner for model in self._called if hasattr(inner := with_config(model), "config")]
        self._masks = WeakTensorKeyDictionary()  # of microbatches in which only these tell padding from tokens
        self._expected: tuple[int, ...] | None = None  # the shape of the mask that the microbatch that runs wants

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The samples as one microbatch, ``{name: [B, longest, ...]}``. Raises `PlanError` as `pad_right`."""
        check_keys(samples)
        for name in self._fills:
            if name not in samples[0]:
                raise PlanError(f"padding= names {name!r} and the samples have the keys {list(samples[0])}")
        columns = columns_of(samples)
        ragged = {name for name, values in columns.items() if len({each.shape for each in values}) > 1}
        made = {name: stacked(name, values, self._fill(name, name in ragged)) for name, values in columns.items()}
        main = next((name for name in self._main_inputs if name in made), None)
        if main is not None and self._takes_mask and (main in ragged or not self._is_causal):
            self._add_mask(made, main, columns[main])
        self.check(made)
        return made

    def _add_mask(self, made: dict[str, Tensor], main: str, values: list[Tensor]) -> None:
        """Ones for what is real; in every microbatch of a model that is not causal, so that a loss always finds it."""
        if made[main].ndim > 1 and not (POSITIONS in made and self._is_causal):
            mask = made.setdefault(MASK, _mask(values, made[main]))
            if len({len(each) for each in values}) > 1:
                self._masks[mask] = True

    def expect(self, microbatch: Microbatch) -> None:
        """Note the microbatch that runs next, before it is moved."""
        mask = microbatch.get(MASK) if isinstance(microbatch, Mapping) else None
        self._expected = tuple(mask.shape) if isinstance(mask, Tensor) and mask in self._masks else None

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """Surrounds a call. Raises `LossContractError` where the loss keeps the mask from a model that needs it."""

        def look(model: nn.Module, placed: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            if self._expected is None or len(placed) > 1 or named.get(MASK) is not None:
                return
            main = next((named[name] for name in self._main_inputs if name in named), placed[0] if placed else None)
            if isinstance(main, Tensor) and tuple(main.shape[:2]) == self._expected:
                raise LossContractError(
                    f"samples are padded and the loss gives {type(with_config(model)).__name__} no attention_mask, so "
                    'that it takes padding for tokens; hand microbatch["attention_mask"] on, which is made where '
                    "samples have none"
                )

        models = [each for each in self._called if self._takes_mask and isinstance(each, nn.Module)]
        hooks = [each.register_forward_pre_hook(look, with_kwargs=True) for each in models]
        try:
            yield
        finally:
            self._expected = None
            for hook in hooks:
                hook.remove()

    def check(self, microbatch: Microbatch) -> None:
        """Raise `PlanError` for tokens that the model has not, and padding that it would take for tokens."""
        ids = microbatch.get(IDS) if isinstance(microbatch, Mapping) else None
        if not isinstance(ids, Tensor) or ids.device.type != "cpu" or ids.is_floating_point() or not ids.numel():
            return
        if is_fake(ids) or not self._models:
            return
        if len(self._models) > 1:  # which of them reads it is not known
            return
        if self._vocab_size is not None and int(ids.max()) >= self._vocab_size:
            beyond = set(ids[ids >= self._vocab_size].tolist()) - self._placeholders
            if beyond:
                raise PlanError(
                    f"input_ids has the token {min(beyond)} and the model's vocabulary has {self._vocab_size}; give "
                    "the tokenizer of the model, or model.resize_token_embeddings()"
                )
        num_tokens = 0 if ids.ndim != 2 or POSITIONS in microbatch else ids.shape[1]
        if self._num_positions is not None and num_tokens > self._num_positions:
            raise PlanError(
                f"a sample has {num_tokens} tokens and the model has {self._num_positions} positions; cut it, or leave "
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

    def _fill(self, name: str, is_ragged: bool) -> float | None:
        """What a key is padded with; None for what its name says."""
        is_ids = name == IDS or name.endswith(f"_{IDS}")
        given = self._fills.get(name)
        if not is_ids or not is_ragged:
            return given
        if self._looks_for_pads and self._pad_token is None:
            raise PlanError(
                f"samples have {name} of unequal lengths and {self._name} finds the end of a sample by its pad token, "
                "which its config does not name; set model.config.pad_token_id"
            )
        if self._looks_for_pads and given not in (None, self._pad_token):
            raise PlanError(
                f"padding= says {given} for {name!r} and {self._name} finds the end of a sample by its pad token, "
                f"config.pad_token_id={self._pad_token}; leave it out of padding="
            )
        return self._pad_token if given is None else given

    @property
    def _pad_token(self) -> int | None:
        """Read when it is needed: it is often set after the model is made. A model that has none says None or -1."""
        found = {_pad_token_of(model) for model in self._models} - {None}
        if len(found) > 1 and IDS not in self._fills:
            raise PlanError(
                f"the models have the pad tokens {sorted(cast(set[int], found))}, and samples are padded for all; say "
                'padding={"input_ids": ...}'
            )
        return next(iter(found), None) if len(found) < 2 else None

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
        """Whether a model that classifies reads config.pad_token_id in its forward, as a decoder does."""
        kinds = {type(module) for model in self._models for module in model.modules()}
        forwards = (inspect.unwrap(kind.forward) for kind in kinds if "ForSequenceClassification" in kind.__name__)
        return any("pad_token_id" in each.__code__.co_names for each in forwards if hasattr(each, "__code__"))

    @cached_property
    def _takes_mask(self) -> bool:
        """Whether a model needs a mask to leave padding out, and takes one."""
        return any(_reads(model, MASK) and not is_causal(model) for model in self._models)

    @cached_property
    def _is_causal(self) -> bool:
        """Whether padding on the right is seen by no token, whatever experts count."""
        return all(is_causal(model, with_experts=True) for model in self._models)

    @cached_property
    def _main_inputs(self) -> list[str]:
        """What a mask is of: tokens, their embeddings, or what a model reads in their place."""
        own = [str(getattr(model, "main_input_name", IDS)) for model in self._models]
        return [*dict.fromkeys([IDS, "inputs_embeds", *own])]

    @cached_property
    def _vocab_size(self) -> int | None:
        """Of the smallest table of tokens; None where a model does not tell."""
        return min((size for model in self._models if (size := _vocab_size_of(model)) is not None), default=None)

    @cached_property
    def _num_positions(self) -> int | None:
        """Of the smallest table of learned positions beside one of tokens; None for models without one."""
        return min((size for model in self._models for size in _position_tables(model)), default=None)


def _pad_token_of(model: Any) -> int | None:
    config: Any = model.config
    for each in (config, config.get_text_config() if callable(getattr(config, "get_text_config", None)) else None):
        token = getattr(each, "pad_token_id", None)
        if isinstance(token, int) and token >= 0:
            return token
    return None


def _tokens_of(model: Any) -> Any:
    """The table of a model's tokens; None where it reads something else."""
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def _vocab_size_of(model: Any) -> int | None:
    size = getattr(_tokens_of(model), "num_embeddings", None)
    return size if isinstance(size, int) else None


def _position_tables(model: Any) -> Iterator[int]:
    """The positions of each table that stands beside that of the tokens."""
    tokens = _tokens_of(model)
    for module in model.modules():
        children = dict(module.named_children())
        if tokens is not None and any(each is tokens for each in children.values()):
            for name, table in children.items():
                if isinstance(table, nn.Embedding) and (name == "wpe" or "position" in name):
                    # Some models begin with a later row.
                    first = getattr(table, "offset", 0 if table.padding_idx is None else table.padding_idx + 1)
                    yield table.num_embeddings - int(first)


def _reads(model: Any, name: str) -> bool:
    """Whether the forward of a model, inside of its adapter, names an argument."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return name in inspect.signature(inner.forward).parameters


def _mask(values: list[Tensor], padded: Tensor) -> Tensor:
    """Ones for what is real: [B, T]."""
    lengths = torch.tensor([len(each) for each in values], device=padded.device)  # [B]
    return (torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]).long()

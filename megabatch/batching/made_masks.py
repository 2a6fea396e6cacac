"""Masks that padding needs: made where samples have none, and handed on to the model by the loss."""

import contextlib
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from megabatch.core.right_padding import holds_tokens, is_label
from megabatch.errors import LossContractError
from megabatch.inspection.model_facts import IDS, MASK, POSITIONS, ModelFacts, with_config

# Inputs of a decoder begin so. Its tokens see no padding on their right.
DECODER = "decoder_"
# Keys that are no input by themselves.
MASKS = re.compile(r"(^|_)(mask|masks|position_ids|token_type_ids)(_|$)")
Form = tuple[int, int, bool]


class MadeMasks:
    """Makes the masks of microbatches, for models that need one to leave padding out."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self._unreadable = WeakTensorKeyDictionary()  # padded tensors that a model may not read without a mask
        self._running = RunningMicrobatch(set(), set())

    def add(
        self, microbatch: dict[str, Tensor], main: str | None, columns: Mapping[str, list[Tensor]], ragged: set[str]
    ) -> None:
        """Add masks to a microbatch, and note the padding that a model may not read without them."""
        for name in list(self._masked_inputs(microbatch, main)):
            if name in ragged or not self._facts.is_causal:
                self._add_mask(microbatch, name, columns[name])
        self._note_unreadable(microbatch, ragged)

    def _masked_inputs(self, microbatch: Mapping[str, Tensor], main: str | None) -> Iterator[str]:
        """Yield the keys that get a mask: the main input, and tokens under other names."""
        if main is not None:
            yield main
        for name, value in microbatch.items():
            is_other = name != main and value.ndim == 2 and holds_tokens(name) and not name.startswith(DECODER)
            if is_other and self._facts.hands_on(_mask_name(name)):
                yield name

    def _add_mask(self, microbatch: dict[str, Tensor], name: str, values: list[Tensor]) -> None:
        """Add a mask of ones for tokens; to every microbatch of a model that is not causal, so losses have one."""
        is_placed = POSITIONS in microbatch and self._facts.is_causal
        if microbatch[name].ndim > 1 and not is_placed and self._facts.hands_on(_mask_name(name)):
            microbatch.setdefault(_mask_name(name), _mask(values, microbatch[name]))

    def _note_unreadable(self, microbatch: Mapping[str, Tensor], ragged: Iterable[str]) -> None:
        """Note the padded tensors that a model may take for its main input."""
        if POSITIONS in microbatch and self._facts.is_causal:
            return
        for name in ragged:
            value = microbatch[name]
            if name.startswith(DECODER) or MASKS.search(name) is not None:
                continue
            num_dims = 3 if value.is_floating_point() else 2  # embeddings, or tokens
            may_be_input = num_dims == value.ndim and not is_label(name)
            if may_be_input or name.endswith(tuple(self._facts.main_inputs)):
                self._unreadable[value] = True

    def expect(self, tensors: Sequence[Tensor]) -> None:
        """Note the tensors of the microbatch that runs next; none if it has no padding."""
        self._running = RunningMicrobatch(set(), set())
        for value in tensors:
            forms = self._running.padded if value in self._unreadable else self._running.unpadded
            forms.add(_form(value))

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """Raise `LossContractError` during a call for a loss that takes padding for tokens."""

        def look(model: nn.Module, placed: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            if not self._running.padded or len(placed) > 1 or named.get(MASK) is not None:
                return
            inputs = [named[name] for name in self._facts.main_inputs if name in named]
            main = next(iter((*inputs, *placed)), None)
            if isinstance(main, Tensor) and main.ndim > 1 and self._running.pads(main):
                raise LossContractError(
                    f"samples are padded and the loss gives {type(with_config(model)).__name__} no attention_mask, so "
                    'that it takes padding for tokens; hand microbatch["attention_mask"] on (for tokens under '
                    'X_input_ids "X_attention_mask"), which is made where the model takes it, or give each sample one'
                )

        with contextlib.ExitStack() as hooks:
            for module in self._facts.watched:
                hooks.enter_context(module.register_forward_pre_hook(look, with_kwargs=True))
            try:
                yield
            finally:
                self._running = RunningMicrobatch(set(), set())


class RunningMicrobatch(NamedTuple):
    """The padding of a microbatch. Tensors that a model may read are (rows, tokens, True for floating point)."""

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


def _form(tensor: Tensor) -> Form:
    return tensor.shape[0], tensor.shape[1], tensor.is_floating_point()


def _mask_name(name: str) -> str:
    """Return the name of the mask of an input: X_attention_mask for X_input_ids, else attention_mask."""
    return name.removesuffix(IDS) + MASK if holds_tokens(name) else MASK


def _mask(values: list[Tensor], padded: Tensor) -> Tensor:
    """Return ones for tokens: [B, T]."""
    lengths = torch.tensor([len(value) for value in values], device=padded.device)  # [B]
    return (torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]).long()

"""Padding: samples of unequal lengths in one microbatch that a model reads correctly.

The config of a transformers model names its pad token. Of other models nothing is known: they get what `pad_right`
makes. A causal model needs no mask for padding on the right: no token sees it. `MadeMasks` makes those of other models.

Some models mix padding into tokens whatever the mask says. `find_mixing_causes` knows those of transformers, and a
microbatch with padding is refused for them.
"""

import contextlib
from collections.abc import Generator, Iterable, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megabatch.core.right_padding import (
    SHAPE,
    RightPad,
    gather_columns,
    holds_tokens,
    is_label,
    join_rows,
    stack_padded,
)
from megabatch.core.samples import Microbatch
from megabatch.errors import PlanError
from megabatch.inspection.mixing_causes import is_read, refuse_mixing
from megabatch.inspection.model_facts import IDS, MASK, POSITIONS, ModelFacts
from megabatch.torch_private.operations import is_fake

# As Qwen-VL has them.
PATCHES_BY_GRID = {"image_grid_thw": "pixel_values", "video_grid_thw": "pixel_values_videos"}


class Padding(RightPad):
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
        self.facts = ModelFacts(models)
        self._lengths = WeakTensorKeyDictionary()  # padded tensor of a microbatch -> lengths of its samples

    @cached_property
    def _masks(self) -> Any:
        """The `MadeMasks` of models that need one. None for models that need none, or take none."""
        if not self.facts.takes_mask:
            return None
        from megabatch.batching.made_masks import MadeMasks

        return MadeMasks(self.facts)

    def __call__(self, samples: list[Mapping[str, Any]], shape: tuple[int, int] | None = None) -> dict[str, Tensor]:
        """Return the samples as one microbatch, ``{name: [B, longest, ...]}``. Raises `PlanError` as `pad_right`.

        With a ``shape`` it has so many rows and tokens. Rows without a sample repeat the last one, with labels of -100.
        """
        length = None
        if shape is not None:
            from megabatch.batching.filled_shape import without_labels

            filler = without_labels(samples[-1])
            samples, length = [*samples, *[filler] * (shape[0] - len(samples))], shape[1]
        columns = gather_columns(samples)
        for name in self.fills:
            if name not in columns:
                raise PlanError(f"Padded names {name!r} and the samples have the keys {list(samples[0])}")
        joined = _joined_keys(columns)
        ragged = {name for name, values in columns.items() if len(set(map(SHAPE, values))) > 1} - joined
        if length is not None:
            from megabatch.batching.filled_shape import stretched_keys

            ragged.update(stretched_keys(columns, length))
        microbatch: dict[str, Tensor] = {}
        for name, values in columns.items():
            if name in joined:
                microbatch[name] = join_rows(name, values)
                continue
            fill = self._fill_of_tokens(name) if name in ragged and holds_tokens(name) else self.fills.get(name)
            microbatch[name] = stack_padded(name, values, fill, length)
        main = next(filter(microbatch.__contains__, self.facts.main_inputs), None)
        if self.facts.mixing and ragged:
            inputs = [name for name in microbatch if name == main or is_read(self.facts.models, name, main)]
            refuse_mixing(self.facts.mixing, {name: microbatch[name] for name in inputs if name in ragged})
        if self._masks is not None:
            self._masks.add(microbatch, main, columns, ragged)
        for name in ragged:
            self._lengths[microbatch[name]] = list(map(len, columns[name]))
        self.check(microbatch)
        return microbatch

    def _fill_of_tokens(self, name: str) -> float:
        """Return the padding value of tokens. Raises `PlanError` for one that the model does not look for."""
        fill = self.fills.get(name)
        if self.facts.looks_for_pads:
            from megabatch.batching.pad_seekers import check_fill

            check_fill(self.facts.name, self._pad_token, name, fill)
        return fill if fill is not None else self._pad_token or 0

    def expect(self, microbatch: Microbatch) -> None:
        """Note the microbatch that runs next, before it is moved."""
        named = microbatch if isinstance(microbatch, Mapping) else {}
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor) and value.ndim > 1}
        lengths = {name: self._lengths[value] for name, value in tensors.items() if value in self._lengths}
        self.running_lengths = lengths
        if self._masks is not None:
            self._masks.expect([*tensors.values()] if lengths else [])

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """Raise `LossContractError` during a call for a loss that takes padding for tokens, or for classes."""
        try:
            with contextlib.nullcontext() if self._masks is None else self._masks.watched():
                yield
        except IndexError as error:
            from megabatch.batching.pad_seekers import check_classes

            check_classes(error, [name for name in self.running_lengths if is_label(name) and name not in self.fills])
            raise
        finally:
            self.running_lengths = {}

    def check(self, microbatch: Microbatch) -> None:
        """Raise `PlanError` for tokens beyond the vocabulary, and for padding that the model would take for tokens."""
        ids = microbatch.get(IDS) if isinstance(microbatch, Mapping) else None
        if not isinstance(ids, Tensor) or ids.device.type != "cpu" or ids.is_floating_point() or not ids.numel():
            return
        # It is not known which of several models reads them.
        if is_fake(ids) or len(self.facts.models) != 1:
            return
        if self.facts.vocab_size is not None:
            beyond = set(ids[ids >= self.facts.vocab_size].tolist()) - self.facts.placeholders
            if beyond:
                raise PlanError(
                    f"input_ids has the token {min(beyond)} and the model's vocabulary has {self.facts.vocab_size}; "
                    "give the tokenizer of the model, or model.resize_token_embeddings()"
                )
        num_tokens = 0 if ids.ndim != 2 or POSITIONS in microbatch else ids.shape[1]
        if self.facts.num_positions is not None and num_tokens > self.facts.num_positions:
            raise PlanError(
                f"a sample has {num_tokens} tokens and the model has {self.facts.num_positions} positions; cut it, or "
                "leave it out"
            )
        if self.facts.looks_for_pads:
            from megabatch.batching.pad_seekers import check_pads

            check_pads(self.facts.name, self._pad_token, ids, microbatch.get(MASK))

    @property
    def _pad_token(self) -> int | None:
        """The pad token of the configs. Read anew each time: it is often set after the model is made."""
        pad_tokens: set[int] = set()
        for model in self.facts.models:
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
        return pad_tokens.pop() if len(pad_tokens) == 1 else None


def _joined_keys(columns: Mapping[str, list[Tensor]]) -> set[str]:
    """Return the keys of image patches [patches, D] and their grids, which models of transformers want in one row."""
    joined: set[str] = set()
    for grid, patches in PATCHES_BY_GRID.items():
        if grid in columns and patches in columns and columns[patches][0].ndim == 2:
            joined.add(patches)
            joined.update([grid] if columns[grid][0].ndim == 2 else [])
    return joined

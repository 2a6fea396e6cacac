"""OneRow: the samples of a microbatch packed into one row, so that nothing is padded.

transformers' models read from ``position_ids`` where a sample begins, and attend within it. flash_attention_2 and
flex_attention compute nothing else. sdpa and eager compute the whole square of the row and hide most of it, which takes
longer than padding does. `batching.packing_check` tries the model.
"""

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from megabatch.batching.filled_shape import without_labels
from megabatch.core.right_padding import gather_columns
from megabatch.core.samples import Batching, Microbatch, Samples
from megabatch.errors import LossContractError, PlanError
from megabatch.inspection.model_facts import list_configs
from megabatch.planning.packing import without_padding
from megabatch.planning.plan import CostModel, Plan
from megabatch.torch_private.loss_nodes import IGNORED_LABEL

MAX_COMPARED = 8  # samples of a row whose common weight is compared with the sum of their own
NOT_ALONG = "in one row everything runs along input_ids. Leave OneRow out"


class OneRow(Batching):
    """Pads nothing: ``GradientAccumulator(model, batching=OneRow(), ...)``.

    A sample: ``input_ids`` [T] and whatever else runs along it, on the CPU. A microbatch: ``{name: [1, S, ...]}``,
    where S is the sum of their lengths. ``position_ids``, made where there are none, begin with 0 in each. ``labels``
    [T] come back as ``shift_labels``, whose entry t is what position t predicts: a sample's first token is predicted by
    none.

    The loss must call the model itself, hand ``position_ids`` on to it, by name and without a mask, sum over positions,
    and say by ``weigh`` how its weight is counted; samples are no rows any more. Inside another function it is not
    known, and nothing is looked at. The model is tried when the accumulator is made, without gradients,
    and refused where samples would see each other. A model of transformers goes by positions where it makes no cache:
    ``model.config.use_cache = False``. Where the loss is computed under autocast, make the accumulator under it too.

    Args:
        flash_attn_kwargs: Add what transformers' flash attention computes from ``position_ids`` otherwise, in every
            layer, while the host waits for the device: ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int32 [n + 1], the ends
            of the n sequences of the row behind a 0, and the numbers ``max_length_q`` and ``max_length_k``. The
            model's forward must take these names, and the loss hand them on.
    """

    has_rows = False

    def __init__(self, *, flash_attn_kwargs: bool = False) -> None:
        super().__init__(self)
        self.adds_lengths = flash_attn_kwargs

    def __call__(self, samples: Sequence[Mapping[str, Any]], shape: tuple[int, int] | None = None) -> dict[str, Any]:
        """Concatenate the samples. Raises `PlanError` for samples that cannot lie in a row.

        With a ``shape``, [1, tokens], samples without labels fill the row up.
        """
        columns = gather_columns(samples)
        if shape is not None:
            columns = gather_columns([*samples, *_fillers(samples, shape[1])])
        rows = [_row(dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]
        for row in rows:
            _check_alike(row, rows[0])
        packed: dict[str, Any] = {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}
        return packed | _ends_of_sequences(packed["position_ids"][0]) if self.adds_lengths else packed

    @property
    def is_repeatable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True unless a subclass may draw random numbers."""
        return type(self) is OneRow

    @property
    def shape_problem(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Why a row cannot be filled up to a number of tokens; None if it can."""
        return (
            "OneRow(flash_attn_kwargs=True), whose ends of sequences have other shapes" if self.adds_lengths else None
        )

    def collate(self, samples: list[Any], rows: Sequence[int], shape: tuple[int, int] | None = None) -> Microbatch:
        """Return samples as one microbatch, of so many tokens where a ``shape`` is given."""
        microbatch = self(samples) if shape is None else self(samples, shape)
        self.pad.check(microbatch)
        return microbatch

    def check_model(self, wrapper: Any, limits: tuple[int | None, int | None]) -> None:
        """Compare samples of one row with each alone, on the model."""
        from megabatch.batching.packing_check import check_packing

        check_packing(wrapper, self, limits)

    def plan(
        self, samples: Samples, lengths: Sequence[int], limits: tuple[int | None, int | None], cost: CostModel | None
    ) -> Plan:
        """Return the plan of one rank: the fewest rows under the limit."""
        return without_padding(lengths, super().plan(samples, lengths, limits, cost), limits[1])

    def check(self, samples: Samples, plan: Plan, hooks: Any) -> None:
        """Raise `LossContractError` if a weight may count rows."""
        if not plan.microbatches:
            return
        if hooks.weigh is None:
            raise LossContractError(
                "samples lie in one row and the loss does not say how its weight is counted, so a weight that counts "
                "rows would not be seen; give weigh=, see megabatch.loss, or leave OneRow out"
            )
        together = next((rows for rows in plan.microbatches if len(rows) > 1), ())[:MAX_COMPARED]
        if together and samples.given_weight(together) is None:
            difference = hooks.compare_weights(samples, together)
            if difference is not None:
                raise LossContractError(
                    f"weigh counts {difference[0]:.10g} in samples of one row and {difference[1]:.10g} in the same one "
                    "by one; under OneRow count positions (of shift_labels, say), not rows"
                )
        samples.forget_early()

    @contextlib.contextmanager
    def surround_call(self, model: Any, plan: Plan, num_microbatches: int) -> Generator[None]:
        """Check that the loss calls the model with position_ids and without a mask or cache."""
        with self.pad.watched(), _watched(model) if num_microbatches else contextlib.nullcontext():
            yield


def _fillers(samples: Sequence[Mapping[str, Any]], num_tokens: int) -> list[dict[str, Tensor]]:
    """Return samples without labels that fill a row up to so many tokens, none longer than those in it."""
    lengths = [len(sample["input_ids"]) for sample in samples]
    like, longest, num_missing = without_labels(samples[0]), max(1, *lengths), num_tokens - sum(lengths)
    return [_filler(like, min(longest, num_missing - start)) for start in range(0, num_missing, longest)]


def _filler(like: Mapping[str, Tensor], num_tokens: int) -> dict[str, Tensor]:
    filler = {name: value.new_zeros((num_tokens, *value.shape[1:])) for name, value in like.items()}
    for name, value in filler.items():
        if name.endswith("labels"):
            value.fill_(IGNORED_LABEL)
        elif name == "position_ids":
            value += torch.arange(num_tokens, device=value.device)
        elif name == "attention_mask":
            value += 1
    return filler


def _ends_of_sequences(positions: Tensor) -> dict[str, Any]:
    """Return the ends of sequences, and the longest, from positions [S] that begin with 0 in each."""
    starts = (positions == 0).nonzero().flatten()
    ends = torch.cat([starts, starts.new_tensor([len(positions)])]).to(torch.int32)  # [sequences + 1]
    longest = int(ends.diff().max()) if len(starts) else 0
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def _row(row: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return one sample's part of the row, each tensor along its tokens."""
    ids = row.get("input_ids")
    if ids is None or ids.ndim != 1:
        raise PlanError("a sample has no input_ids [T], along which samples lie in one row; leave OneRow out")
    mask = row.pop("attention_mask", None)
    if mask is not None and ("position_ids" in row or not bool(mask.all())):
        raise PlanError(
            "a sample has an attention_mask with zeros, or with position_ids beside it, which one row cannot say; cut "
            "hidden tokens away and leave the mask out, or leave OneRow out"
        )
    for name, value in row.items():
        if value.ndim == 0 or len(value) != len(ids) or (name == "labels" and value.ndim > 1):
            raise PlanError(
                f"{name!r} of a sample has the shape {tuple(value.shape)} and its input_ids {tuple(ids.shape)}; "
                f"{NOT_ALONG}"
            )
    positions = row.setdefault("position_ids", torch.arange(len(ids), device=ids.device))
    if positions.ndim != 1 or bool((positions[:1] != 0).any()) or bool((positions < 0).any()):
        raise PlanError(
            "position_ids of a sample do not begin with 0, their least, by which samples of a row are kept apart; let "
            "them begin with 0, or leave OneRow out"
        )
    labels = row.pop("labels", None)
    if labels is not None and "shift_labels" not in row:
        row["shift_labels"] = torch.cat([labels[1:], labels.new_full((min(1, len(labels)),), IGNORED_LABEL)])
    return row


def _check_alike(row: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> None:
    """Raise `PlanError` for samples that differ in more than their length."""
    for name, value in row.items():
        if (value.dtype, value.shape[1:]) != (first[name].dtype, first[name].shape[1:]):
            pair = (first[name], value)
            kinds = [f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for tensor in pair]
            raise PlanError(
                f"{name!r} of samples is {' and '.join(kinds)}; in one row give all the same but the length"
            )


@contextlib.contextmanager
def _watched(model: Any) -> Generator[None]:
    """Raise `LossContractError` for a loss that calls the model otherwise, or not at all."""
    is_called = False

    def check(model: nn.Module, placed: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        nonlocal is_called
        is_called = True
        _check_inputs(model, placed, named)

    handle = cast(nn.Module, model).register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if not is_called:
        raise LossContractError(
            "the loss does not call the model that it is given (a part of it, perhaps), so that nobody sees whether "
            "samples of a row are kept apart; call the model itself, or leave OneRow out"
        )


def _check_inputs(model: nn.Module, placed: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    if named.get("position_ids") is None:
        raise LossContractError(
            "the loss calls the model without position_ids, by which the samples of a row are kept apart; hand them on "
            "by name"
        )
    if len(placed) > 1 or any(named.get(name) is not None for name in ("attention_mask", "past_key_values")):
        raise LossContractError(
            "the loss gives the model an attention_mask, past_key_values, or more than the tokens by place, with which "
            "its attention does not go by position_ids; leave them out"
        )
    configs = list_configs(model)
    makes_cache = named.get("use_cache")
    if makes_cache is None:
        makes_cache = any(getattr(config, "use_cache", False) for config in configs)
    if makes_cache and not any("flash" in str(getattr(config, "_attn_implementation", "")) for config in configs):
        raise LossContractError(
            "the model makes a cache, with which its attention does not go by position_ids; set "
            "model.config.use_cache = False"
        )

"""Stretches: the parts of sequences that ranks along mesh axis ``cp`` run.

Each sequence is split into two pieces per rank. Rank r of n has pieces r and 2n - 1 - r, so that all ranks do the same
work although late positions attend to more. A position's target may lie on another rank, so a stretch has
``shift_labels`` in place of ``labels``: entry t is the target of position t.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.errors import LossContractError, PlanError
from megabatch.torch_private.loss_nodes import IGNORED_LABEL
from megabatch.torch_private.operations import pytree

INPUTS = ("input_ids", "position_ids", "attention_mask", "token_type_ids")  # what a model reads, position by position
SHIFTED = "shift_"  # what a name begins with whose values stand at the position that they are for


class Stretch(dict[str, Any]):
    """One rank's part of a microbatch; see `stretch`."""

    def __missing__(self, name: str) -> Any:
        if name != "labels":
            raise KeyError(name)
        raise LossContractError(
            "labels is not in a stretch of a sequence that is cut over ranks; read shift_labels [B, T], whose entry t "
            "is what position t predicts"
        )


pytree.register_pytree_node(  # it moves between devices as the mapping that it is
    Stretch,
    lambda stretch: (list(cast(Stretch, stretch).values()), list(cast(Stretch, stretch))),
    lambda values, names: Stretch(zip(cast(list[str], names), values, strict=True)),
)


def stretch(microbatch: Any, index: int, degree: int) -> Stretch:
    """Return the part of a whole microbatch that context rank ``index`` of ``degree`` runs.

    ``microbatch``: a mapping with ``input_ids`` [B, T] and ``labels`` [B, T], unshifted (or ``shift_labels``). The
    result has, with L = T / degree rounded up to an even number:

    - ``input_ids``, ``position_ids`` [B, L], and ``shift_labels`` [B, L] in place of ``labels``: the target of each
      position, -100 for none;
    - ``attention_mask`` [B, 1, 1, L * degree], the documents of the whole sequence, which `GatheredAttention` reads. It
      is of type bool, and True, where causal order alone decides. A model that attends to its stretch alone fails on
      this shape;
    - other keys that begin with ``shift_``, split in the same way and padded with 0, and those without a sequence,
      whole.

    A position that restarts within a row begins another document, and documents do not attend to each other. Raises
    `PlanError` for a microbatch that cannot be split.
    """
    return stretch_alike([microbatch], index, degree)[0]


def stretch_alike(microbatches: Sequence[Any], index: int, degree: int) -> list[Stretch]:
    """Return the parts of whole microbatches as `stretch` does, all of one length and with masks of one type.

    A schedule step of a pipeline runs microbatches of one shape, and padding a part would move the border between its
    two pieces. The sequences are therefore padded before they are split.
    """
    wholes: list[dict[str, Any]] = []
    documents: list[Tensor] = []  # [B, T] of each
    for microbatch in microbatches:
        whole = _shifted(_checked(microbatch))
        ids = cast(Tensor, whole["input_ids"])  # [B, T]
        if "position_ids" not in whole:
            whole["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        documents.append(_documents(whole["position_ids"], whole.pop("attention_mask", None)))
        wholes.append(whole)
    plain = all(map(_order_says_all, documents, wholes))
    piece_tokens = max(1, -(-max(document.shape[1] for document in documents) // (2 * degree)))
    return [
        _stretch_to(piece_tokens * 2 * degree, whole, None if plain else each, index, degree)
        for whole, each in zip(wholes, documents, strict=True)
    ]


def _stretch_to(
    num_tokens: int, whole: Mapping[str, Any], documents: Tensor | None, index: int, degree: int
) -> Stretch:
    """Pad a microbatch to ``num_tokens`` and return its part. Without ``documents`` causal order alone decides."""
    ids = cast(Tensor, whole["input_ids"])  # [B, T]
    missing = num_tokens - ids.shape[1]
    part = {
        name: _cut(value, missing, IGNORED_LABEL if name == "shift_labels" else 0, index, degree)
        if _runs_along(value, ids)
        else value
        for name, value in whole.items()
    }
    mask = (
        torch.ones(len(ids), num_tokens, dtype=torch.bool, device=ids.device)
        if documents is None
        else F.pad(documents, (0, missing))  # padding attends to padding
    )
    return Stretch(part, attention_mask=mask[:, None, None])


def _checked(microbatch: Any) -> dict[str, Any]:
    """Copy the mapping. Raises `PlanError` for a microbatch that cannot be split exactly."""
    found: dict[str, Any] = dict(cast(Any, microbatch)) if isinstance(microbatch, Mapping) else {}
    ids = found.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        seen = f"has {list(found)}" if isinstance(microbatch, Mapping) else f"is a {type(microbatch).__name__}"
        raise PlanError(
            f"the microbatch {seen}, without input_ids [B, T], and context parallelism cuts sequences; give input_ids, "
            "or a mesh without cp"
        )
    for name in ("labels", "shift_labels", "position_ids", "attention_mask"):
        if name in found and getattr(found[name], "shape", None) != ids.shape:
            raise PlanError(
                f"{name} has the shape {_shape(found[name])} and input_ids {_shape(ids)}; context parallelism cuts "
                "both along the sequence: give them one shape"
            )
    for name, value in found.items():
        if _runs_along(value, ids) and name not in ("labels", *INPUTS) and not name.startswith(SHIFTED):
            raise PlanError(
                f"{name!r} runs along the sequence, and a loss that shifts it would lose values where context "
                f"parallelism cuts; shift it in the data, its entry t for position t, and name it '{SHIFTED}{name}'"
            )
    return found


def _shifted(whole: dict[str, Any]) -> dict[str, Any]:
    """Replace ``labels`` by ``shift_labels``, before anything is split."""
    labels = whole.pop("labels", None)
    if labels is not None:
        if "shift_labels" in whole:
            raise PlanError("the microbatch has labels and shift_labels, which say the same; give one of them")
        whole["shift_labels"] = F.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:]
    if not any(name.startswith(SHIFTED) for name in whole):
        raise PlanError(
            f"the microbatch has {list(whole)} and no targets, and a loss that shifts input_ids would lose some where "
            "context parallelism cuts; give labels, -100 where there is none"
        )
    return whole


def _documents(positions: Tensor, attended: Tensor | None) -> Tensor:
    """Return the document number of each position, from 1, negative where nothing may attend to it: [B, T].

    These are the rules of transformers, which ignores positions beside an attention_mask.
    """
    if attended is None:
        return (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(1) + 1
    attended = attended.bool()
    furthest = positions.masked_fill(~attended, -1).cummax(1).values
    if bool((attended[:, 1:] & (positions[:, 1:] <= furthest[:, :-1])).any()):
        raise PlanError(
            "position_ids begin anew within a row that has an attention_mask, with which its documents would attend to "
            "each other; leave attention_mask out: padding on the right needs none"
        )
    return attended.long() * 2 - 1


def _order_says_all(documents: Tensor, whole: Mapping[str, Any]) -> bool:
    """Return True if every position that matters is in its row's first document and may be attended to."""
    matters = torch.ones_like(documents, dtype=torch.bool)
    if [name for name in whole if name.startswith(SHIFTED)] == ["shift_labels"]:  # nothing after the last target does
        matters = (whole["shift_labels"] != IGNORED_LABEL).flip(1).cummax(1).values.flip(1)
    return bool(((documents == 1) | ~matters).all())


def _cut(value: Tensor, missing: int, fill: int, index: int, degree: int) -> Tensor:
    """Pad dim 1 on the right and take two pieces of it: [B, T, ...] -> [B, L, ...]."""
    padding = value.new_full((value.shape[0], missing, *value.shape[2:]), fill)
    pieces = torch.cat([value, padding], dim=1).chunk(2 * degree, dim=1)
    return torch.cat([pieces[index], pieces[-1 - index]], dim=1)


def _runs_along(value: Any, ids: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape[:2] == ids.shape


def _shape(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__

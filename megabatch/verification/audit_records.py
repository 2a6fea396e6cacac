"""Records of an audit: one for each update and rank, as lines of JSON. Ranks write them, and one process reads them."""

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megabatch.errors import MegabatchError


@dataclass
class MicrobatchRecord:
    """One backward: its target tokens, and a sketch of the rank's own gradient before any reduction.

    Attributes:
        weights: [targets], in the gradient of the logits.
        samples: [targets], the row of each in the microbatch; ``sequences`` counts those of packed rows. -1 if unknown.
        residual: Of the fit of the weights. None without logits.
        row_tokens: Without padding. Empty if unknown.
        num_positions: Tokens with padding, where ``row_tokens`` are known.
    """

    weights: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.float64))
    samples: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.int64))
    sequences: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.int64))
    residual: float | None = None
    smoothing: float = 0.0
    sketch: Tensor | None = None
    row_hashes: list[int] = field(default_factory=list[int])
    row_tokens: list[int] = field(default_factory=list[int])
    num_positions: int = 0

    @property
    def num_targets(self) -> int:
        """Number of target tokens."""
        return self.weights.numel()

    @property
    def is_empty(self) -> bool:
        """Return True for a gradient of zero without a target, as of a microbatch of the weight 0."""
        return not self.num_targets and self.sketch is not None and not self.sketch.any()


@dataclass
class LoopRecord:
    """The loop that calls the optimizer: its library and trainer, and the script's line that leads to the step."""

    library: str = ""
    trainer: str = ""
    file: str = ""
    line: int = 0
    code: str = ""


@dataclass
class UpdateRecord:
    """One optimizer step on one rank, with the microbatches before it.

    Attributes:
        gradient: Sketch of p.grad before clipping, of this rank's shards if it is sharded.
        weights_checksum: None if the weights are sharded.
        collectives: Number and bytes by name. None if they were not watched.
    """

    number: int
    rank: int
    world: int
    microbatches: list[MicrobatchRecord]
    gradient: Tensor | None = None
    is_sharded: bool = False
    weights_checksum: int | None = None
    num_clips: int = 0
    collectives: dict[str, list[int]] | None = None
    loop: LoopRecord = field(default_factory=LoopRecord)
    is_compiled: bool = False
    notes: list[str] = field(default_factory=list[str])


@dataclass
class EndRecord:
    """The end of an audit on one rank, with the target tokens of microbatches that were not stepped."""

    rank: int
    is_end_of_run: bool
    left_over: list[int] = field(default_factory=list[int])
    notes: list[str] = field(default_factory=list[str])


@dataclass
class SchedulerRecord:
    """Steps of a scheduler, which follow the optimizer's."""

    number: int
    rank: int
    steps: int


Record = UpdateRecord | SchedulerRecord | EndRecord
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (UpdateRecord, SchedulerRecord, EndRecord)}


def write_line(record: Record) -> str:
    """Return a record as one line of JSON."""
    return json.dumps({"kind": type(record).__name__, **asdict(record)}, default=_encode)


def read_lines(lines: Iterable[str]) -> list[Record]:
    """Return the records of lines. Raises `MegabatchError` for a line that is none; the last may be cut off."""
    texts = [line for line in lines if line.strip()]
    records: list[Record] = []
    for number, text in enumerate(texts):
        try:
            records.append(_record_of(json.loads(text, object_hook=_decode)))
        except (ValueError, KeyError, TypeError, AttributeError):
            if number < len(texts) - 1:
                raise MegabatchError(
                    f"line {number + 1} is not of an audit: {text[:60]!r}; give a folder that megabatch audit wrote"
                ) from None
    return records


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Join numbers of rows, so that rows of two parts have two numbers; -1 stays -1."""
    joined = [torch.empty(0, dtype=torch.int64)]
    first = 0
    for rows in parts:
        joined.append(torch.where(rows < 0, rows, rows + first))
        first = max(first, int(joined[-1].max()) + 1) if len(rows) else first
    return torch.cat(joined)


def _record_of(values: dict[str, Any]) -> Any:
    kind = _KINDS[values.pop("kind")]
    if kind is UpdateRecord:
        values["loop"] = LoopRecord(**values["loop"])
        values["microbatches"] = [MicrobatchRecord(**microbatch) for microbatch in values["microbatches"]]
    return kind(**values)


def _encode(tensor: Tensor) -> dict[str, str]:
    values = tensor.detach().cpu().numpy()
    return {"dtype": str(values.dtype), "base64": base64.b64encode(values.tobytes()).decode()}


def _decode(values: dict[str, Any]) -> Any:
    """Return a tensor in place of what `_encode` made of it."""
    if "base64" not in values:
        return values
    numbers = np.frombuffer(base64.b64decode(values["base64"]), dtype=values["dtype"])
    return torch.from_numpy(numbers.copy())

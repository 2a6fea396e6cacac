"""Records of an audit: one for each update and rank, as lines of JSON. Ranks write them, and one process reads them."""

import base64
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megabatch.errors import MegabatchError


def _no_weights() -> Tensor:
    return torch.empty(0, dtype=torch.float64)


def _no_rows() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass
class MicrobatchRecord:
    """One backward: its target tokens, and a sketch of the rank's own gradient before any reduction."""

    weights: Tensor = field(default_factory=_no_weights)  # [targets] in the gradient of the logits
    samples: Tensor = field(default_factory=_no_rows)  # [targets] number of the row in the microbatch; -1: unknown
    sequences: Tensor = field(default_factory=_no_rows)  # [targets] the same of the sequence, for packed rows
    residual: float | None = None  # of the fit of the weights; None: no logits were seen
    smoothing: float = 0.0
    sketch: Tensor | None = None
    row_hashes: list[int] = field(default_factory=list[int])
    row_tokens: list[int] = field(default_factory=list[int])  # without padding; empty if unknown
    num_positions: int = 0  # tokens with padding, where row_tokens is known

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
    """The loop that calls the optimizer."""

    library: str = ""  # whose loop it is; "": a loop of the script
    trainer: str = ""  # class of the running trainer, or of Lightning's module
    file: str = ""  # of the script's own line that leads to the step
    line: int = 0
    code: str = ""  # of that line


@dataclass
class UpdateRecord:
    """One optimizer step on one rank, with the microbatches before it."""

    number: int  # from 0
    rank: int
    world: int
    microbatches: list[MicrobatchRecord]
    gradient: Tensor | None = None  # sketch of p.grad before clipping; of this rank's shards if it is sharded
    is_sharded: bool = False
    weights_checksum: int | None = None  # of the parameters; None if they are sharded
    num_clips: int = 0
    collectives: dict[str, list[int]] | None = None  # name → number and bytes; None: not watched
    loop: LoopRecord = field(default_factory=LoopRecord)
    is_compiled: bool = False  # torch.compile runs a part of the model
    scheduler_steps: int | None = None  # until the next update's first forward; None: unknown
    notes: list[str] = field(default_factory=list[str])


@dataclass
class EndRecord:
    """The end of an audit on one rank."""

    rank: int
    is_end_of_run: bool  # False: the audit ended first
    left_over: list[int] = field(default_factory=list[int])  # target tokens of microbatches that were not stepped
    notes: list[str] = field(default_factory=list[str])


@dataclass
class SchedulerRecord:
    """Steps of a scheduler, which follow the optimizer's."""

    number: int
    rank: int
    steps: int


Record = UpdateRecord | SchedulerRecord | EndRecord
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (UpdateRecord, SchedulerRecord, EndRecord, MicrobatchRecord)
}


def write_line(record: Record) -> str:
    """Return a record as one line of JSON."""
    return json.dumps({"kind": type(record).__name__, **asdict(record)}, default=_encode)


def read_lines(lines: Iterable[str]) -> list[Record]:
    """Return the records of lines. Raises `MegabatchError` for a line that is none; the last may be cut off."""
    texts = [line for line in lines if line.strip()]
    records: list[Record] = []
    for number, text in enumerate(texts):
        try:
            records.append(_record_of(json.loads(text)))
        except (ValueError, KeyError, TypeError, AttributeError):
            if number < len(texts) - 1:
                raise MegabatchError(
                    f"line {number + 1} is not of an audit: {text[:60]!r}; give a folder that megabatch audit wrote"
                ) from None
    return records


def _record_of(values: dict[str, Any]) -> Any:
    kind = _KINDS[values.pop("kind")]
    for microbatch in values.get("microbatches", ()):
        _decode(microbatch)
    _decode(values)
    if "loop" in values:
        values["loop"] = LoopRecord(**values["loop"])
    if "microbatches" in values:
        values["microbatches"] = [MicrobatchRecord(**microbatch) for microbatch in values["microbatches"]]
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})


def _encode(tensor: Tensor) -> dict[str, str]:
    values = tensor.detach().cpu().numpy()
    return {"dtype": str(values.dtype), "base64": base64.b64encode(values.tobytes()).decode()}


def _decode(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, dict) and "base64" in value:
            read = np.frombuffer(base64.b64decode(value["base64"]), dtype=value["dtype"])
            values[name] = torch.from_numpy(read.copy())

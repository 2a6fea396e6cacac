"""cuts.jsonl: how each update was split into microbatches; manifest.jsonl: its samples, to compare two runs."""

import hashlib
import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megabatch import Plan
from megabatch.batching import Deferred
from megabatch.train.context import Callback, RunContext
from megabatch.train.model.keyed_dropout import KEY as DROPOUT_KEY
from megabatch.train.runtime.files import CLOSE, CUTS, MANIFEST, Row
from megabatch.train.runtime.oom_limit import report_split
from megabatch.train.runtime.ranks import Ranks

MOST_RANKS, MOST_MICROBATCHES = 16, 64  # of an update in a line, which counts those that it leaves out
Cut = list[list[int]]  # of a data rank: its microbatches' samples, their real tokens, their padding

BYTES = 20  # of a hash


class MicrobatchLog(Callback):
    """Write a line for every update, with the microbatches of all data ranks. Collective."""

    def __init__(self, context: RunContext) -> None:
        self._file = context.open_log(CUTS)
        self._is_alone, self._dp_rank = context.ranks.size == 1, context.ranks.dp_rank

    def after_update(self, context: RunContext) -> None:
        """Add the line. On several ranks this sends some hundred bytes a rank."""
        plan = context.plan
        own = (self._dp_rank, len(plan.microbatches), cut_of(plan) if self._dp_rank < MOST_RANKS else [])
        told = [own] if self._is_alone else context.ranks.gather(own)
        if self._file.is_enabled:
            self._file.pending.append(f"{json.dumps(row_of(context.learner.step, told))}\n")
        if "num_split" in context.row:
            limit = context.learner.gradient.oom_limit
            context.console.say(report_split(context.config.run, plan, limit, context.ranks))


def cut_of(plan: Plan) -> Cut:
    """Return samples, real tokens and padding of this rank's first 64 microbatches; zeros of dummy microbatches."""
    rows_of = plan.microbatches[:MOST_MICROBATCHES]
    real = [sum(plan.lengths[row] for row in rows) for rows in rows_of]
    padding = [whole - own for whole, own in zip(plan.microbatch_tokens, real, strict=False)]
    return [[len(rows) for rows in rows_of], real, padding]


def row_of(step: int, told: list[tuple[int, int, Cut]]) -> Row:
    """Return the line of an update. Ranks along cp, tp and pp have the same samples and count once."""
    ranks = {rank: (number, cut) for rank, number, cut in told}
    cut = [ranks[rank][1] for rank in sorted(ranks)[:MOST_RANKS]]
    left_out = sum(number for number, _ in ranks.values()) - sum(len(samples) for samples, *_ in cut)
    return {"step": step, "cut": cut} | ({"microbatches_left_out": left_out} if left_out else {})


class Manifest(Callback):
    """Write a line for every update. Samples that were left out of it count too. Collective."""

    def __init__(self, context: RunContext) -> None:
        self._file = context.open_log(MANIFEST)
        self._file.has_every_update = True
        self._hashes: dict[int, int] = {}  # of the samples of a `Deferred` batch that are loaded, by their index

    def before_update(self, context: RunContext) -> None:
        """Hash the samples of a `Deferred` batch where they are loaded."""
        if isinstance(context.batch, Deferred):
            self._hashes = {}
            context.batch = noting_hashes(context.batch, self._hashes)

    def after_update(self, context: RunContext) -> None:
        """Add the line of the update."""
        batch = context.batch
        if isinstance(batch, Deferred):
            for index in set(range(len(batch))) - self._hashes.keys():  # left out of the update
                batch[index]
            own = sum(self._hashes.values())
        else:
            own = sum_of_hashes(batch)
        samples = sum_over_ranks(own, context.ranks)
        numbers = {key: context.row[key] for key in ("num_samples", "weight", "lr", *CLOSE)}
        self._file.append({"step": context.step, "samples": samples, **numbers})


def noting_hashes(batch: Deferred, hashes: dict[int, int]) -> Deferred:
    """Return the batch. The first load of each sample puts its hash into ``hashes``."""

    def load(index: int) -> Any:
        sample = batch[index]
        if index not in hashes:
            hashes[index] = sum_of_hashes([sample])
        return sample

    return Deferred(load, batch.lengths, batch.weights, look_ahead=batch.look_ahead, measured=batch.measured)


def sum_over_ranks(own: int, ranks: Ranks) -> str:
    """Return one hash of the content of the update's samples: the same on any number of ranks, in any order."""
    told = ranks.gather((ranks.dp_rank, own))
    total = sum(dict(told).values()) % 2 ** (8 * BYTES)  # ranks along cp, tp and pp have the same samples
    return f"{total:0{2 * BYTES}x}"


def sum_of_hashes(batch: Sequence[Any]) -> int:
    """Return the sum of the hashes of the samples, which has no order."""
    return sum(int.from_bytes(hash_sample(sample), "big") for sample in batch)


def hash_sample(sample: Mapping[str, Any]) -> bytes:
    """Return a hash of every value of a sample under its key, of tensors with type and shape; not of its name."""
    content = hashlib.sha256()
    for key in sorted(sample.keys() - {DROPOUT_KEY}):
        value = sample[key]
        if isinstance(value, Tensor):
            value = value.detach().cpu().contiguous()
            content.update(repr((key, str(value.dtype), tuple(value.shape))).encode())
            content.update(value.view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
        else:
            content.update(repr(key).encode() + pickle.dumps(value))
    return content.digest()[:BYTES]

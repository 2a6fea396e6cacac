"""Cutting: a set of samples into the microbatches of an evaluation."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from megabatch import Plan, plan
from megabatch.batching import sample_length
from megabatch.train.config import UpdateConfig
from megabatch.train.runtime.ranks import Ranks

MOST_LOGITS = 2**28  # of a microbatch: half a GiB in bfloat16, two and a half with what is computed of them


def cut(
    samples: Sequence[Any], update: UpdateConfig, ranks: Ranks, chosen_tokens: int | None, most: int | None = None
) -> Plan:
    """This rank's microbatches of a set, as many as any other's; under a pipeline all are filled up to one shape.

    ``most``: tokens of a microbatch, or one sample, at most.
    """
    lengths, rows, tokens = lengths_of(samples, update), update.micro_batch_size, update.max_microbatch_tokens
    if tokens == "auto":
        rows, tokens = (1, None) if chosen_tokens is None else (None, chosen_tokens)  # None: nothing to train on
        lengths = [min(each, tokens or each) for each in lengths]
    if most is not None and tokens is not None:
        tokens = min(tokens, most)
        lengths = [min(each, tokens) for each in lengths]
    if most is not None and rows is not None:
        rows = min(rows, max(1, most // max(1, *lengths)))
    if ranks.layout.pp > 1 and tokens is not None:
        plan(lengths, max_microbatch_tokens=tokens)  # refuses a sample that is longer
        rows, tokens = tokens // max(1, *lengths, 1), None
    plans = plan(lengths, dp_degree=ranks.dp_degree, micro_batch_size=rows, max_microbatch_tokens=tokens)
    return plans[ranks.dp_rank]


def most_tokens(model: nn.Module) -> int | None:
    """Tokens of which a model makes all logits at once, which training does not; None: it has no vocabulary."""
    config = next((each.config for each in model.modules() if isinstance(each, PreTrainedModel)), None)
    num_classes = None if config is None else getattr(config.get_text_config(), "vocab_size", None)
    return max(1, MOST_LOGITS // num_classes) if isinstance(num_classes, int) and num_classes > 0 else None


def lengths_of(samples: Sequence[Any], update: UpdateConfig) -> list[int]:
    """Tokens of each sample, by which the set is cut; 1 each where only samples are counted and are not at hand."""
    known = getattr(samples, "lengths", None)
    if known is not None:
        return [int(length) for length in known]
    if update.max_microbatch_tokens is None and not isinstance(samples, list):
        return [1] * len(samples)
    return [sample_length(sample) for sample in samples]

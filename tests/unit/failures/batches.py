"""Batches of the wrong kind."""

import torch

from megabatch.batching.deferred import Deferred
from tests.unit.failures.table import SAMPLES, Failure, update

ONE, TWO = torch.ones(1, dtype=torch.float64), torch.ones(2, dtype=torch.float64)

KIND = "is a {}"
SAMPLE = "sample is {}"
WEIGHT = "sample 1 is"
KEYS = "['x'] … ['x', 'y']"


def deferred(*samples: dict[str, torch.Tensor]) -> Deferred:
    """Samples whose keys and shapes are known when they are loaded, so that the plan cannot keep them apart."""
    return Deferred(samples.__getitem__, [1] * len(samples))


BATCHES = {
    "a number": (3, KIND.format("int")),
    "nothing": (None, KIND.format("NoneType")),
    "a tensor": (ONE, KIND.format("Tensor")),
    "a string": ("text", KIND.format("str")),
    "an iterator": (iter(SAMPLES), KIND.format("list_iterator")),
    "a mapping without tensors": ({}, "mapping without tensors"),
    "a mapping of lists": ({"x": [1.0, 2.0]}, "'x'"),
    "a mapping with a scalar": ({"x": torch.tensor(1.0)}, "'x'"),
    "tensors of different sizes": ({"x": ONE, "y": TWO}, "dim 0 … 'x' … 1 … 'y' … 2"),
    "samples that are tensors": ([ONE, ONE], SAMPLE.format("a Tensor")),
    "samples without tensors": ([{}], SAMPLE.format("empty")),
    "samples of words": ([{"x": "one"}], "'x'"),
    "types that differ": ([{"x": ONE}, {"x": ONE.long()}], "'x' … ['torch.float64', 'torch.int64']"),
    "keys that differ": (deferred({"x": ONE}, {"x": ONE, "y": ONE}), KEYS),
    "other dims that differ": (deferred({"x": torch.ones(1, 2)}, {"x": torch.ones(1, 3)}), "'x' … [(1, 2), (1, 3)]"),
    "numbers of dims that differ": (deferred({"x": torch.ones(1, 2)}, {"x": torch.ones(1)}), "'x' … [(1,), (1, 2)]"),
    "a deferred sample longer than told": (
        Deferred(lambda index: {"x": TWO}, [1]),
        "sample 0 of … has 2 tokens … says 1",
    ),
    "deferred samples with a weight too many": (
        Deferred(SAMPLES.__getitem__, [1], [1, 1]),
        "has 1 lengths … and 2 weights",
    ),
    "a deferred sample of a negative weight": (Deferred(SAMPLES.__getitem__, [1, 1], [1, -1]), WEIGHT.format("-1")),
    "a deferred sample of no weight": (Deferred(SAMPLES.__getitem__, [1, 1], [1, None]), WEIGHT.format("None")),
    "a look-ahead that is no count": (Deferred(SAMPLES.__getitem__, [1], look_ahead=-1), "look_ahead … is -1"),
    "a deferred length that is no count": (Deferred(SAMPLES.__getitem__, [1.5]), "sample 0 is … 1.5"),
}

FAILURES = {name: Failure(text, lambda batch=batch: update(batch=batch)) for name, (batch, text) in BATCHES.items()}

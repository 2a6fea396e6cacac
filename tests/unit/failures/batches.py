"""Batches of the wrong kind."""

import torch

from megabatch import PlanError
from megabatch.batching.samples import Deferred
from tests.unit.failures.table import SAMPLES, Failure, update

ONE, TWO = torch.ones(1, dtype=torch.float64), torch.ones(2, dtype=torch.float64)

KIND = "the batch is a {}; expected a mapping of tensors with samples in dim 0, or a list of samples"
SAMPLE = "a sample is {}; expected a mapping of tensors. Give such mappings, or say collate= and length= of your own"
WEIGHT = "the weight of sample 1 is {}; expected a finite number, not negative"
KEYS = "samples of one batch have the keys ['x'] and ['x', 'y']; give all the same"

BATCHES = {
    "a number": (3, KIND.format("int")),
    "nothing": (None, KIND.format("NoneType")),
    "a tensor": (ONE, KIND.format("Tensor")),
    "a string": ("text", KIND.format("str")),
    "an iterator": (iter(SAMPLES), KIND.format("list_iterator")),
    "a mapping without tensors": (
        {}, "the batch is a mapping without tensors; expected samples in dim 0 of each. For no samples give []",
    ),
    "a mapping of lists": (
        {"x": [1.0, 2.0]}, "'x' of the batch is a list; expected a tensor with samples in dim 0",
    ),
    "a mapping with a scalar": (
        {"x": torch.tensor(1.0)}, "'x' of the batch is a scalar; expected a tensor with samples in dim 0",
    ),
    "tensors of different sizes": (
        {"x": ONE, "y": TWO},
        "the tensors of the batch differ in dim 0: {'x': 1, 'y': 2}; expected one row per sample in each",
    ),
    "samples that are tensors": ([ONE, ONE], SAMPLE.format("a Tensor")),
    "samples without tensors": ([{}], SAMPLE.format("empty")),
    "samples of words": (
        [{"x": "one"}], "'x' of a sample is a str; expected a tensor, or numbers",
    ),
    "types that differ": (
        [{"x": ONE}, {"x": ONE.long()}], "'x' has the types ['torch.float64', 'torch.int64']; give one to all samples",
    ),
    "keys that differ": ([{"x": ONE}, {"x": ONE, "y": ONE}], KEYS),
    "other dims that differ": (
        [{"x": torch.ones(1, 2)}, {"x": torch.ones(1, 3)}],
        "'x' has the shapes [(1, 2), (1, 3)]; only dim 0 is padded, the others must agree",
    ),
    "numbers of dims that differ": (
        [{"x": torch.ones(1, 2)}, {"x": torch.ones(2)}],
        "'x' has the shapes [(1, 2), (2,)]; only dim 0 is padded, the others must agree",
    ),
    "a deferred sample longer than told": (
        Deferred(lambda index: {"x": TWO}, [1]),
        "sample 0 of Deferred has 2 tokens, but lengths says 1; "
        "give the length that is counted when the sample is loaded, or measured=False",
    ),
    "deferred samples with a weight too many": (
        Deferred(SAMPLES.__getitem__, [1], [1, 1]),
        "Deferred has 1 lengths and 2 weights; give one of each per sample",
    ),
    "a deferred sample of a negative weight": (Deferred(SAMPLES.__getitem__, [1, 1], [1, -1]), WEIGHT.format("-1")),
    "a deferred sample of no weight": (Deferred(SAMPLES.__getitem__, [1, 1], [1, None]), WEIGHT.format("None")),
    "a look-ahead that is no count": (
        Deferred(SAMPLES.__getitem__, [1], look_ahead=-1),
        "look_ahead is -1; it counts things and must be a whole number of at least 0",
    ),
    "a deferred length that is no count": (
        Deferred(SAMPLES.__getitem__, [1.5]),
        "the length of sample 0 is 1.5; it counts things and must be a whole number of at least 0",
    ),
}  # fmt: skip

FAILURES = {
    name: Failure(PlanError, text, lambda batch=batch: update(batch=batch)) for name, (batch, text) in BATCHES.items()
}

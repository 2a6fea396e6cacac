"""Models that other libraries have prepared, and that are not refused."""

import copy

import pytest
import torch
from torch import nn

from megabatch import GradientAccumulator, losses, verify
from tests.exact import models
from tests.exact.foreign import accelerator, errors, samples
from tests.unit.failures.table import SAMPLES, squares


def test_a_layer_of_such_a_library_is_not():
    """A norm of apex, say: a module that wraps none."""
    layer = type("FusedLayerNorm", (nn.Linear,), {"__module__": "apex.normalization"})(1, 1).double()
    gradient = GradientAccumulator(nn.Sequential(layer), micro_batch_size=1)
    gradient.forward_backward(SAMPLES, squares)
    assert gradient.finalize().finite


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 4), ("bf16", 2)])
def test_a_model_prepared_by_accelerate_is_exact(precision, tolerance):
    kind, error, own_error = errors(precision)
    assert kind == "GPT2LMHeadModel"
    assert 0 < error <= tolerance * own_error


def test_a_model_prepared_by_accelerate_is_verified():
    """Its forward is a method that was put on it: the copy's must be the copy's."""
    with accelerator(mixed_precision="bf16") as made:
        model = made.prepare(models.gpt2(torch.float32))
        found = verify(model, losses.next_token, [sample for share in samples() for sample in share])
        assert found.ok, str(found)
        assert copy.deepcopy(model).forward.__self__ is not model
        assert all(parameter.grad is None for parameter in model.parameters())

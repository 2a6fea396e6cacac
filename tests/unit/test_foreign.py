"""Models that other libraries have prepared: what is refused, and Accelerate's, which are not."""

import copy
import re

import pytest
import torch
from torch import nn

from megabatch import GradientAccumulator, PlanError, losses, verify
from tests.exact import models
from tests.exact.foreign import accelerator, errors, samples
from tests.unit.failures.table import SAMPLES, linear, squares

DEEPSPEED = (
    "DeepSpeed reduces gradients and divides them by its own gradient_accumulation_steps; give a model that "
    "deepspeed.initialize has not seen, wrapped with fully_shard or DistributedDataParallel"
)
APEX = "apex reduces gradients in every backward; give the model that it wraps, in torch's DistributedDataParallel"


def of_library(module: str, name: str, *, own: bool = False) -> nn.Module:
    """A wrapper as that library's is seen from outside, or a class of one's own upon it.

    Neither library is installed for the tests; what DeepSpeed's engine is and leaves was read from a real one.
    """
    kind = type(name, (nn.Module,), {"__module__": module})
    wrapper = (type("Own", (kind,), {"__module__": "own"}) if own else kind)()
    wrapper.module = linear()
    return wrapper


def with_hook_of(module: str, on_parameter: bool) -> nn.Module:
    """What DeepSpeed leaves on the model inside of its engine, with ZeRO and without."""

    def hook(*_: object) -> None:
        pass

    hook.__module__ = module
    model = nn.Sequential(linear(), linear())
    if on_parameter:
        model[1].weight.register_post_accumulate_grad_hook(hook)
    else:
        model.register_forward_pre_hook(hook)
    return model


ENGINE = "deepspeed.runtime.engine"
REFUSED = {
    "an engine": (
        lambda: of_library(ENGINE, "DeepSpeedEngine"), f"the model is a DeepSpeedEngine of deepspeed; {DEEPSPEED}",
    ),
    "a subclass of an engine": (
        lambda: of_library(ENGINE, "DeepSpeedEngine", own=True),
        f"the model is a DeepSpeedEngine of deepspeed; {DEEPSPEED}",
    ),
    "the model of an engine": (
        lambda: with_hook_of(ENGINE, on_parameter=False), f"the model has hooks of deepspeed; {DEEPSPEED}",
    ),
    "the model of an engine with ZeRO": (
        lambda: with_hook_of("deepspeed.utils.nvtx", on_parameter=True),
        f"module '1' has hooks of deepspeed; {DEEPSPEED}",
    ),
    "inside of another": (
        lambda: nn.Sequential(of_library("apex.parallel.distributed", "DistributedDataParallel")),
        f"module '0' is a DistributedDataParallel of apex; {APEX}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_reduces_by_itself_is_refused(name):
    make, said = REFUSED[name]
    with pytest.raises(PlanError, match=f"^{re.escape(said)}$"):
        GradientAccumulator(make(), micro_batch_size=1)


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


def test_the_optimizer_of_accelerate_steps():
    """Also with gradient accumulation of its own, which only ``accelerator.accumulate`` starts."""
    with accelerator(gradient_accumulation_steps=4) as made:
        model = linear()
        model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        gradient, reference = GradientAccumulator(model, micro_batch_size=1), linear()
        gradient.forward_backward(SAMPLES, squares)
        gradient.finalize()
        optimizer.step()
        total, weight = squares(reference, {"x": torch.stack([each["x"] for each in SAMPLES])})
        (total / weight).backward()
        for found, before in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(found, before - 0.1 * before.grad, rtol=1e-14)

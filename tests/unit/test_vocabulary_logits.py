"""Where somebody may look at logits, or they cannot be summed in chunks, they stay."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from megabatch import LossContractError, losses
from megabatch.losses import ready_made
from tests.unit.heads import B, T, V, causal, compare, error, gradients, microbatch, plain, summed


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Eight positions at once."""
    monkeypatch.setattr(ready_made, "MIN_CHUNK_LOGITS", V)


def ways_to_see_logits():
    def hooked(module_of):
        def change(model):
            module_of(model).register_forward_hook(lambda *_: None)
            return model

        return change

    def replaced(model):
        model.lm_head.forward = model.lm_head.forward
        return model

    def subclassed(model):
        model.__class__ = type("Mine", (type(model),), {})
        return model

    def other_head(model):
        model.lm_head.__class__ = type("Mine", (nn.Linear,), {})
        return model

    def backward_hook(model):
        model.lm_head.register_full_backward_hook(lambda *_: None)
        return model

    def compiled(model):
        model.compile(backend="eager")
        model._compiled_call_impl = model._call_impl  # what it is called by, without a compiler
        return model

    return {
        "a hook of the head": hooked(lambda model: model.lm_head), "a hook of the model": hooked(lambda model: model),
        "a forward of one's own": replaced, "a class of one's own": subclassed, "a head of one's own": other_head,
        "a backward hook": backward_hook, "a compiled model": compiled, "no module": lambda model: model.__call__,
    }  # fmt: skip


@pytest.mark.parametrize("way", ways_to_see_logits())
def test_logits_stay_where_someone_may_look(way):
    model, batch = causal("gpt2"), microbatch()
    expected = gradients(model, plain(model, batch))
    changed = ways_to_see_logits()[way](model)
    assert error(gradients(model, summed(changed, batch, fused=False)), expected) == 0


def test_few_positions_have_logits(monkeypatch):
    monkeypatch.setattr(ready_made, "MIN_CHUNK_LOGITS", V * (B * T + 1))
    compare(causal("gpt2"), microbatch(), 0.0, fused=False)


def test_a_hook_before_the_model_is_no_hindrance():
    model = causal("gpt2")
    model.register_forward_pre_hook(lambda *_: None)
    compare(model, microbatch())


def test_kept_logits_are_logits():
    """A model that is asked for fewer gives them, and they are not those of the labels."""
    model, batch = causal("gpt2"), microbatch()
    with pytest.raises(LossContractError, match=r"wants \[B, T, V\]"):
        losses.next_token(model, batch | {"logits_to_keep": 3})


@pytest.mark.usefixtures("group_of_one")
def test_a_weight_that_is_split_has_logits():
    model, batch = causal("gpt2", tie_word_embeddings=False), microbatch()
    expected = plain(model, batch).detach()
    mesh, weight = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), model.lm_head.weight.detach()
    model.lm_head.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    with implicit_replication():
        assert float(summed(model, batch, fused=False).detach().full_tensor()) == pytest.approx(float(expected))


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(("dtype", "fused"), [(None, True), (torch.float64, True), (torch.float32, False)])
def test_an_output_that_fsdp2_rounds_is_logits(dtype, fused):
    model, mesh = causal("gpt2"), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=dtype))
    batch = microbatch()
    expected = plain(model, batch).detach()
    assert float(summed(model, batch, fused=fused).detach()) == pytest.approx(float(expected), rel=1e-14)

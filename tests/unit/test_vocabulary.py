"""The head's summed cross-entropy against plain torch, family by family."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megabatch import GradientAccumulator, losses, verify
from megabatch.autotune.memory import measure_memory
from megabatch.losses import chunked_cross_entropy, ready_made
from megabatch.losses.chunked_cross_entropy import cross_entropy_sum
from megabatch.verification.float64_copy import Float64WithoutDropout
from tests.exact.spikes import Spikes
from tests.unit.heads import (
    KNOWN,
    TOUCHING,
    B,
    D,
    Sizes,
    T,
    V,
    causal,
    compare,
    error,
    gradients,
    microbatch,
    plain,
    summed,
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Eight positions at once."""
    monkeypatch.setattr(ready_made, "MIN_CHUNK_LOGITS", V)


@pytest.mark.parametrize("family", KNOWN)
def test_a_family_gives_the_same_gradient_without_logits(family):
    with Float64WithoutDropout():  # norms and routers of transformers round to float32
        compare(causal(family), microbatch())


@pytest.mark.parametrize("family", TOUCHING)
def test_a_family_that_touches_logits_keeps_them(family):
    model = causal(family)
    compare(model, microbatch(), 1e-6, fused=False)
    logits = model(input_ids=microbatch()["input_ids"])
    hidden = model.model(input_ids=microbatch()["input_ids"]).last_hidden_state
    assert not torch.allclose(logits.logits, model.lm_head(hidden))  # or this would prove nothing


@pytest.mark.parametrize(
    "changes", [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}, {"use_cache": False}]
)
def test_tied_or_not(changes):
    compare(causal("gpt2", **changes), microbatch())


def test_float32():
    compare(causal(dtype=torch.float32), microbatch(), 3e-6)


def test_a_bias_of_the_head():
    model = causal("phi")
    assert model.lm_head.bias is not None
    compare(model, microbatch())


def test_shift_labels():
    batch = microbatch()
    shifted = {"input_ids": batch["input_ids"], "shift_labels": F.pad(batch["labels"][:, 1:], (0, 1), value=-100)}
    model = causal("gpt2")
    expected = gradients(model, plain(model, batch))
    assert error(gradients(model, summed(model, shifted)), expected) <= 1e-12


def test_no_target_gives_zero_with_a_graph_to_every_parameter():
    model, batch = causal("gpt2"), microbatch()
    batch["labels"][:] = -100
    total = summed(model, batch)
    assert float(total.detach()) == 0
    found = gradients(model, total)
    assert all(each is not None and not each.any() for each in found.values())


@pytest.mark.parametrize("frozen", ["lm_head", "transformer", "lm_head.and.wte"])
def test_frozen_parts(frozen):
    model = causal("gpt2", tie_word_embeddings=False)
    for name, each in model.named_parameters():
        each.requires_grad_(not any(name.startswith(part) for part in (frozen, frozen.replace("lm_head.and.wte", "l"))))
    compare(model, microbatch())


def test_without_gradients():
    model, batch = causal("gpt2"), microbatch()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            total = summed(model, batch)
        assert not total.requires_grad
        assert float(total) == pytest.approx(float(plain(model, batch).detach()), rel=1e-14)


@pytest.mark.parametrize("grad", [False, True])
def test_no_gradient_is_made_that_nobody_wants(grad):
    hidden, weight = torch.zeros(B, T, D), torch.zeros(V, D, requires_grad=True)
    with torch.set_grad_enabled(grad), Sizes() as sizes:
        cross_entropy_sum(hidden, weight, None, microbatch()["labels"])
    assert (V * D in sizes.seen) is grad
    assert B * T * D not in sizes.seen


def test_a_graph_that_is_kept_gives_its_gradient_again():
    model, batch = causal("gpt2"), microbatch()
    expected = gradients(model, plain(model, batch), 0.37)
    total = summed(model, batch)
    parameters = dict(model.named_parameters())
    for factor in (0.5, 0.37):
        found = torch.autograd.grad(total * factor, list(parameters.values()), retain_graph=True)
    assert error(dict(zip(parameters, found, strict=True)), expected) <= 1e-12


@pytest.mark.parametrize("wanted", ["lm_head.weight", "transformer.h.0.mlp.c_fc.weight"])
def test_the_gradient_of_some_parameters_alone(wanted):
    model, batch = causal("gpt2", tie_word_embeddings=False), microbatch()
    expected = gradients(model, plain(model, batch))[wanted]
    model.zero_grad()
    summed(model, batch).backward(inputs=[model.get_parameter(wanted)])
    assert error({wanted: model.get_parameter(wanted).grad}, {wanted: expected}) <= 1e-12
    assert sum(each.grad is not None for each in model.parameters()) == 1


def test_gradients_add_up():
    model, batch = causal("gpt2"), microbatch()
    expected = gradients(model, plain(model, batch) * 3)
    model.zero_grad()
    for factor in (1, 2):
        (summed(model, batch) * factor).backward()
    assert error({name: each.grad for name, each in model.named_parameters()}, expected) <= 1e-12


def truth(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor | None]:
    double = copy.deepcopy(model).double()
    return gradients(double, plain(double, batch), 0.37)


@pytest.mark.parametrize("tokens_at_once", [1, 8])
@pytest.mark.parametrize("family", ["gpt2", "llama", "phi"])
def test_bfloat16_is_no_coarser_than_logits_would_be(family, tokens_at_once, monkeypatch):
    monkeypatch.setattr(ready_made, "chunk_tokens", lambda *_: tokens_at_once)
    model, batch = causal(family, torch.bfloat16), microbatch()
    exact = truth(model, batch)
    head = [name for name in exact if name.startswith("lm_head")]
    of_plain = gradients(model, plain(model, batch), 0.37)
    total = summed(model, batch)
    assert total.dtype == torch.float32
    found = gradients(model, total, 0.37)
    assert {each.dtype for each in found.values()} == {torch.bfloat16}
    assert error(found, exact) <= 2 * error(of_plain, exact)
    for name in head:  # as fine as it can be said
        assert error({name: found[name]}, {name: exact[name]}) <= 1.5 * error(
            {name: of_plain[name]}, {name: exact[name]}
        )


def test_the_softmax_is_no_coarser_than_float32():
    """Of logits that bfloat16 holds."""
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randint(-1, 2, shape, generator=generator).double() for shape in ((B, T, D), (V, D)))
    targets = microbatch()["labels"][:, 1:]
    exact = F.cross_entropy((hidden[:, :-1] @ weight.T).flatten(0, 1), targets.flatten(), reduction="sum")
    total = cross_entropy_sum(hidden.bfloat16(), weight.bfloat16(), None, targets)
    assert float(total) == pytest.approx(float(exact), rel=1e-6)


@pytest.mark.parametrize("norm", ["in float32", "in bfloat16"])
def test_autocast_multiplies_in_its_dtype(norm):
    model, batch = causal("gpt2", torch.float32), microbatch()
    exact = truth(model, batch)
    if norm == "in bfloat16":  # so that hidden states are of another dtype than the weight
        model.transformer.ln_f.register_forward_hook(lambda _module, _given, hidden: hidden.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        of_plain = gradients(model, plain(model, batch), 0.37)
        total = summed(model, batch)
    found = gradients(model, total, 0.37)
    assert total.dtype == torch.float32
    assert error(found, exact) <= 2 * error(of_plain, exact)
    hidden, weight = torch.randn(B, T, D), torch.randn(V, D)
    with torch.autocast("cpu", torch.bfloat16):
        total = cross_entropy_sum(hidden, weight, None, batch["labels"][:, 1:])
    assert total == cross_entropy_sum(hidden.bfloat16(), weight.bfloat16(), None, batch["labels"][:, 1:])
    assert total != cross_entropy_sum(hidden, weight, None, batch["labels"][:, 1:])


def test_the_model_is_left_as_it_was():
    model, batch = causal("gpt2"), microbatch()
    before = model.lm_head.__dict__.keys()
    summed(model, batch)
    with pytest.raises(IndexError):
        losses.next_token(model, batch | {"input_ids": torch.full((B, T), V)})  # no such token
    with pytest.raises(RuntimeError, match="out of bounds"):
        losses.next_token(model, batch | {"labels": torch.full((B, T), V)})
    assert model.lm_head.__dict__.keys() == before
    assert "forward" not in vars(model.lm_head)
    assert not model._forward_hooks
    assert model(input_ids=batch["input_ids"]).logits.shape == (B, T, V)


def test_nothing_is_kept():
    model = causal("gpt2")
    total = losses.next_token(model, microbatch()).total
    kept = weakref.ref(total.grad_fn)
    gc.disable()
    try:
        del total
        assert kept() is None
    finally:
        gc.enable()


def test_verify():
    samples = [{name: each[row] for name, each in microbatch(5).items()} for row in range(5)]
    assert verify(causal("llama", torch.float32), losses.next_token, samples, micro_batch_size=3).ok


def test_a_microbatch_that_does_not_fit_runs_again_in_parts():
    model, batch = causal("gpt2"), microbatch(16)
    expected = gradients(model, plain(model, batch) / int((batch["labels"][:, 1:] != -100).sum()))
    gradient = GradientAccumulator(model, micro_batch_size=8)
    Spikes(model, ("transformer.h.0",)).set({1: ("backward", 0)})
    gradient.forward_backward(batch, losses.next_token)
    gradient.finalize()
    assert gradient.last_plan.num_microbatches > 2
    assert error({name: each.grad for name, each in model.named_parameters()}, expected) <= 1e-12


def test_a_simulation_looks_at_no_data():
    """And no device is waited for: how many targets there are is not asked."""
    with FakeTensorMode():
        hidden, weight = torch.zeros(B, T, D, requires_grad=True), torch.zeros(V, D, requires_grad=True)
        cross_entropy_sum(hidden, weight, None, torch.zeros(B, T - 1, dtype=torch.long)).backward()
    assert hidden.grad.shape == hidden.shape
    assert weight.grad.shape == weight.shape


def test_all_positions_in_their_turn_are_the_same(monkeypatch):
    """As on a device: positions without a target give nothing."""

    def every(labels: Tensor, size: int):
        return (slice(start, start + size) for start in range(0, len(labels), size))

    monkeypatch.setattr(chunked_cross_entropy, "_chunks", every)
    compare(causal("phi"), microbatch())


@pytest.mark.parametrize("positions", [341, 511])  # a chunk has 256; below 342 there are all logits
def test_fewer_positions_need_no_more_memory(positions, monkeypatch):
    """A bound on memory, found for large microbatches, is one for small ones too."""
    monkeypatch.setattr(ready_made, "MIN_CHUNK_LOGITS", 0)
    wide = {"vocab_size": 4096, "hidden_size": 512, "max_position_embeddings": 512, "n_positions": 512}
    model = causal("gpt2", torch.float32, **wide)
    ids = torch.zeros(1, positions, dtype=torch.long)
    needed = []
    for batch in ({"input_ids": each, "labels": each} for each in (ids[:, :1], ids, F.pad(ids, (0, 1)))):
        with measure_memory(torch.device("cpu")) as found:
            losses.next_token(model, batch).total.backward()
        needed.append(found.peak_bytes)
    assert needed[1] <= 1.02 * needed[2]

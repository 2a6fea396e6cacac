"""The head's summed cross-entropy against plain torch, family by family, and where logits stay."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from megabatch import GradientAccumulator, LossContractError, losses
from megabatch.autotune.memory import measure_memory
from megabatch.losses import chunked_cross_entropy, token_loss
from megabatch.losses.chunked_cross_entropy import FAMILIES, cross_entropy_sum
from megabatch.verification.float64_copy import Float64WithoutDropout
from tests.exact.spikes import Spikes

V, D, B, T = 97, 16, 4, 11
SIZES = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
MORE = {
    "gemma": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "qwen3": {"head_dim": 8},
    "gpt2": {"n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "seed_oss": {"head_dim": 8, "residual_dropout": 0.0},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": D, "dropout": 0.0, "pad_token_id": 1},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"},
    "qwen2_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
                  "shared_expert_intermediate_size": 8, "experts_implementation": "eager"},
    "qwen3_moe": {"head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
                  "experts_implementation": "eager"},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
    "gemma2": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8, "head_dim": 8},
}  # fmt: skip
DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
KNOWN = sorted(name.split(".")[2] for name in FAMILIES)
TOUCHING = ("cohere", "gemma2", "granite")  # logits are scaled or capped after the head


class Sizes(TorchDispatchMode):
    """Count the numbers of the tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    @property
    def had_logits(self) -> bool:
        return max(self.seen) >= B * (T - 1) * V

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.seen.add(result.numel())
        return result


def causal(family: str = "llama", dtype: torch.dtype = torch.float64, **changes) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **DROPOUT, **MORE.get(family, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    for parameter in model.parameters():  # so that no gradient is too small to be compared
        nn.init.normal_(parameter, std=0.3)
    return model


def microbatch(rows: int = B) -> dict[str, Tensor]:
    """Prompts of half the length, padding in one row, and a row without a target."""
    ids = torch.randint(2, V, (rows, T), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, : T // 2] = -100
    labels[0, -2:] = -100
    labels[1] = -100
    return {"input_ids": ids, "labels": labels}


def plain(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """By plain torch."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def gradients(model: nn.Module, total: Tensor, factor: float = 1.0) -> dict[str, Tensor | None]:
    model.zero_grad()
    (total * factor).backward()
    return {name: each.grad for name, each in model.named_parameters()}


def summed(model: nn.Module, batch: dict[str, Tensor], *, fused: bool = True) -> Tensor:
    """`losses.next_token`, and whether it had logits."""
    with Sizes() as sizes:
        total = losses.next_token(model, batch).total
    assert sizes.had_logits is not fused
    return total


def error(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> float:
    """The largest of a parameter, relative to its own size; that of a key's bias is nothing but rounding."""
    assert {name for name in found if found[name] is None} == {name for name in expected if expected[name] is None}
    pairs = [(found[name].double(), each.double()) for name, each in expected.items() if each is not None]
    size = max(float(each.norm()) for _, each in pairs)
    return max(float((a - b).norm()) / max(float(b.norm()), 1e-4 * size, 1e-300) for a, b in pairs)


def compare(model: nn.Module, batch: dict[str, Tensor], tolerance: float = 1e-12, *, fused: bool = True) -> None:
    expected = plain(model, batch)
    of_plain = gradients(model, expected, 0.37)
    total = summed(model, batch, fused=fused)
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=tolerance)
    assert error(gradients(model, total, 0.37), of_plain) <= tolerance


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Eight positions at once."""
    monkeypatch.setattr(token_loss, "MIN_CHUNK_LOGITS", V)


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


def truth(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor | None]:
    double = copy.deepcopy(model).double()
    return gradients(double, plain(double, batch), 0.37)


@pytest.mark.parametrize("tokens_at_once", [1, 8])
@pytest.mark.parametrize("family", ["gpt2", "llama", "phi"])
def test_bfloat16_is_no_coarser_than_logits_would_be(family, tokens_at_once, monkeypatch):
    monkeypatch.setattr(token_loss, "chunk_tokens", lambda *_: tokens_at_once)
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
    """Logits that bfloat16 holds give the same softmax."""
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
    with pytest.raises(LossContractError, match=f"labels are from {V} to {V} and the model has {V} classes"):
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
    monkeypatch.setattr(token_loss, "MIN_CHUNK_LOGITS", 0)
    wide = {"vocab_size": 4096, "hidden_size": 512, "max_position_embeddings": 512, "n_positions": 512}
    model = causal("gpt2", torch.float32, **wide)
    ids = torch.zeros(1, positions, dtype=torch.long)
    needed = []
    for batch in ({"input_ids": each, "labels": each} for each in (ids[:, :1], ids, F.pad(ids, (0, 1)))):
        with measure_memory(torch.device("cpu")) as found:
            losses.next_token(model, batch).total.backward()
        needed.append(found.peak_bytes)
    assert needed[1] <= 1.02 * needed[2]


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
    monkeypatch.setattr(token_loss, "MIN_CHUNK_LOGITS", V * (B * T + 1))
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

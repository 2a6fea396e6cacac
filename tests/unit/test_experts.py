"""The balance of sequences and the biases of experts, on one process and on models of transformers."""

from unittest.mock import ANY, Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megabatch import GradientAccumulator, JointLoss, experts, loss, losses, verify
from megabatch.losses import chunked_cross_entropy, token_loss
from megabatch.planners import Auto
from megabatch.verification.float64_copy import Float64WithoutDropout, float64_copy
from tests.exact import oracle
from tests.exact.experts import EXPERTS, TOP_K, VOCABULARY, balance_of_one, loads, samples, sparse_lm, unbalanced
from tests.unit.failures.experts import bias_of

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip
COEFFICIENT = 0.02
ROUTED = "the total of {!r} has in it a router loss over the batch"


def mixtral(**settings) -> nn.Module:
    torch.manual_seed(0)
    settings = {"num_local_experts": EXPERTS, "output_router_logits": True, "router_aux_loss_coef": 0.5, **settings}
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=1, **settings))


def logits(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def mask(*lengths: int) -> torch.Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()  # [B, T]


def balance(router_logits, attention_mask, **settings) -> torch.Tensor:
    return experts.sequence_balance(router_logits, attention_mask, **{"top_k": TOP_K, "scores": "sigmoid", **settings})


def test_a_balance_is_the_sum_over_sequences_and_layers():
    layers, lengths = [logits(3, 7, EXPERTS), -logits(3, 7, EXPERTS)], (7, 2, 5)
    expected = sum(balance_of_one(each[i, :n]) for each in layers for i, n in enumerate(lengths))
    assert torch.allclose(balance(layers, mask(*lengths)), expected, rtol=1e-14, atol=0)
    flat = tuple(each.flatten(0, 1) for each in layers)  # as transformers has them
    assert torch.equal(balance(flat, mask(*lengths)), balance(layers, mask(*lengths)))


def test_the_balance_of_one_sequence_is_that_of_switch():
    one = logits(1, 9, EXPERTS)
    expected = load_balancing_loss_func((one.flatten(0, 1),), EXPERTS, TOP_K, mask(9))
    assert float(balance(one, mask(9), scores="softmax")) == pytest.approx(float(expected) / TOP_K, rel=1e-6)


@pytest.mark.parametrize("scores", experts.SCORES)
def test_a_balance_is_1_where_the_load_is_even(scores):
    even = 3.0 * torch.eye(EXPERTS).double()[None]  # each expert is the first choice of one token
    assert float(balance(even, mask(EXPERTS), top_k=1, scores=scores)) == pytest.approx(1.0)
    one_for_all = torch.tensor([50.0, -50.0, -50.0, -50.0]).double().expand(1, 6, EXPERTS)
    assert float(balance(one_for_all, mask(6), top_k=1, scores=scores)) == pytest.approx(EXPERTS)


def test_a_sequence_without_tokens_has_no_balance():
    found = logits(2, 5, EXPERTS).requires_grad_()
    both = balance(found, mask(5, 0))
    assert torch.equal(both, balance(found[:1], mask(5)))
    both.backward()
    assert torch.isfinite(found.grad).all()
    assert not found.grad[1].any()


def test_a_balance_of_bfloat16_is_summed_in_float32():
    assert balance(logits(2, 5, EXPERTS).bfloat16(), mask(5, 3)).dtype == torch.float32


def collated(num: int = 4) -> dict[str, torch.Tensor]:
    some = samples(0, num + 1)[:num]  # with targets, each of them
    assert len({len(each["labels"]) for each in some}) > 1
    return oracle.collate(some)


def outputs(model, batch):
    """The model's output, its cross-entropy and its targets."""
    found = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    total = F.cross_entropy(
        found.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    return found, (total, losses.count_targets(batch))


def naive(model, batch):
    found, (total, count) = outputs(model, batch)
    return total + COEFFICIENT * found.aux_loss, count


def the_models_own(model, batch):
    count = losses.count_targets(batch)
    return model(**batch).loss * count, count


def by_hand(model, batch):
    found, (total, count) = outputs(model, batch)
    return total + COEFFICIENT * load_balancing_loss_func(found.router_logits, EXPERTS, TOP_K), count


@loss(weigh=lambda m: {"loss": losses.count_targets(m), "router": m["attention_mask"].sum()})
def named(model, batch):
    found, pair = outputs(model, batch)
    count = batch["attention_mask"].sum()
    return {"loss": pair, "router": (COEFFICIENT * found.aux_loss * count, count)}


@loss(weigh=lambda m: {"loss": losses.count_targets(m), "router": 1})
def named_and_not_counted(model, batch):
    found, pair = outputs(model, batch)
    return {"loss": pair, "router": (COEFFICIENT * found.aux_loss, 1)}


@loss(weigh=lambda m: {"loss": losses.count_targets(m), "balance": len(m["labels"])})
def per_sequence(model, batch):
    found, pair = outputs(model, batch)
    total = experts.sequence_balance(found.router_logits, batch["attention_mask"], top_k=TOP_K)
    return {"loss": pair, "balance": (COEFFICIENT * total, len(batch["labels"]))}


@loss(weigh=per_sequence.weigh)
def mean_with_a_balance(model, batch):
    """A mean of means, beside a term of the routers that is as it should be."""
    terms = per_sequence(model, batch)
    return terms | {"loss": (terms["loss"][0] / terms["loss"][1], terms["loss"][1])}


ROUTER_LOSSES = {"loss": (naive, the_models_own, by_hand), "router": (named, named_and_not_counted)}


@pytest.mark.parametrize(("term", "loss_fn"), [(term, each) for term, found in ROUTER_LOSSES.items() for each in found])
def test_verify_names_a_router_loss(term, loss_fn):
    found = verify(mixtral(), loss_fn, collated())
    assert not found.ok
    assert found.causes[0].startswith(ROUTED.format(term)), found.causes


def test_verify_passes_a_balance_per_sequence():
    found = verify(mixtral(), per_sequence, samples(0, 4), micro_batch_size=3)
    assert found.ok, str(found)


FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss")


def family(model_type: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "pad_token_id": 0}
    widths = {"num_key_value_heads": 1, "head_dim": 8, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    config = AutoConfig.for_model(model_type, **{**SIZES, **sizes, **widths, "initializer_range": 0.5})
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_router_loss_of_one_sequence_is_that_of_transformers(model_type):
    model, ids, keep = family(model_type), torch.arange(1, 8)[None], mask(5, 7)[:1]
    labels = ids.masked_fill(keep == 0, -100)
    expected = model(input_ids=ids, attention_mask=keep, output_router_logits=True)
    with_loss = model(input_ids=ids, attention_mask=keep, labels=labels, output_router_logits=True)
    terms = experts.next_token_with_balance()(model, {"input_ids": ids, "attention_mask": keep, "labels": labels})
    coefficient = model.config.router_aux_loss_coef
    assert coefficient > 0
    assert float(terms["balance"].total) == pytest.approx(float(coefficient * expected.aux_loss), rel=1e-6)
    mean = terms["next_token"].total / terms["next_token"].weight + terms["balance"].total
    assert float(mean) == pytest.approx(float(with_loss.loss), rel=1e-6)
    assert terms["balance"].weight == 1


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_router_loss_is_exact_in_every_family(model_type):
    found = verify(family(model_type), experts.next_token_with_balance(0.5), samples(0, 5), micro_batch_size=2)
    assert found.ok, str(found)


def test_router_logits_come_once_per_layer_after_a_measured_bound():
    """transformers lays the hooks that find them in the first forward, which here is a measurement."""
    model, batch = mixtral(), samples(0, 5)
    gradient = GradientAccumulator(model, planner=Auto(memory_bytes=2**31))
    gradient.forward_backward(batch, per_sequence)
    gradient.finalize()
    found = model(input_ids=batch[0]["input_ids"][None], output_router_logits=True)
    assert len(found.router_logits) == SIZES["num_hidden_layers"]


def test_a_row_of_padding_alone_is_no_sequence():
    model, loss_fn, batch = mixtral(), experts.next_token_with_balance(0.5), collated()
    nothing = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    empty = {key: torch.cat([each, torch.full_like(each[:1], nothing[key])]) for key, each in batch.items()}
    assert {**loss_fn.weigh(empty)} == {**loss_fn.weigh(batch)} == {"next_token": ANY, "balance": len(batch["labels"])}
    with torch.no_grad():
        one, other = loss_fn(model, batch), loss_fn(model, empty)
    assert float(one["balance"].total) == pytest.approx(float(other["balance"].total), rel=1e-6)


def test_the_head_sums_beside_a_router_loss(monkeypatch):
    model, batch, loss_fn = mixtral(), collated(), experts.next_token_with_balance(0.5)
    terms = loss_fn(model, batch)
    summed = Mock(wraps=chunked_cross_entropy.cross_entropy_sum)
    monkeypatch.setattr(chunked_cross_entropy, "cross_entropy_sum", summed)
    monkeypatch.setattr(token_loss, "MIN_CHUNK_LOGITS", 1)
    in_head = loss_fn(model, batch)
    assert summed.call_count == 1
    for name, (total, weight) in terms.items():
        assert torch.allclose(total, in_head[name].total, rtol=1e-5)
        assert weight == in_head[name].weight


def test_verify_does_not_blame_the_routers_for_a_mean():
    found = verify(mixtral(), mean_with_a_balance, collated())
    assert found.causes[0].startswith("the total of 'loss' is no sum"), found.causes


def test_the_experts_that_verify_runs_in_float64_are_those_of_float32():
    """Torch multiplies the rows of several experts at once in lower precisions only."""
    model, ids = mixtral(initializer_range=0.5), collated()["input_ids"]
    with Float64WithoutDropout(), torch.no_grad():
        found = float64_copy(model)(input_ids=ids).logits
    assert found.dtype == torch.float64
    assert torch.allclose(found.float(), model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_a_bias_is_moved_once_by_what_was_counted():
    gradient, bias = bias_of(sparse_lm())
    gradient.forward_backward(samples(0, 4), unbalanced)
    gradient.finalize()
    bias.update()
    before = [each.clone() for each in gradient.model.buffers()]
    assert any(each.any() for each in before)
    assert not any(each.any() for each in bias.update().values())
    assert all(map(torch.equal, before, gradient.model.buffers()))


def test_an_evaluation_leaves_what_was_counted():
    """Between finalize and the step of the bias, as at the end of an epoch."""
    gradient, bias = bias_of(sparse_lm())
    gradient.forward_backward(samples(0, 4), unbalanced)
    gradient.finalize()
    gradient.evaluate(samples(4, 2), unbalanced)
    counted = [each.tolist() for each in bias.update().values()]
    assert counted == [each.tolist() for each in loads(sparse_lm(), samples(0, 4))]


def test_the_routers_of_several_models_are_told_apart():
    gradient, bias = bias_of([sparse_lm(), sparse_lm()])

    @loss(weigh=unbalanced.weigh)
    def both(models, batch):
        (first, weight), (second, _) = (unbalanced(model, batch) for model in models)
        return first + second, weight

    gradient.forward_backward(samples(0, 4), both)
    gradient.finalize()
    counted = [each.tolist() for each in bias.update().values()]
    assert counted[:2] == counted[2:] == [each.tolist() for each in loads(sparse_lm(), samples(0, 4))]


def test_how_the_choice_is_read_can_be_said():
    found = []
    for settings in (
        {},
        {"chosen": lambda output: output[0].topk(TOP_K).indices},
    ):  # from the logits, without biases yet
        gradient, bias = bias_of(sparse_lm(), **settings)
        gradient.forward_backward(samples(0, 4), unbalanced)
        gradient.finalize()
        found.append([each.tolist() for each in bias.update().values()])
    assert found[0] == found[1]
    assert len(set(found[0][0])) > 1


def test_a_joint_loss_is_counted_once():
    def encode(model, batch):
        return model(batch["input_ids"], attention_mask=batch["attention_mask"])[0].mean(1)

    gradient, bias = bias_of(sparse_lm())
    gradient.forward_backward(samples(0, 5), JointLoss(encode, lambda rows: ((rows**2).sum(), len(rows))))
    gradient.finalize()
    assert all(map(torch.equal, bias.update().values(), loads(sparse_lm(), samples(0, 5))))

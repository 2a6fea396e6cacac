"""Samples longer than a microbatch run in chunks: the gradient is that of uncut samples, or the model is refused."""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from megabatch import (
    GradientAccumulator,
    JointLoss,
    LossContractError,
    MegabatchError,
    PlanError,
    experts,
    loss,
    losses,
)
from megabatch.batching import Deferred, InsideSamples, chunk_planner, inside_samples
from megabatch.planners import SameBits, Tokens
from megabatch.verification.float64_copy import Float64WithoutDropout
from tests.exact.launch import of_ranks

Sample = dict[str, Tensor]
BOUND = 1e-12
LENGTHS = (9, 60, 20, 33, 32, 41)  # one is exactly at the limit of 32, one is one token longer
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128, "bos_token_id": None,
        "eos_token_id": None}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
          "n_routed_experts": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
          "num_key_value_heads": 2}  # fmt: skip
WINDOW = {"sliding_window": 12}
BOTH = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES, "qwen3": SIZES, "gpt2": GPT2, "gpt_neox": SIZES, "phi": SIZES, "olmo2": SIZES, "granite": SIZES,
    "mistral": SIZES | WINDOW, "gemma2": SIZES | WINDOW, "gemma3_text": SIZES | BOTH, "cohere2": SIZES | BOTH,
    "qwen2": SIZES | WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "mixtral": SIZES | EXPERTS, "qwen3_moe": SIZES | EXPERTS, "gpt_oss": SIZES | EXPERTS | WINDOW,
    "deepseek_v3": {name: value for name, value in SIZES.items() if name != "head_dim"} | EXPERTS | LATENT,
    "llama4_text": SIZES | EXPERTS | {
        "attention_chunk_size": 12, "intermediate_size_mlp": 24, "floor_scale": 12,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "gpt_neo": {"vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "window_size": 12,
                "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128},
    "bamba": SIZES | {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1,
                      "mamba_chunk_size": 4, "mamba_d_state": 4},
    "lfm2": SIZES | {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip
REFUSED = {
    "mamba": {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2},
    "bert": SIZES,  # of which earlier tokens read later ones
    "xlnet": {"vocab_size": 64, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
}
JOBS = [
    f"{wrapper}:{world}:{case}"
    for wrapper, world in (
        ("plain", 2),
        ("ddp", 2),
        ("ddp", 3),
        ("fsdp2", 1),
        ("fsdp2", 2),
        ("fsdp2", 3),
        ("gather_once", 2),
        ("gather_once", 3),
    )
    for case in ("uneven", "opened", "calls")
]
JOBS += ["hsdp:2:uneven", "hsdp:2:calls", "fsdp2-last:2:uneven", "fsdp2:2:evaluate", "fsdp2:3:forward",
         "ddp:3:evaluate", "fsdp2:2:whole sequence", "fsdp2:3:count", "gather_once:3:count"]  # fmt: skip


def tiny(kind: str = "llama", **more: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(FAMILIES | REFUSED)[kind] | more)
    return AutoModelForCausalLM.from_config(config).double().train()


def texts(lengths: tuple[int, ...] = LENGTHS) -> list[Sample]:
    """Texts of which each fifth token, and a stretch longer than a chunk, has no target."""
    generator = torch.Generator().manual_seed(1)
    samples: list[Sample] = []
    for length in lengths:
        ids = torch.randint(1, 60, (length,), generator=generator)
        labels = torch.where(torch.arange(length) % 5 == 0, -100, ids)
        labels[20:45] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def uncut(model: nn.Module, samples: list[Sample]) -> list[Tensor]:
    """The gradient of all samples in plain torch, each by itself."""
    model = copy.deepcopy(model)
    num_targets = sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)
    for sample in samples:
        logits = model(input_ids=sample["input_ids"][None], use_cache=False).logits[0, :-1]
        total = F.cross_entropy(logits, sample["labels"][1:], ignore_index=-100, reduction="sum")
        (total / num_targets).backward()
    return gradients(model)


def logits_of(model: nn.Module, sample: Sample) -> Tensor:
    """The logits of a sample in plain torch."""
    with torch.no_grad():
        return model(input_ids=sample["input_ids"][None], use_cache=False).logits[0]


def evaluated(model: nn.Module, samples: list[Sample]) -> float:
    """The loss of all samples in plain torch."""
    totals = [
        F.cross_entropy(logits_of(model, each)[:-1], each["labels"][1:], ignore_index=-100, reduction="sum")
        for each in samples
    ]
    return float(sum(totals)) / sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)


def gradients(model: nn.Module) -> list[Tensor]:
    parameters = model.parameters()
    return [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error of a parameter. One whose gradient is rounding alone counts by the largest of all."""
    largest = max(float(gradient.norm()) for gradient in expected)
    errors: list[float] = []
    for gradient, right in zip(found, expected, strict=True):
        norm = float(right.norm())
        scale = largest if norm < 1e-12 * largest else max(norm, 1e-6 * largest)
        errors.append(float((gradient - right).norm()) / scale)
    return max(errors)


def accumulator(model: nn.Module, limit: int = 8, **options: Any) -> GradientAccumulator:
    return GradientAccumulator(model, max_microbatch_tokens=limit, batching=InsideSamples(), **options)


def run(model: nn.Module, samples: Any, loss_fn: Any = losses.next_token, limit: int = 8) -> list[Tensor]:
    gradient = accumulator(model, limit)
    gradient.forward_backward(samples, loss_fn)
    gradient.finalize()
    return gradients(model)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_gradient_is_that_of_uncut_samples(kind: str) -> None:
    with Float64WithoutDropout():
        model = tiny(kind)
        expected = uncut(model, texts())
        for limit in (8, 32):
            model.zero_grad()
            assert error(run(model, texts(), limit=limit), expected) < BOUND, limit


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_keeps_more_than_keys_and_values_is_refused(kind: str) -> None:
    with pytest.raises(PlanError, match="InsideSamples is given and") as raised:
        accumulator(tiny(kind))
    assert "\n" not in str(raised.value)


def test_counts_are_those_of_samples_and_a_plan_runs_again() -> None:
    model = tiny()
    gradient = accumulator(model)
    gradient.forward_backward(texts(), losses.next_token)
    update = gradient.finalize()
    assert (update.num_samples, update.num_tokens) == (len(LENGTHS), sum(LENGTHS))
    first, plan = gradients(model), gradient.last_plan
    assert plan is not None
    assert max(plan.microbatch_tokens) <= 8
    gradient.forward_backward(texts(), losses.next_token, plan=plan)
    gradient.finalize()
    assert all(map(torch.equal, gradients(model), first))


def test_samples_of_the_limit_are_not_cut_and_no_forward_is_added() -> None:
    model = tiny()
    forwards: list[int] = []
    gradient = accumulator(model, 32)
    model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    gradient.forward_backward(texts((32, 5)), losses.next_token)
    assert gradient.last_plan is not None
    assert gradient.last_plan.num_microbatches == 2
    num_forwards = len(forwards)
    gradient.forward_backward(texts((32, 5)), losses.next_token)
    assert len(forwards) - num_forwards == 2


def drop(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    return F.dropout(output, 0.3, module.training)


@pytest.mark.parametrize(("kind", "dropped"), [("gpt2", "mlp"), ("bamba", "feed_forward")])
def test_the_second_forward_draws_what_the_first_drew(kind: str, dropped: str) -> None:
    model = tiny(kind)
    for name, module in model.named_modules():
        if name.endswith(dropped):
            module.register_forward_hook(drop)
    totals: dict[bool, list[Tensor]] = {False: [], True: []}

    @loss(weigh=losses.token_loss.count_targets)
    def noted(model: nn.Module, microbatch: Mapping[str, Tensor]) -> Any:
        term = losses.next_token(model, microbatch)
        totals[torch.is_grad_enabled()].append(term.total.detach())
        return term

    gradient = accumulator(model)
    gradient.forward_backward(texts((40,)), noted)  # the first call of a loss runs it twice
    for drawn in totals.values():
        drawn.clear()
    gradient.forward_backward(texts((40,)), noted)
    assert len(totals[False]) == 5
    assert [float(total) for total in totals[False]] == [float(total) for total in totals[True][:0:-1]]
    assert len({float(total) for total in totals[False]}) > 3  # two have no target


def test_rows_of_a_mapping_positions_masks_and_frozen_layers() -> None:
    model = tiny()
    model.model.layers[0].requires_grad_(False)
    samples = texts((40, 40))
    rows = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    rows |= {"position_ids": torch.arange(40).expand(2, 40), "attention_mask": torch.ones(2, 40, dtype=torch.long)}
    expected = uncut(model, samples)
    assert error(run(model, rows), expected) < BOUND


def test_shifted_labels_of_a_seam_count_once() -> None:
    samples = texts((40, 33, 9))
    for sample in samples:
        labels = sample.pop("labels")
        sample["shift_labels"] = torch.cat([labels[1:], labels.new_full((1,), -100)])
    model = tiny()
    expected = uncut(model, texts((40, 33, 9)))
    assert error(run(model, samples), expected) < 1e-6  # Llama's norms are in float32


def test_training_the_head_alone_needs_no_gradient_of_keys() -> None:
    model = tiny()
    model.model.requires_grad_(False)
    expected = uncut(model, texts())
    assert error(run(model, texts()), expected) < BOUND


@pytest.mark.parametrize("kind", ["llama", "bamba"])
def test_bfloat16_is_as_near_as_the_uncut_sample(kind: str) -> None:
    exact = tiny(kind)
    expected = uncut(exact, texts())
    model = copy.deepcopy(exact).bfloat16()
    whole = uncut(model, texts())
    pieces = run(model, texts())
    doubles = [gradient.double() for gradient in pieces]
    assert error(doubles, expected) <= 2 * error([gradient.double() for gradient in whole], expected)


@pytest.mark.parametrize("kind", ["gpt_neox", "bamba"])
def test_checkpointed_layers_are_exact(kind: str) -> None:
    model = tiny(kind)
    # Whole samples would get a cache of transformers, which recomputing writes twice.
    model.config.use_cache = False
    layers: Any = inside_samples.inner_decoder(model).layers
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer)
    expected = uncut(model, texts())
    model.zero_grad()
    assert error(run(model, texts()), expected) < (BOUND if kind == "gpt_neox" else 1e-6)  # Bamba's norms are float32


# Losses and batches that are refused, each in one line.


def weighing(function: Any) -> Any:
    return loss(weigh=losses.token_loss.count_targets)(function)


def unshifted(model: nn.Module, microbatch: Mapping[str, Tensor]) -> Any:
    logits, labels = model(microbatch["input_ids"]).logits, microbatch["labels"]
    return F.cross_entropy(logits[0], labels[0], ignore_index=-100, reduction="sum"), (labels != -100).sum()


def called_twice(model: nn.Module, microbatch: Mapping[str, Tensor]) -> Any:
    first, weight = losses.next_token(model, microbatch)
    return (first + losses.next_token(model, microbatch).total) / 2, weight


def without_graph(model: nn.Module, microbatch: Mapping[str, Tensor]) -> Any:
    total, weight = losses.next_token(model, microbatch)
    return (total if int(weight) else total.detach().requires_grad_()), weight


def with_a_cache(model: nn.Module, microbatch: Mapping[str, Tensor]) -> Any:
    from transformers import DynamicCache

    logits = model(input_ids=microbatch["input_ids"], past_key_values=DynamicCache()).logits
    return F.cross_entropy(logits[0, :-1], microbatch["labels"][0, 1:], reduction="sum"), 1


def unweighed(model: nn.Module, microbatch: Mapping[str, Tensor]) -> Any:
    return losses.next_token(model, microbatch)


def of_another_model(model: nn.Module, microbatch: Mapping[str, Tensor]) -> Any:
    total = next(model.parameters()).sum() * 0.0
    return total, (microbatch["labels"][:, 1:] != -100).sum()


def of_the_sequence(model: nn.Module, microbatch: Mapping[str, Tensor]) -> Any:
    total, weight = losses.next_token(model, microbatch)
    return (total / weight.clamp(min=1)).exp() * weight, weight  # a ratio of whole sequences, as of GSPO


def counted_positions(model: nn.Module, microbatch: Mapping[str, Tensor]) -> Any:
    ids = microbatch["input_ids"]
    logits = model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None]).logits
    return _sum_targets(logits, microbatch)


def hiding(model: nn.Module, microbatch: Mapping[str, Tensor]) -> Any:
    ids = microbatch["input_ids"]
    return _sum_targets(model(input_ids=ids, attention_mask=(ids % 3 != 0).long()).logits, microbatch)


def _sum_targets(logits: Tensor, microbatch: Mapping[str, Tensor]) -> Any:
    targets = microbatch["labels"][0, 1:]
    return F.cross_entropy(logits[0, :-1], targets, ignore_index=-100, reduction="sum"), (targets != -100).sum()


def with_a_reference(model: Any, microbatch: Mapping[str, Tensor]) -> Any:
    """A penalty by the logits of a reference, which is the same model with another key projection."""
    projection = model.model.layers[0].self_attn.k_proj
    hook = projection.register_forward_hook(lambda _, __, output: output * 2)
    with torch.no_grad():
        reference = model(microbatch["input_ids"]).logits
    hook.remove()
    logits = model(microbatch["input_ids"]).logits
    total, weight = _sum_targets(logits, microbatch)
    return total + (logits - reference)[:, :-1].square().sum(), weight


def of_the_first_update(model: nn.Module, microbatch: Mapping[str, Tensor]) -> Any:
    """A ratio of whole sequences that is 1 as long as the policy is the old one."""
    total, weight = losses.next_token(model, microbatch)
    return (total - total.detach()).exp() * total.detach() / 100, weight


LOSSES: dict[str, tuple[Any, str]] = {
    "positions by place": (weighing(counted_positions), "begin anew"),
    "a mask of its own": (weighing(hiding), "hides tokens"),
    "a reference of the same model": (weighing(with_a_reference), "twice with other keys and values"),
    "a ratio of sequences": (weighing(of_the_first_update), "needs all tokens of a sample at once"),
    "of the sequence": (weighing(of_the_sequence), "needs all tokens of a sample at once"),
    "balance per sequence": (experts.next_token_with_balance(0.1, top_k=1), "in its chunks"),
    "another model": (weighing(of_another_model), "does not call the model"),
    "unshifted": (loss(weigh=lambda microbatch: (microbatch["labels"] != -100).sum())(unshifted), "in its chunks"),
    "called twice": (weighing(called_twice), "call the model once"),
    "a total without graph": (weighing(without_graph), "does not depend on the model's output"),
    "a cache of its own": (weighing(with_a_cache), "past_key_values"),
    "no weigh": (unweighed, "give weigh="),
    "joint": (JointLoss(lambda model, microbatch: model(microbatch["input_ids"]).logits[:, 0], torch.sum), "couples"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_chunks_would_change_is_refused(name: str) -> None:
    loss_fn, why = LOSSES[name]
    with pytest.raises((PlanError, LossContractError), match=why) as raised:
        run(tiny(), texts(), loss_fn)
    assert "\n" not in str(raised.value)


def test_the_weights_of_every_long_sample_are_compared() -> None:
    """The first sample has no target where chunks meet, and the second has them everywhere."""
    shifted = [{"input_ids": sample["input_ids"], "labels": sample["input_ids"].clone()} for sample in texts((30, 30))]
    shifted[0]["labels"][:29] = -100
    count = loss(weigh=lambda microbatch: (microbatch["labels"] != -100).sum())
    with pytest.raises(LossContractError, match="in sample 1 and"):
        run(tiny(), shifted, count(unshifted))


def test_a_plan_of_other_chunks_is_refused() -> None:
    gradient = accumulator(tiny(), 24)
    lengths = gradient.plan(texts((40,))).lengths
    plan = gradient.plan(texts(lengths))
    assert plan.lengths == lengths
    with pytest.raises(PlanError, match="cut into other chunks"):
        gradient.forward_backward(texts((40,)), losses.next_token, plan=plan)


def hidden(samples: list[Sample]) -> Any:
    return [sample | {"attention_mask": (torch.arange(len(sample["labels"])) > 2).long()} for sample in samples]


BATCHES: dict[str, tuple[Callable[[list[Sample]], Any], str]] = {
    "a mask": (hidden, "hides some of its tokens"),
    "no dim of tokens": (lambda given: [sample | {"reward": torch.tensor(1.0)} for sample in given], "cannot be cut"),
    "packed documents": (
        lambda given: [sample | {"position_ids": torch.arange(len(sample["labels"])) % 7} for sample in given],
        "does not count on by 1",
    ),
    "deferred": (lambda given: Deferred(given.__getitem__, LENGTHS), "not loaded yet"),
    "more than positions": (lambda _: texts((300,)), "128 positions"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_cannot_be_cut_is_refused(name: str) -> None:
    change, why = BATCHES[name]
    with pytest.raises(PlanError, match=why):
        run(tiny("gpt2"), change(texts()))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.gradient_checkpointing:FutureWarning")
def test_settings_that_do_not_go_with_it_are_refused() -> None:
    cases: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
        "not a number": (tiny, {"max_microbatch_tokens": "auto"}),
        "give at least 2": (tiny, {"max_microbatch_tokens": 1}),
        "give max_microbatch_tokens=": (tiny, {"max_microbatch_tokens": None, "micro_batch_size": 1}),
        "SameBits splits whole samples": (
            lambda: tiny().float(),
            {"planner": SameBits(Tokens(8)), "max_microbatch_tokens": None},
        ),
        "is compiled": (lambda: torch.compile(tiny()), {}),  # pyright: ignore
        "recomputes activations": (recomputing, {}),
        "rope_type dynamic": (
            lambda: tiny(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            {},
        ),
        "several models": (lambda: [tiny(), tiny()], {}),  # pyright: ignore
    }
    for why, (make, options) in cases.items():
        with pytest.raises(PlanError, match=why):
            GradientAccumulator(make(), **{"max_microbatch_tokens": 8, "batching": InsideSamples()} | options)


def recomputing() -> nn.Module:
    model = tiny()
    model.gradient_checkpointing_enable()
    return model


def test_a_bias_of_experts_is_refused() -> None:
    with pytest.raises(PlanError, match="a token twice where two chunks meet"):
        experts.ExpertBias(accumulator(tiny("deepseek_v3").float()))


# Forwards without a backward.


def logits_and_targets(model: nn.Module, microbatch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    logits = model(microbatch["input_ids"]).logits
    chosen = logits.log_softmax(-1)[:, :-1].gather(-1, microbatch["input_ids"][:, 1:, None])[..., 0]
    return {"logits": logits, "logprobs": chosen}


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "mistral"])
def test_forward_and_evaluate_take_samples_of_any_length(kind: str) -> None:
    with Float64WithoutDropout():
        model = tiny(kind).eval()
        gradient = accumulator(model)
        gradient.forward_backward(texts(), losses.next_token)
        outputs = gradient.forward(texts(), logits_and_targets)
        plan = gradient.last_plan
        loss_value = gradient.evaluate(texts(), losses.next_token)["loss"]
        gradient.forward_backward(texts(), losses.next_token, plan=plan)
        gradient.finalize()
        for sample, output in zip(texts(), outputs, strict=True):
            logits = logits_of(model, sample)
            chosen = logits[:-1].log_softmax(-1).gather(-1, sample["input_ids"][1:, None])[:, 0]
            assert torch.allclose(output["logits"], logits, rtol=0, atol=1e-12)
            assert torch.allclose(output["logprobs"], chosen, rtol=0, atol=1e-12)
        assert float(loss_value) == pytest.approx(evaluated(model, texts()), rel=1e-12)
        assert error(gradients(model), uncut(model, texts())) < BOUND


def test_forward_runs_each_chunk_once() -> None:
    model = tiny()
    gradient = accumulator(model)
    gradient.evaluate(texts((40,)), losses.next_token)
    calls: list[int] = []
    model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    gradient.evaluate(texts((40,)), losses.next_token)
    assert len(calls) == 6


def summed(model: nn.Module, microbatch: Mapping[str, Tensor]) -> Tensor:
    return model(microbatch["input_ids"]).logits.sum((1, 2))


def cumulated(model: nn.Module, microbatch: Mapping[str, Tensor]) -> Tensor:
    return model(microbatch["input_ids"]).logits.cumsum(1)


FUNCTIONS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a number for each sample": (summed, {}, "return a column for each token"),
    "over earlier tokens": (cumulated, {}, "returns other outputs for"),
    "without trim": (logits_and_targets, {"trim": False}, "leave trim=False out"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_output_that_chunks_would_change_is_refused(name: str) -> None:
    function, options, why = FUNCTIONS[name]
    with pytest.raises((PlanError, LossContractError), match=why):
        accumulator(tiny()).forward(texts(), function, **options)


@pytest.mark.parametrize("name", ["of the sequence", "unshifted", "a mask of its own", "positions by place"])
def test_a_loss_that_chunks_would_change_is_not_evaluated(name: str) -> None:
    loss_fn, why = LOSSES[name]
    with pytest.raises((PlanError, LossContractError), match=why):
        accumulator(tiny()).evaluate(texts(), loss_fn)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("verb", ["forward_backward", "evaluate"])
def test_recomputing_that_is_turned_on_later_is_named(verb: str) -> None:
    model = tiny()
    gradient = accumulator(model)
    model.gradient_checkpointing_enable()
    with pytest.raises(LossContractError, match="recomputes activations"):
        getattr(gradient, verb)(texts(), losses.next_token)


def test_a_failed_loss_leaves_the_model_as_it_was() -> None:
    model = tiny()

    @loss(weigh=losses.token_loss.count_targets)
    def failing(model: nn.Module, microbatch: Mapping[str, Tensor]) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("no")
        return losses.next_token(model, microbatch)

    gradient = accumulator(model)
    with pytest.raises(RuntimeError, match="no"):
        gradient.forward_backward(texts(), failing)
    assert not model.model._forward_pre_hooks
    gradient.discard()
    gradient.forward_backward(texts(), losses.next_token)
    gradient.finalize()
    expected = uncut(tiny(), texts())
    assert error(gradients(model), expected) < BOUND


def test_a_chunk_that_does_not_fit_in_memory_names_a_limit_and_smaller_chunks_run() -> None:
    @loss(weigh=losses.token_loss.count_targets)
    def hungry(model: nn.Module, microbatch: Mapping[str, Tensor]) -> Any:
        if limited and torch.is_grad_enabled() and microbatch["input_ids"].shape[1] > 6:
            raise torch.OutOfMemoryError("out of memory")
        return losses.next_token(model, microbatch)

    model = tiny()
    gradient = accumulator(model, 16)
    samples, limited = texts((5, 60, 6)), False
    gradient.forward_backward(samples, hungry)  # which also tries the loss
    gradient.discard()
    limited = True
    for limit in (7, 3):
        with pytest.raises(MegabatchError, match=f"tokens of sample 1; start again .*={limit}") as raised:
            gradient.forward_backward(samples, hungry)
        shortage = raised.value.shortage
        assert shortage is not None
        gradient.lower_limit(shortage.bound)
        gradient.discard()
    gradient.forward_backward(samples, hungry)
    gradient.finalize()
    assert gradient.last_plan is not None
    assert max(gradient.last_plan.microbatch_tokens) <= 6
    expected = uncut(tiny(), samples)
    assert error(gradients(model), expected) < BOUND


# Several ranks.


def shares(world: int, samples: list[Sample]) -> list[list[Sample]]:
    """Ranks have long samples, short ones, or none."""
    return {1: [samples], 2: [samples[:2] + samples[3:], samples[2:3]], 3: [samples[:5], samples[5:], []]}[world]


def run_job(name: str) -> Any:
    """Return the error of the gradient, or what a case is about."""
    wrapper, world, case = name.split(":")
    kind, _, sync = wrapper.partition("-")
    plain, samples = tiny("gpt_neox"), texts((*LENGTHS, 5, 70))
    expected = uncut(plain, samples)
    whole = {"loss": evaluated(plain, samples), "logits": [logits_of(plain, sample) for sample in samples]}
    model: nn.Module = DistributedDataParallel(plain) if kind == "ddp" else plain
    options: dict[str, Any] = {"sync": sync} if sync else {}
    if kind in ("fsdp2", "gather_once", "hsdp"):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard")) if kind == "hsdp" else None
        for layer in plain.gpt_neox.layers:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(plain, mesh=mesh)
        options |= {"sync": kind} if kind == "gather_once" else {}
    rank = dist.get_rank()
    share = shares(int(world), samples)[rank]
    gradient = accumulator(model, **options)
    if case in CASES:
        return CASES[case](gradient, share, whole)
    if case == "opened":
        gradient.open()
    for part in [share] if case == "uneven" else [share[:1], share[1:]]:
        gradient.forward_backward(part, losses.next_token)
    gradient.finalize()
    found = gradients(plain)
    return error([tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in found], expected)


def evaluate_job(gradient: GradientAccumulator, share: list[Sample], whole: Mapping[str, Any]) -> float:
    found = gradient.evaluate(share, losses.next_token)["loss"]
    return abs(float(found) / float(whole["loss"]) - 1)


def forward_job(gradient: GradientAccumulator, share: list[Sample], whole: Mapping[str, Any]) -> float:
    outputs = gradient.forward(share, lambda model, microbatch: model(microbatch["input_ids"]).logits)
    lengths = [len(sample["input_ids"]) for sample in share]
    # No two samples of a share have one length.
    expected = [next(logits for logits in whole["logits"] if len(logits) == length) for length in lengths]
    return max([float((a - b).abs().max()) for a, b in zip(outputs, expected, strict=True)], default=0.0)


def refused_job(gradient: GradientAccumulator, share: list[Sample], _: Any) -> str:
    with pytest.raises((PlanError, LossContractError), match="needs all tokens of a sample at once") as raised:
        gradient.forward_backward(share, weighing(of_the_sequence))
    gradient.discard()
    gradient.forward_backward(share, losses.next_token)
    assert gradient.finalize().finite
    return str(raised.value)


def count_job(gradient: GradientAccumulator, share: list[Sample], _: Any) -> int:
    """Return how often this rank has called the model in a call, after a first one."""
    gradient.forward_backward(share, losses.next_token)
    calls: list[int] = []
    inner: Any = gradient.model
    hook = inner.gpt_neox.register_forward_pre_hook(lambda *_: calls.append(1))
    gradient.forward_backward(share, losses.next_token)
    hook.remove()
    gradient.finalize()
    return len(calls)


CASES = {"evaluate": evaluate_job, "forward": forward_job, "whole sequence": refused_job, "count": count_job}
found = of_ranks("tests.exact.test_inside_samples:run_job", JOBS)


@pytest.mark.parametrize("job", [job for job in JOBS if job.rpartition(":")[2] not in ("whole sequence", "count")])
def test_ranks_with_and_without_long_samples(job: str, found: Any) -> None:
    assert max(found(job)) < BOUND


def test_ranks_of_a_sharded_model_refuse_a_loss_together_and_go_on(found: Any) -> None:
    texts_of_ranks = found("fsdp2:2:whole sequence")
    assert len(texts_of_ranks) == 2
    assert all("\n" not in text for text in texts_of_ranks)


def test_ranks_of_a_sharded_model_run_as_many_forwards(found: Any) -> None:
    """Rank 0 has 24 microbatches, and 25 forwards go before its first, tenth, eleventh, 15th, 20th and 23rd.

    Rank 0 has samples of 9, 5, 5, 3 and 2 chunks, rank 1 of 10 and 6, rank 2 has none. Where parameters are gathered
    once, a rank runs its own forwards alone.
    """
    assert found("fsdp2:3:count") == [24 + 9 + 4 + 5 + 4 + 2 + 1] * 3
    assert found("gather_once:3:count") == [24 + 8 + 4 + 4 + 2 + 1, 24 + 9 + 5, 24]


# Planted bugs: each is caught by the gradient.

PLANTED = {
    "forget the gradient of later chunks": (
        "chunk_gradient[..., : own_stop - start, :] += self.gradient[..., start:own_stop, :]", "pass",
    ),
    "give the overlapping token the gradient too": (
        "chunk_gradient[..., : own_stop - start, :] += self.gradient[..., start:own_stop, :]",
        "chunk_gradient += self.gradient[..., start : start + chunk_gradient.shape[-2], :]",
    ),
    "forget what earlier chunks are to receive": (
        "self.gradient[..., :start, :] += gradient[..., :start, :]", "pass",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = inside_samples.KeptTensor
    source = inspect.getsource(kept.add_gradient)
    text, planted = PLANTED[name]
    assert source.count(text) == 1
    names = dict(vars(inside_samples))
    exec("class Planted:\n" + source.replace(text, planted), names)
    model = tiny()
    expected = uncut(model, texts())
    with monkeypatch.context() as patched:
        patched.setattr(inside_samples, "_describe_difference", lambda *_: None)
        patched.setattr(chunk_planner.ChunkPlanner, "_piece_to_try", lambda *_: None)
        patched.setattr(kept, "add_gradient", names["Planted"].add_gradient)
        assert error(run(model, texts()), expected) > 1e-4
    with monkeypatch.context() as patched:
        patched.setattr(kept, "add_gradient", names["Planted"].add_gradient)
        with pytest.raises(PlanError, match="another gradient"):
            accumulator(tiny())

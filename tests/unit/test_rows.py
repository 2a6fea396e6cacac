"""Samples in one row: what is in it, which models keep them apart, and the gradient, which is that of samples apart."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megabatch import GradientAccumulator, LossContractError, PlanError, Term, loss, losses, plan
from megabatch.batching.deferred import Deferred
from megabatch.batching.packed_row import OneRow
from megabatch.planning.packing import without_padding
from tests.unit.test_masks import CAUSAL

APART = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "phi", "gemma", "gpt2")
IN_FLOAT64 = {"sdpa": ("gpt2", "gpt_neox", "phi"), "eager": ("gpt2",)}  # others have a norm or a softmax in float32
LENGTHS = (3, 7, 5, 1, 2, 6)
NO_TARGET = -100
NUM_TRIALS = 7  # forwards of a trial
SEEN: list[int] = []  # sequences that each call of `attend_by_ends` was told of


def model_of(family: str, attention: str = "sdpa", **more: Any) -> Any:
    torch.manual_seed(0)
    keys = {**CAUSAL.get(family, {}), "use_cache": False, **more}
    config = AutoConfig.for_model(family, **keys, attn_implementation=attention)
    return AutoModelForCausalLM.from_config(config).double()


def tokens_of(model: Any) -> list[int]:
    """Those of each forward from here on."""
    seen: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    return seen


def samples(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Tensor]]:
    """Texts with prompts of two tokens, from which nothing is learned."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(1, 40, (length,), generator=generator) for length in lengths]
    return [{"input_ids": each, "labels": torch.cat([torch.full_like(each[:2], -100), each[2:]])} for each in texts]


def uncut(model: nn.Module, given: list[dict[str, Tensor]]) -> list[Tensor]:
    """Each sample by itself, in plain torch, over the number of all targets."""
    model.zero_grad()
    num_targets = sum(int((each["labels"][1:] != NO_TARGET).sum()) for each in given)
    for each in given:
        logits = model(input_ids=each["input_ids"][None]).logits[0, :-1]
        total = nn.functional.cross_entropy(logits, each["labels"][1:], ignore_index=NO_TARGET, reduction="sum")
        (total / num_targets).backward()
    return taken(model)


def taken(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in model.parameters()]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative one of a parameter."""
    return max(float((a - b).norm() / max(float(b.norm()), 1e-300)) for a, b in zip(found, expected, strict=True))


def test_a_row_has_samples_one_after_another() -> None:
    row = OneRow()([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}])
    assert {name: value.tolist() for name, value in row.items()} == {
        "input_ids": [[5, 6, 7, 8, 9]],
        "position_ids": [[0, 1, 2, 0, 1]],
        "shift_labels": [[6, 7, -100, 9, -100]],
    }


def test_what_runs_along_the_tokens_lies_in_the_row_too() -> None:
    ones, weights = torch.ones(2, dtype=torch.long), torch.tensor([[0.5, 1.0], [2.0, 3.0]])
    row = OneRow()([{"input_ids": ones, "attention_mask": ones, "weights": weights}] * 2)
    assert row.keys() == {"input_ids", "position_ids", "weights"}  # a mask of ones says nothing
    assert row["weights"].shape == (1, 4, 2)
    packed = OneRow()([{"input_ids": ones, "position_ids": torch.tensor([0, 0])}] * 2)
    assert packed["position_ids"].tolist() == [[0, 0, 0, 0]]  # of documents that were packed before


def test_a_row_says_where_its_sequences_end() -> None:
    packed = {"input_ids": torch.ones(4, dtype=torch.long), "position_ids": torch.tensor([0, 1, 0, 1])}  # two documents
    row = OneRow(flash_attn_kwargs=True)([packed])
    assert row["cu_seq_lens_q"].tolist() == [0, 2, 4]
    row = OneRow(flash_attn_kwargs=True)(samples())
    ends = [0, 3, 10, 15, 16, 18, 24]
    for name in ("q", "k"):
        assert (row[f"cu_seq_lens_{name}"].tolist(), row[f"max_length_{name}"]) == (ends, 7)
        assert row[f"cu_seq_lens_{name}"].dtype == torch.int32


def attend_by_ends(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: Any, **given: Any) -> Any:
    """Attention of each sequence by itself, from the ends that the model is given; [1, heads, S, D]."""
    ends = given.get("cu_seq_lens_q")
    if ends is None:  # the trial of the accumulator gives positions alone
        ends = torch.cat([(given["position_ids"][0] == 0).nonzero().flatten(), torch.tensor([query.shape[2]])])
    else:
        assert (given["max_length_q"], given["max_length_k"]) == (int(ends.diff().max()),) * 2
        SEEN.append(len(ends) - 1)
    parts = [
        nn.functional.scaled_dot_product_attention(
            *(each[:, :, start:end] for each in (query, key, value)), is_causal=True
        )
        for start, end in pairwise(ends.tolist())
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def test_attention_by_ends_has_the_gradient_of_samples_apart() -> None:
    ALL_ATTENTION_FUNCTIONS.register("by_ends", attend_by_ends)
    expected = uncut(model_of("gpt_neox"), samples())
    model = model_of("gpt_neox", "by_ends")
    gradient = GradientAccumulator(model, max_microbatch_tokens=12, batching=OneRow(flash_attn_kwargs=True))
    SEEN.clear()
    gradient.forward_backward(samples(), losses.next_token)
    gradient.finalize()
    assert sum(SEEN) == len(LENGTHS) * model.config.num_hidden_layers
    assert error(taken(model), expected) <= 1e-12


def test_targets_that_are_shifted_stay() -> None:
    sample = {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "shift_labels": [7, -100, 8]}
    assert OneRow()([sample])["shift_labels"].tolist() == [[7, -100, 8]]  # which next_token reads where both are given


@given(st.lists(st.integers(0, 90), min_size=1, max_size=60), st.integers(90, 300))
@settings(max_examples=100)
def test_microbatches_are_full(lengths: list[int], cap: int) -> None:
    found = without_padding(lengths, plan(lengths, max_microbatch_tokens=cap)[0], cap)
    assert sorted(row for rows in found.microbatches for row in rows) == list(range(len(lengths)))
    held = [sum(lengths[row] for row in rows) for rows in found.microbatches]
    taken_up = [sum(max(1, lengths[row]) for row in rows) for rows in found.microbatches]
    assert [found.tokens_of(rows) for rows in found.microbatches] == held
    assert max(held) <= cap
    assert (found.padded_tokens, found.padding) == (sum(lengths), 0.0)
    assert all(a + b > cap for index, a in enumerate(taken_up) for b in taken_up[:index])  # no two would go into one


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", [*APART, "window", "checkpointed"])
def test_the_gradient_is_that_of_samples_apart(family: str, attention: str) -> None:
    window = {"sliding_window": 3} if family == "window" else {}  # shorter than a sample
    model = model_of({"window": "mistral", "checkpointed": "gpt2"}.get(family, family), attention, **window)
    if family == "checkpointed":
        model.train().activation_checkpointing_enable()
    expected = uncut(model, samples())
    computed = tokens_of(model)
    gradient = GradientAccumulator(model, max_microbatch_tokens=12, batching=OneRow())
    gradient.forward_backward(samples(), losses.next_token)
    update = gradient.finalize()
    assert error(taken(model), expected) <= (1e-12 if family in IN_FLOAT64[attention] else 1e-6)
    assert (update.num_microbatches, int(update.weight)) == (2, sum(max(0, length - 2) for length in LENGTHS))
    assert computed[NUM_TRIALS:] == [12, 12]
    assert gradient.last_plan is not None
    assert gradient.last_plan.padded_tokens == sum(LENGTHS)


def test_deferred_samples_and_several_calls() -> None:
    model, given_ = model_of("gpt2"), samples()
    expected = uncut(model, given_)
    gradient = GradientAccumulator(model, max_microbatch_tokens=8, batching=OneRow())
    gradient.forward_backward(Deferred(given_[:3].__getitem__, LENGTHS[:3]), losses.next_token)
    gradient.forward_backward(given_[3:], losses.next_token)
    gradient.finalize()
    assert error(taken(model), expected) <= 1e-12


def test_the_trial_of_a_weight_keeps_no_room_of_deferred_samples() -> None:
    """Only its samples are loaded again."""
    model, given_ = model_of("gpt2"), samples((4,) * 10)
    num_bytes = sum(each.nbytes for each in OneRow()(given_).values())
    loads: Counter[int] = Counter()

    def load(index: int) -> dict[str, Tensor]:
        loads[index] += 1
        return given_[index]

    gradient = GradientAccumulator(model, max_microbatch_tokens=8, batching=OneRow())
    gradient.forward_backward(Deferred(load, [4] * 10, kept_bytes=num_bytes), losses.next_token)
    gradient.finalize()
    assert sorted(loads.values())[:8] == [1] * 8


def test_the_bound_is_measured_in_rows() -> None:
    model, given_ = model_of("gpt2"), samples()
    expected = uncut(model, given_)
    gradient = GradientAccumulator(model, batching=OneRow())
    gradient.forward_backward(given_, losses.next_token)
    gradient.finalize()
    assert gradient.fit is not None
    assert error(taken(model), expected) <= 1e-12


def test_a_trial_leaves_the_model_as_it_was() -> None:
    model = model_of("gpt2").train()
    model.get_submodule("transformer.h.0").eval()  # a part that its owner keeps so
    modes, state = [each.training for each in model.modules()], torch.get_rng_state()
    GradientAccumulator(model, micro_batch_size=2, batching=OneRow())
    assert [each.training for each in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(each.grad is None for each in model.parameters())


def weakly(model: Any) -> Any:
    """The model, in bfloat16, whose attention adds next to nothing to its logits."""
    for name, parameter in model.named_parameters():
        if name.endswith("attention.dense.weight"):
            parameter.data.mul_(0.1)
    return model.bfloat16()


BLOOM = {"vocab_size": 40, "hidden_size": 16, "n_layer": 1, "n_head": 2}
LFM2 = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]}  # fmt: skip
LFM2_EXPERTS = {**LFM2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1}
EXPERTS = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "head_dim": 8,
           "num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 16, "num_experts_per_tok": 3,
           "num_local_experts": 8, "num_experts": 8}  # fmt: skip
SEEING = {
    "a short convolution": lambda: model_of("lfm2", **LFM2),
    "a short convolution in float32": lambda: model_of("lfm2", **LFM2).float(),
    "a short convolution in bfloat16": lambda: model_of("lfm2", **LFM2).bfloat16(),
    "a short convolution and experts": lambda: model_of("lfm2_moe", **LFM2_EXPERTS).float(),
    "the same in bfloat16": lambda: model_of("lfm2_moe", **LFM2_EXPERTS).bfloat16(),
    "opt": lambda: model_of("opt"),
    "bloom": lambda: model_of("bloom", "eager", **BLOOM),
    "bloom, weakly": lambda: weakly(model_of("bloom", "eager", **BLOOM)),
    "a cache": lambda: model_of("gpt2", use_cache=True),
}


@pytest.mark.parametrize("name", SEEING)
def test_models_whose_samples_see_each_other_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match="those in one row see each other"):
        GradientAccumulator(SEEING[name](), micro_batch_size=2, batching=OneRow())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_experts_that_round_otherwise_are_accepted(family: str, dtype: torch.dtype) -> None:
    for seed in range(10):
        model = model_of(family, **EXPERTS)
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.add_(0.2 * torch.randn_like(parameter))
        GradientAccumulator(model.to(dtype), micro_batch_size=2, batching=OneRow())


def test_a_model_that_knows_no_positions_is_refused() -> None:
    model = model_of("mamba", "eager", vocab_size=40, hidden_size=16, state_size=4, num_hidden_layers=1)
    with pytest.raises(PlanError, match="OneRow"):
        GradientAccumulator(model, micro_batch_size=2, batching=OneRow())


def test_an_evaluation_that_forgets_positions_is_refused_as_a_call_is() -> None:
    model = model_of("gpt2")
    gradient = GradientAccumulator(model, max_microbatch_tokens=12, batching=OneRow())

    @loss(weigh=losses.count_targets)
    def forgets(model: Any, microbatch: Any) -> Term:
        return losses.next_token(model, {key: microbatch[key] for key in microbatch if key != "position_ids"})

    for run in (gradient.forward_backward, gradient.evaluate):
        with pytest.raises(LossContractError, match="position_ids"):
            run(samples(), forgets)
    assert gradient.evaluate(samples(), losses.next_token)["loss"] > 0


def test_a_cache_that_comes_later_is_refused() -> None:
    model = model_of("gpt2")
    gradient = GradientAccumulator(model, micro_batch_size=2, batching=OneRow())
    model.config.use_cache = True  # for generate(), say
    with pytest.raises(LossContractError, match="the model makes a cache"):
        gradient.forward_backward(samples(), losses.next_token)
    model.config.use_cache = False
    gradient.forward_backward([], losses.next_token)  # calls no model
    gradient.forward_backward(samples(), losses.next_token)
    assert model(input_ids=torch.ones(1, 2, dtype=torch.long)).logits.shape == (1, 2, 40)  # outside of a call


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_watched_too(*, in_place: bool) -> None:
    model = model_of("gpt2")
    expected = uncut(model, samples())
    compiled: Any = model
    if in_place:
        model.compile(backend="eager")
    else:
        compiled = torch.compile(model, backend="eager")
    gradient = GradientAccumulator(compiled, max_microbatch_tokens=12, batching=OneRow())
    for _ in range(2):
        gradient.forward_backward(samples(), losses.next_token)
        gradient.finalize()
        assert error(taken(model), expected) <= 1e-12


def test_weights_that_float32_rounds_are_accepted() -> None:
    given = [{**each, "weights": torch.full((len(each["input_ids"]),), 0.1)} for each in samples()]

    @loss(weigh=lambda row: row["weights"].sum())
    def weighted(model: Any, row: Any) -> Any:
        logits = model(input_ids=row["input_ids"], position_ids=row["position_ids"]).logits
        return (logits.logsumexp(-1) * row["weights"]).sum(), row["weights"].sum()

    gradient = GradientAccumulator(model_of("gpt2"), max_microbatch_tokens=24, batching=OneRow())
    gradient.forward_backward(given, weighted)
    assert gradient.finalize().problem() is None

"""Trees of samples that begin alike: which samples share one, by cost, and where their tokens lie."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import CostModel, GradientAccumulator, PlanError, losses
from megabatch.batching import SharedPrefix
from megabatch.batching.shared_prefix import Layout, find_trees
from megabatch.planning.plan import Plan

CAP = 1 << 14


def ids(prompt: int, completion: int, group: int, seed: int = 0) -> dict[int, np.ndarray]:
    drawn = np.random.default_rng(seed)
    begin = drawn.integers(1 << 15, size=prompt)
    return {row: np.concatenate([begin, drawn.integers(1 << 15, size=completion)]) for row in range(group)}


@pytest.mark.parametrize(
    ("prompt", "completion", "group", "branches"),
    [
        (512, 128, 8, [8]),
        (1024, 64, 16, [16]),
        (1024, 64, 64, [28, 28, 8]),
        (128, 128, 8, [4, 4]),
        (256, 256, 8, [3, 3, 2]),
        (256, 512, 8, []),  # long branches, which cost more in a tree
        (512, 512, 4, []),
        (1, 600, 8, []),  # a token that begins every text
    ],
)
def test_the_cost_model_says_how_many_share_a_tree(
    prompt: int, completion: int, group: int, branches: list[int]
) -> None:
    trees = find_trees(ids(prompt, completion, group), CostModel(), CAP)
    assert [len(tree.rows) for tree in trees] == branches
    assert all(tree.num_tokens == prompt + completion * len(tree.rows) for tree in trees)
    assert {tree.prefix for tree in trees} <= {prompt}


def test_dear_attention_makes_small_trees() -> None:
    dear = CostModel(seconds_per_pair=1 / 256)
    assert [len(tree.rows) for tree in find_trees(ids(512, 128, 8), dear, CAP)] != [8]
    assert find_trees(ids(128, 128, 8), dear, CAP) == []


def test_trees_stay_under_the_limit() -> None:
    trees = find_trees(ids(512, 128, 8), CostModel(), 1000)
    assert [tree.num_tokens for tree in trees] == [896, 896, 768]  # 3, 3 and 2 branches


def test_a_longer_prefix_of_some_does_not_part_a_group() -> None:
    """Two of 16 completions begin with the same token: one tree, with the prompt as its prefix."""
    found = ids(512, 64, 16)
    found[1][512] = found[0][512]
    assert [(tree.prefix, len(tree.rows)) for tree in find_trees(found, CostModel(), CAP)] == [(512, 16)]
    apart = {row + 16 * seed: each for seed in (1, 2) for row, each in ids(512, 64, 16, seed).items()}
    for each in apart.values():
        each[:40] = 7  # a system prompt that both groups begin with
    assert [(tree.prefix, len(tree.rows)) for tree in find_trees(apart, CostModel(), CAP)] == [(512, 16)] * 2


@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=6)), min_size=1, max_size=24),
    st.integers(12, 60),
)
@settings(max_examples=200)
def test_trees_hold_what_they_say(given_: list[tuple[int, list[int]]], cap: int) -> None:
    prompts = [[], [5] * 6, [5] * 3 + [4] * 3, [3] * 5]
    found = {row: np.array([1, *prompts[number], *rest]) for row, (number, rest) in enumerate(given_)}
    cost = CostModel()
    trees = find_trees(found, cost, cap)
    rows = [row for tree in trees for row in tree.rows]
    assert len(rows) == len(set(rows))
    for tree in trees:
        assert len(tree.rows) > 1
        assert len({tuple(found[row][: tree.prefix]) for row in tree.rows}) == 1
        assert tree.num_tokens == tree.prefix + sum(len(found[row]) - tree.prefix for row in tree.rows) <= cap
        assert tree.saved > 0


def test_a_layout_has_each_token_once_and_finds_it_again() -> None:
    """Samples of 3, 4 and 3 tokens, of which the first two share 2; rows of 3 + 2 and 3 positions."""
    layout = Layout.of([3, 4, 3], [0, 2, 0], 4)
    tokens = torch.tensor([[10, 11, 12, 0], [10, 11, 13, 14], [20, 21, 22, 0]])
    inputs = layout.inputs(tokens, additive=False)
    assert inputs["input_ids"].tolist() == [[10, 11, 12, 13, 14], [20, 21, 22, 10, 10]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 2, 3], [0, 1, 2, 0, 0]]
    assert layout.branch.tolist() == [[0, 0, 1, 2, 2], [1, 1, 1, -1, -1]]
    sees = [[10], [10, 11], [10, 11, 12], [10, 11, 13], [10, 11, 13, 14]]
    mask = inputs["attention_mask"][0, 0]
    assert [inputs["input_ids"][0][row].tolist() for row in mask] == sees
    back = layout.gather(inputs["input_ids"][..., None])[..., 0]
    assert back.tolist() == [[10, 11, 12, 12], [10, 11, 13, 14], [20, 21, 22, 22]]


def test_a_plan_counts_shared_tokens() -> None:
    plan = Plan(((0, 1, 2), (3,)), (5, 6, 7, 4), shared=(0, 4, 4, 0))
    assert plan.row_lengths((0, 1, 2)) == [5 + 2 + 3]
    assert (plan.num_tokens, plan.padded_tokens, plan.padding) == (22, 14, 0.0)
    assert plan.tokens_of((1, 2)) == 6 + 3  # a part that runs alone begins with the whole prefix
    assert "22 real tokens, 14 computed: 0.0% padding, 8 shared" in plan.explain()


def test_a_microbatch_that_does_not_fit_runs_in_parts() -> None:
    """Each part is a tree of its own, and the gradient stays the same."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).double()
    rows = [{"input_ids": torch.tensor(each % 64)} for each in ids(20, 3, 6).values()]
    seen: list[torch.Size] = []

    def total(model, microbatch):
        seen.append(microbatch["input_ids"].shape)
        if len(microbatch["input_ids"]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(microbatch["input_ids"]).logits.logsumexp(-1)[:, -1].sum(), len(microbatch["input_ids"])

    found = []
    for batching in (None, SharedPrefix()):
        gradient = GradientAccumulator(model, max_microbatch_tokens=6 * 23, batching=batching)
        gradient.forward_backward(rows, total)
        gradient.finalize()
        found.append([each.grad.clone() for each in model.parameters()])
    assert seen == [(6, 23), (3, 23), (3, 23)] * 2
    assert gradient.last_plan is not None
    assert gradient.last_plan.padded_tokens == 2 * (20 + 3 * 3)
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm()) <= 1e-6 * float(one.norm())


def test_two_accumulators_may_have_one_object() -> None:
    """Each pads and checks samples for its own model: 30 is a token of the first alone."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    models = [LlamaForCausalLM(LlamaConfig(vocab_size=size, num_key_value_heads=2, **sizes)) for size in (64, 24)]
    batching = SharedPrefix()
    first, second = (GradientAccumulator(model, max_microbatch_tokens=64, batching=batching) for model in models)
    tokens = [torch.tensor([*range(20), last]) for last in (30, 22)]
    samples = [{"input_ids": each, "labels": each} for each in tokens]
    first.forward_backward(samples, losses.next_token)
    assert float(first.finalize().loss) > 0
    with pytest.raises(PlanError, match="token 30"):
        second.forward_backward(samples, losses.next_token)

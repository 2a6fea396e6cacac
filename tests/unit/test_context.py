"""Stretches against what is written by hand, masks against those of transformers, and what is refused."""

import gc
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from megabatch import PlanError, losses
from megabatch.batching import context_parallel
from megabatch.batching.context_parallel import GatheredAttention, Stretch, piece_mask, stretch
from megabatch.batching.stretch_planner import check_weights_of_stretches
from tests.unit.failures.table import check_error

IDS = torch.tensor([[11, 12, 13, 14, 15], [21, 22, 23, 0, 0]])
LABELS = torch.tensor([[11, 12, -100, 14, 15], [21, 22, 23, -100, -100]])
BY_HAND = [  # of two ranks: the first and the last piece, and the two between
    {
        "input_ids": [[11, 12, 0, 0], [21, 22, 0, 0]],
        "shift_labels": [[12, -100, -100, -100], [22, 23, -100, -100]],
        "position_ids": [[0, 1, 0, 0], [0, 1, 0, 0]],
        "shift_advantages": [[1, 2, 0, 0], [6, 7, 0, 0]],
    },
    {
        "input_ids": [[13, 14, 15, 0], [23, 0, 0, 0]],
        "shift_labels": [[14, 15, -100, -100], [-100, -100, -100, -100]],
        "position_ids": [[2, 3, 4, 0], [2, 3, 4, 0]],
        "shift_advantages": [[3, 4, 5, 0], [8, 9, 10, 0]],
    },
]


@pytest.mark.parametrize("index", [0, 1])
def test_a_stretch_by_hand(index):
    advantages = torch.arange(1, 11).reshape(2, 5)
    whole = {"input_ids": IDS, "labels": LABELS, "shift_advantages": advantages, "reward": torch.ones(2), "name": "n"}
    found = stretch(whole, index, 2)
    assert {name: found[name].tolist() for name in BY_HAND[index]} == BY_HAND[index]
    assert found["attention_mask"].tolist() == [[[[True] * 8]]] * 2  # the order says all
    assert found["reward"] is whole["reward"]
    assert found["name"] == "n"
    assert "labels" not in found
    assert "labels" in whole


@given(st.integers(1, 5), st.integers(0, 23))
def test_the_stretches_of_all_ranks_are_the_whole(degree, length):
    ids = torch.arange(1, length + 1)[None]
    parts = [stretch({"input_ids": ids, "labels": ids}, index, degree) for index in range(degree)]
    sizes = {part["input_ids"].shape[1] for part in parts}
    assert sizes == {2 * max(1, -(-length // (2 * degree)))}  # all the same
    names = ("position_ids", "input_ids", "shift_labels")
    entries = [entry for part in parts for entry in zip(*(part[name][0].tolist() for name in names), strict=True)]
    seen = {(position, token, target) for position, token, target in entries if token}
    expected = {(place, place + 1, place + 2 if place + 1 < length else -100) for place in range(length)}
    assert seen == expected
    assert sum(int(losses.count_targets(part)) for part in parts) == max(0, length - 1)


def test_weights_that_are_sums_of_float32_pass_the_check_of_their_stretches():
    """Sums of parts differ from the sum of the whole by float32's rounding."""
    labels, weights = (
        torch.zeros(1, 64, dtype=torch.long),
        torch.rand(1, 64, generator=torch.Generator().manual_seed(0)),
    )
    whole = {"input_ids": labels, "labels": labels, "shift_weights": weights}
    sums = [float(stretch(whole, rank, 4)["shift_weights"].sum()) for rank in range(4)]
    assert sum(sums) != float(weights.sum())
    check_weights_of_stretches(whole, lambda microbatch: microbatch["shift_weights"].sum(), 4)


def test_it_stays_what_it_is_between_devices_and_processes():
    found = pytree.tree_map(lambda leaf: leaf, stretch({"input_ids": IDS, "labels": LABELS}, 0, 2))
    assert type(found) is Stretch
    assert torch.equal(found["input_ids"], torch.tensor(BY_HAND[0]["input_ids"]))
    with pytest.raises(KeyError, match="rewards"):
        found["rewards"]


def rows(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


MASKED = {  # positions, attention_mask
    "padded on the left": (rows(7), torch.tensor([[0, 0, 1, 1, 1, 1, 1]])),
    "padded on the left, positions from the first token": (
        torch.tensor([[0, 0, 0, 1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1, 1, 1, 1]]),
    ),
    "holes": (rows(7), torch.tensor([[1, 0, 1, 1, 0, 1, 1]])),
    "padded on the right": (rows(7), torch.tensor([[1, 1, 1, 1, 1, 0, 0]])),
    "documents": (rows(3, 1, 3), None),
    "documents, padded with zeros": (torch.cat([rows(3, 2), torch.zeros(1, 2, dtype=torch.long)], 1), None),
    "positions that jump": (torch.tensor([[0, 1, 2, 5, 6, 7, 8]]), None),
    "one document": (rows(7), None),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKED)
def test_who_sees_whom_as_in_transformers(name):
    from transformers import LlamaConfig  # slow to import
    from transformers.masking_utils import create_causal_mask

    positions, attended = MASKED[name]
    config = LlamaConfig(attn_implementation="eager", use_cache=False)
    embeds = torch.zeros(1, 7, 4)
    expected = create_causal_mask(config, embeds, attended, None, positions)[0, 0] == 0
    whole = {"input_ids": torch.ones_like(positions), "shift_loss": positions, "position_ids": positions}
    whole |= {} if attended is None else {"attention_mask": attended}
    documents = stretch(whole, 0, 1)["attention_mask"]
    if name == "one document":
        assert documents.dtype == torch.bool
        documents = torch.ones(1, 1, 1, 8)
    found = piece_mask(documents[:, 0, 0], 0, 8, torch.float64)[0, 0] == 0
    assert torch.equal(found[:7, :7], expected)
    assert not found[:7, 7].any()
    assert found[7, 7]


PLAIN = {  # attention_mask, labels -> whether no mask is needed
    "padded on the right": ([1, 1, 1, 0], [5, 6, 7, -100], True),
    "all": ([1, 1, 1, 1], [5, 6, 7, 8], True),
    "a target at the padding": ([1, 1, 0, 0], [5, 6, 7, 8], False),
    "padded on the left": ([0, 1, 1, 1], [-100, 6, 7, 8], False),
}


@pytest.mark.parametrize("name", PLAIN)
def test_no_mask_where_nothing_that_matters_is_hidden(name):
    attended, labels, plain = PLAIN[name]
    whole = {
        "input_ids": torch.ones(1, 4),
        "labels": torch.tensor([labels]),
        "attention_mask": torch.tensor([attended]),
    }
    assert (stretch(whole, 0, 2)["attention_mask"].dtype == torch.bool) == plain
    other = whole | {"shift_other": torch.ones(1, 4)}  # a loss may look at every position
    assert (stretch(other, 0, 2)["attention_mask"].dtype == torch.bool) == (name == "all")


def attention_inputs(heads: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 6, 8), (2, 2, 6, 8), (2, 2, 6, 5)]  # values of another size
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("documents", [None, [[1, 1, 1, 2, 2, 2], [1, -1, 1, 1, 1, 1]]])
def test_attention_of_one_rank_is_torchs(documents):
    query, key, value = attention_inputs()
    given = torch.ones(2, 6, dtype=torch.bool) if documents is None else torch.tensor(documents)
    found = GatheredAttention(dist.group.WORLD)(query, key, value, given[:, None, None], scale=0.3)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    if documents is not None:
        mask &= (given.abs()[:, :, None] == given[:, None])[:, None]
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    assert torch.allclose(found, F.scaled_dot_product_attention(query, key, value, mask, scale=0.3), rtol=1e-13)


@pytest.mark.usefixtures("group_of_one")
def test_masks_are_made_once_and_live_as_long_as_the_microbatch(monkeypatch):
    made = []
    monkeypatch.setattr(context_parallel, "piece_mask", lambda *of: made.append(of[1:3]) or piece_mask(*of))
    attention, states = GatheredAttention(dist.group.WORLD), attention_inputs(2)
    documents = torch.ones(2, 1, 1, 6, dtype=torch.long)
    for _ in range(3):
        attention(*states, documents)
    assert made == [(0, 3), (3, 6)]
    assert len(attention._masks) == 1
    del documents
    gc.collect()
    assert len(attention._masks) == 0


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("positions", [rows(8), rows(5, 3)], ids=["plain", "packed"])
def test_a_model_that_attends_to_its_stretch_alone_fails(implementation, positions):
    from transformers import GPT2Config, GPT2LMHeadModel  # slow to import

    config = GPT2Config(vocab_size=9, n_positions=8, n_embd=4, n_layer=1, n_head=1, attn_implementation=implementation)
    part = stretch({"input_ids": positions, "labels": positions, "position_ids": positions}, 0, 2)
    del part["shift_labels"]
    with pytest.raises(RuntimeError):
        GPT2LMHeadModel(config)(**part)


MODELS = {  # config, its options, what the error names
    "a family that is not tested": ("GemmaConfig", {}, "'gemma' … gpt2 … a mesh without cp"),
    "a window": ("MistralConfig", {"sliding_window": 8}, "a sliding window of 8 tokens"),
    "windows in some layers": (
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding_attention",
    ),
    "attention to what comes later": ("LlamaConfig", {"is_causal": False}, "not causal"),
    "positions that depend on the longest": (
        "LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        "'dynamic' … needs one of default",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_refused(name):
    import transformers  # slow to import

    from megabatch.train.parallel.wrap import check_attention_is_causal

    config, options, seen = MODELS[name]
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    with pytest.raises(PlanError) as raised:
        check_attention_is_causal(SimpleNamespace(config=getattr(transformers, config)(**sizes, **options)))
    check_error(str(raised.value), seen)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(("options", "seen"), [
    ({"sliding_window": 4}, "sliding_window"),
    ({"softcap": 30.0}, "softcap"),
    ({"is_causal": False}, "attention that is not causal"),
])  # fmt: skip
def test_a_layer_that_asks_for_something_else_is_refused(options, seen):
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM  # slow to import

    from megabatch.train.parallel.wrap import attend_over

    config = LlamaConfig(
        vocab_size=9, num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8, use_cache=False
    )
    model = LlamaForCausalLM(config)
    attend_over(model, GatheredAttention(dist.group.WORLD))
    part = stretch({"input_ids": IDS % 9, "labels": LABELS}, 0, 1)
    del part["shift_labels"]
    model(**part)
    attention = AttentionInterface()[config._attn_implementation]
    with pytest.raises(PlanError) as raised:
        attention(model.model.layers[0].self_attn, *attention_inputs(2), None, **options)
    text = f"LlamaAttention asks for {seen}; context parallelism has full causal attention only"
    assert str(raised.value) == text

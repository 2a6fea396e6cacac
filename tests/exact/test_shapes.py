"""`shapes=`: few sizes of microbatches, tokens without a label that add nothing, and a graph for each size."""

from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForTokenClassification, GPT2LMHeadModel, GPTJConfig, GPTJForCausalLM

from megabatch import CostModel, GradientAccumulator, JointLoss, MegabatchError, PlanError, loss, losses, verify
from megabatch.autotune import few_shapes
from megabatch.batching import OneRow, Padded, SharedPrefix, filled_shape, packed_row, padding
from megabatch.planners import Auto, Rows, SameBits, Shapes, Tokens
from megabatch.planning.shapes import choose_shapes, plan_in_shapes, split_into_shapes
from tests.exact import models, oracle, shapes
from tests.exact.launch import of_ranks
from tests.tiers import full_unless

# What a call can be, and what becomes of it.
KINDS = ("list", "rows", "deferred", "weighed", "row")
WAYS = ("once", "calls", "opened", "told", "every", "evaluated", "planned", "lowered", "loaded")
QUICK = ["ddp:list:once", "fsdp2:deferred:calls", "ddp:compiled-row:once", "static:list:once"]
JOBS = [
    *QUICK,
    "ddp:compiled:once",
    *[f"ddp:{kind}:once" for kind in KINDS[1:]],
    *[f"ddp:{kind}:{way}" for kind in ("list", "row") for way in WAYS[1:]],
    *[f"fsdp2:{kind}:{way}" for kind in ("list", "row") for way in ("once", "calls", "opened")],
    *[f"static:{kind}:{way}" for kind in ("list", "row") for way in ("once", "calls", "opened")][1:],
    "fsdp2:deferred:once",
    "fsdp2:compiled:once",
    "plain:row:once",
]
REFUSED = [f"ddp:refused:{what}" for what in ("keys", "labels", "loss", "state", "count")]
found = of_ranks("tests.exact.shapes:run_job", {2: [*JOBS, *REFUSED], 3: JOBS})
LENGTHS = np.random.default_rng(0).lognormal(np.log(120), 0.4, 4096).clip(20, 480).astype(int)


def check(job: dict[str, Any], name: str) -> None:
    assert max(job["errors"]) <= 1e-12
    chosen = set(map(tuple, job["chosen"]))
    assert len(chosen) <= shapes.NUM_SHAPES
    if not name.endswith(("lowered", "evaluated")):  # which have smaller shapes, and those of before the choice
        assert set(map(tuple, job["seen"])) <= chosen
    if "compiled" in name:
        assert 1 < job["graphs"] <= shapes.NUM_SHAPES


@pytest.mark.parametrize("world", full_unless([2, 3], lambda _, world: world == 2))
@pytest.mark.parametrize("job", full_unless(JOBS, lambda _, job: job in QUICK))
def test_ranks(found, job: str, world: int) -> None:
    ranks = found(job, world)
    for each in ranks:
        check(each, job)
        assert each["chosen"] == ranks[0]["chosen"]
    if "compiled" in job:
        assert max(each["graphs"] for each in ranks) == shapes.NUM_SHAPES


@pytest.mark.parametrize("job", full_unless(REFUSED, lambda _, job: job.endswith(("keys", "state"))))
def test_an_error_of_one_rank_is_raised_on_all(found, job: str) -> None:
    one, other = found(job)
    assert len(one) == len(other) == (1 if job.endswith(("state", "count")) else 2)
    assert not [text for text in one + other if "\n" in text]


@pytest.mark.parametrize("way", full_unless(WAYS, lambda _, way: way in ("once", "lowered", "planned", "loaded")))
@pytest.mark.parametrize("kind", full_unless(KINDS, lambda _, kind: kind in ("list", "row")))
def test_alone(kind: str, way: str) -> None:
    check(shapes.run_job(f"plain:{kind}:{way}"), way)


@pytest.mark.parametrize("kind", ["list", "row"])
def test_labels_of_what_fills_up_are_seen(monkeypatch, kind: str) -> None:
    def unchanged(sample: dict[str, Tensor]) -> dict[str, Tensor]:
        return sample

    monkeypatch.setattr(filled_shape, "without_labels", unchanged)
    monkeypatch.setattr(packed_row, "IGNORED_LABEL", 3)
    assert max(shapes.run_job(f"plain:{kind}:once")["errors"]) > 1e-3


class Mixing(GPT2LMHeadModel):
    """A GPT-2 whose tokens see their mean."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        hidden = self.transformer(input_ids=input_ids, position_ids=position_ids).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(hidden + hidden.mean(1, keepdim=True)))


class Normed(Mixing):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm = nn.BatchNorm1d(16)


def of_kind(kind: Any, **config: Any) -> Any:
    torch.manual_seed(0)
    made = shapes.new_model().config
    made.update(config)
    return kind(made)


def accumulate(model: Any, batch: Any, loss_fn: Any = losses.next_token, **settings: Any) -> GradientAccumulator:
    gradient = GradientAccumulator(model, **{"planner": Shapes(3, Tokens(64)), **settings})
    gradient.forward_backward(batch, loss_fn)
    return gradient


def test_a_model_of_ones_own_is_refused() -> None:
    with pytest.raises(PlanError, match="Mixing, code of your own"):
        accumulate(of_kind(Mixing), shapes.samples_of([9, 9, 9, 9], 0))


def test_verify_finds_a_model_that_reads_what_fills_up(monkeypatch) -> None:
    monkeypatch.setattr(few_shapes, "_own_code", lambda model: None)
    batch = shapes.samples_of([9, 4, 17, 8], 0)
    assert not verify(of_kind(Mixing), losses.next_token, batch, planner=Shapes(2, Tokens(64))).ok


def test_a_hook_is_own_code() -> None:
    model = of_kind(GPT2LMHeadModel).to(torch.bfloat16)
    model.transformer.ln_f.register_forward_hook(lambda _, inputs, output: output + output.mean(1, keepdim=True) / 10)
    with pytest.raises(PlanError, match="code of your own"):
        accumulate(model, shapes.samples_of([9, 9, 9, 9], 0))


def test_attention_of_ones_own_is_own_code() -> None:
    model = of_kind(GPT2LMHeadModel).to(torch.bfloat16)
    model.config._attn_implementation = "mine"
    assert few_shapes._own_code(model) == "the attention 'mine'"


def test_the_longest_shape_is_within_the_positions_of_the_config() -> None:
    config = GPTJConfig(vocab_size=models.VOCABULARY, n_positions=36, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
    gradient = accumulate(GPTJForCausalLM(config), shapes.samples_of([20, 7], 0))
    gradient.finalize()
    gradient.forward_backward(shapes.samples_of([30, 7], 1), losses.next_token)
    assert max(tokens for _, tokens in gradient.last_plan.shapes.values()) == 36


def test_samples_that_are_padded_on_the_left() -> None:
    def left(values: Tensor, fill: int) -> Tensor:
        return nn.functional.pad(values, (12, 0), value=fill)

    batch = [
        {"input_ids": left(each["input_ids"], 0), "labels": left(each["labels"], -100),
         "attention_mask": left(torch.ones(9).long(), 0)}
        for each in shapes.samples_of([9, 9, 9], 0)
    ]  # fmt: skip
    accumulate(shapes.new_model(), batch).finalize()


def test_a_plan_before_the_shapes_are_chosen_is_refused() -> None:
    """The next call would refuse it: it is of other shapes."""
    batch = shapes.samples_of([9, 5, 9, 4], 0)
    gradient = GradientAccumulator(shapes.new_model(), planner=Shapes(2, Tokens(64)))
    with pytest.raises(PlanError, match=r"the first forward_backward\(\) chooses the shapes"):
        gradient.plan(batch)
    gradient.forward_backward(batch, losses.next_token)
    gradient.finalize()
    gradient.forward_backward(batch, losses.next_token, plan=gradient.plan(batch))


@pytest.mark.parametrize("state", [[[4]], [[0, 5]], [[1, 2, 3]]])
def test_shapes_that_are_none_are_not_loaded(state: Any) -> None:
    gradient = GradientAccumulator(shapes.new_model(), planner=Shapes(2, Tokens(64)))
    with pytest.raises(PlanError, match="expected pairs of rows and tokens"):
        gradient.load_state_dict({"shapes": state})


def test_a_state_with_shapes_is_for_an_accumulator_with_shapes() -> None:
    saved = accumulate(shapes.new_model(), shapes.samples_of([9, 4], 0))
    saved.finalize()
    with pytest.raises(PlanError, match="give the Shapes with which"):
        GradientAccumulator(shapes.new_model(), max_microbatch_tokens=64).load_state_dict(saved.state_dict())


@pytest.mark.parametrize("batching", [None, OneRow()])
def test_verify_compares_few_shapes(batching: Any) -> None:
    batch = shapes.samples_of([9, 4, 17, 8], 0)
    verification = verify(
        shapes.new_model(), losses.next_token, batch, planner=Shapes(2, Tokens(32)), batching=batching
    )
    assert verification.ok, verification


def test_an_encoder_that_reads_its_mask() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=models.VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=96, num_labels=7, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForTokenClassification(config).double()
    batch = [{**each, "labels": each["labels"] % 7} for each in shapes.samples_of([9, 9, 9, 4, 17], 0)]
    gradient = accumulate(model, batch, losses.classification)
    gradient.finalize()
    found = {name: each.grad for name, each in model.named_parameters()}
    model.zero_grad()
    num_labels = sum(len(each["labels"]) for each in batch)
    for each in batch:
        logits = model(input_ids=each["input_ids"][None]).logits[0]
        (nn.functional.cross_entropy(logits, each["labels"], reduction="sum") / num_labels).backward()
    expected = {name: each.grad for name, each in model.named_parameters() if not name.endswith("key.bias")}  # zero
    assert oracle.worst_error(found, expected)[0] <= 1e-12


def test_memory_that_runs_out_names_the_limit_below() -> None:
    model = shapes.new_model()
    gradient = accumulate(model, shapes.samples_of([9] * 7, 0), planner=Shapes(1, Tokens(64)))
    gradient.finalize()

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    handle = model.transformer.register_forward_pre_hook(shapes.unseen(fail))
    with pytest.raises(MegabatchError, match="micro_batch_size=3 or max_microbatch_tokens=27") as raised:
        gradient.forward_backward(shapes.samples_of([9, 4], 0), losses.next_token)
    handle.remove()
    assert "\n" not in str(raised.value)
    gradient.lower_limit(raised.value.shortage.bound)
    batch = shapes.samples_of([27, 4, 9, 9], 1)
    assert all(rows * tokens <= 27 for rows, tokens in gradient.plan(batch).shapes.values())
    gradient.forward_backward(batch, losses.next_token)
    gradient.finalize()
    expected = oracle.answer(shapes.new_model(), shapes.sums, batch).gradients
    assert oracle.worst_error({name: each.grad for name, each in model.named_parameters()}, expected)[0] <= 1e-12


def test_a_measured_limit_is_that_of_the_batch() -> None:
    batch = shapes.samples_of([3, 17, 8, 9, 30, 4, 5], 0)
    model = shapes.new_model()
    gradient = accumulate(model, batch, planner=Shapes(3, Auto(memory_bytes=2 * 2**30)))
    gradient.finalize()
    assert gradient.fit is not None
    assert gradient.fit.longest_tokens == 30
    expected = oracle.answer(shapes.new_model(), shapes.sums, batch).gradients
    assert oracle.worst_error({name: each.grad for name, each in model.named_parameters()}, expected)[0] <= 1e-12


def test_a_plan_of_other_shapes_is_refused() -> None:
    batch = shapes.samples_of([30, 4, 5, 9], 0)
    one = accumulate(shapes.new_model(), batch)
    free = GradientAccumulator(shapes.new_model(), max_microbatch_tokens=64).plan(batch)
    longer = accumulate(shapes.new_model(), shapes.samples_of([40, 7], 1)).plan(batch)
    for plan in (free, longer):
        with pytest.raises(PlanError, match="other shapes"):
            one.forward_backward(batch, losses.next_token, plan=plan)


def test_a_mask_of_another_length_in_a_later_call_is_refused() -> None:
    gradient = accumulate(shapes.new_model(), shapes.samples_of([9, 4], 0))
    gradient.finalize()
    batch = [{**sample, "attention_mask": torch.ones(2).long()} for sample in shapes.samples_of([9, 4], 1)]
    with pytest.raises(PlanError, match="another number of entries"):
        gradient.forward_backward(batch, losses.next_token)


def refused_setting(**settings: Any) -> Any:
    return lambda: accumulate(shapes.new_model(), shapes.samples_of([9, 4], 0), **settings)


def refused_call(call: Any) -> Any:
    return lambda: call(GradientAccumulator(shapes.new_model(), planner=Shapes(2, Tokens(64))))


OWN = loss(weigh=len)(lambda model, batch: (0.0, 0))
COPIED = loss(weigh=losses.count_targets)(wraps(losses.next_token)(lambda model, batch: (0.0, 0)))
REFUSALS = {
    "none": lambda: Shapes(0),
    "pairs": lambda: Shapes([(2, 3)]),
    "same bits": lambda: SameBits(Shapes(3, Tokens(64))),
    "collate": refused_setting(collate=padding.Padding([])),
    "shared prefix": refused_setting(batching=SharedPrefix()),
    "ends": refused_setting(batching=OneRow(flash_attn_kwargs=True)),
    "rows in a row": refused_setting(batching=OneRow(), planner=Shapes(3, Rows(2))),
    "length": refused_setting(length=len),
    "labels": refused_setting(batching=Padded({"labels": 0})),
    "models": lambda: accumulate([shapes.new_model(), shapes.new_model()], []),
    "own model": lambda: accumulate(models.integer_model("tokens"), []),
    "experts": lambda: accumulate(of_kind(GPT2LMHeadModel, num_experts=4), []),
    "block-sparse": lambda: accumulate(of_kind(GPT2LMHeadModel, attention_type="block_sparse"), []),
    "encoder-decoder": lambda: accumulate(of_kind(GPT2LMHeadModel, is_encoder_decoder=True), []),
    "batch norm": lambda: accumulate(of_kind(Normed), []),
    "dynamic positions": lambda: accumulate(of_kind(GPT2LMHeadModel, rope_parameters={"rope_type": "dynamic"}), []),
    "own loss": refused_call(lambda each: each.forward_backward(shapes.samples_of([3], 0), OWN)),
    "loss with the attributes of a known one": refused_call(
        lambda each: each.forward_backward(shapes.samples_of([3], 0), COPIED)
    ),
    "joint loss": refused_call(lambda each: each.forward_backward(shapes.samples_of([3], 0), JointLoss(len, len))),
    "own loop": refused_call(lambda each: each.microbatch(0, of=1).__enter__()),
    "no labels": refused_call(
        lambda each: each.forward_backward([{"input_ids": torch.ones(3).long()}] * 3, losses.next_token)
    ),
    "a mask of another length": refused_call(
        lambda gradient: gradient.forward_backward(
            [{**one, "attention_mask": torch.ones(2).long()} for one in shapes.samples_of([3, 4], 0)], losses.next_token
        )
    ),
    "labels of no sign": refused_call(
        lambda each: each.forward_backward(
            [{**sample, "labels": sample["labels"].byte()} for sample in shapes.samples_of([3, 4], 0)],
            losses.next_token,
        )
    ),
    "keys": refused_call(
        lambda each: each.forward_backward([{**shapes.samples_of([3], 0)[0], **shapes.BOXED}], losses.next_token)
    ),
}


WORDS = {
    "block-sparse": "block-sparse attention",
    "none": "at least 1", "pairs": "at least 1", "same bits": r"SameBits has the limit Shapes\(count=3",
    "collate": "a collate function other", "shared prefix": "a collate function other", "ends": "flash_attn_kwargs",
    "rows in a row": "OneRow with micro_batch_size", "length": "length=, which",
    "labels": "Padded with labels of another value",
    "models": "several models", "own model": "no model of transformers", "experts": "experts, which",
    "encoder-decoder": "an encoder-decoder", "batch norm": "BatchNorm1d, whose",
    "dynamic positions": "rotary positions", "own loss": "give one of these",
    "loss with the attributes of a known one": "give one of these", "joint loss": "give one of these",
    "own loop": r"Shapes and microbatch\(\)",
    "no labels": "expected input_ids, labels", "labels of no sign": "give signed whole numbers",
    "a mask of another length": "not all of one length",
    "keys": "have input_ids, labels, box",
}  # fmt: skip


def test_ranks_with_the_same_samples_are_refused() -> None:
    ranks = SimpleNamespace(num_all=2, degree=1)  # of tp, whose ranks may have other limits
    wrapper: Any = SimpleNamespace(models=[shapes.new_model()], is_pipeline=False, ranks=ranks)
    planner: Any = SimpleNamespace(batching=Padded(), length=None)
    with pytest.raises(PlanError, match="ranks along tp, cp or pp"):
        few_shapes.FewShapes(2, wrapper, planner)


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(what: str) -> None:
    with pytest.raises(MegabatchError, match=WORDS[what]) as raised:
        REFUSALS[what]()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("packed", [False, True])
def test_few_shapes_hold_every_sample(packed: bool) -> None:
    chosen = choose_shapes(LENGTHS[:128].tolist(), 6, num_samples=128, max_tokens=2048, packed=packed)
    assert len(chosen) <= 6
    free = filled = 0
    for start in range(0, 4096, 128):
        lengths = LENGTHS[start : start + 128].tolist()
        plan = plan_in_shapes(lengths, chosen, None, 2048, None, packed=packed)
        assert sorted(row for rows in plan.microbatches for row in rows) == list(range(128))
        for rows in plan.microbatches:
            shape = plan.shapes[rows]
            lengths_of = plan.lengths_of(rows)
            fits = sum(lengths_of) <= shape[1] if packed else len(rows) <= shape[0] and max(lengths_of) <= shape[1]
            assert fits
            assert shape[0] * shape[1] <= 2048
        free, filled = free + sum(lengths), filled + plan.padded_tokens
    assert filled <= (1.05 if packed else 1.3) * free


def test_a_cut_into_shapes_is_the_cheapest() -> None:
    cost, kinds = CostModel(seconds_per_microbatch=5.0), ((2, 9), (4, 4), (1, 3))

    def cheapest(lengths: tuple[int, ...]) -> float:
        if not lengths:
            return 0.0
        rest = (  # by brute force over every set that a shape takes
            cost.seconds(rows, tokens) + cheapest(tuple(each for i, each in enumerate(lengths) if not 1 << i & taken))
            for rows, tokens in kinds
            for taken in range(1, 1 << len(lengths), 2)
            if taken.bit_count() <= rows and all(each <= tokens for i, each in enumerate(lengths) if 1 << i & taken)
        )
        return min(rest)

    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, 10, 6).tolist()
        groups = split_into_shapes(lengths, kinds, cost.seconds)
        assert sum(cost.seconds(*shape) for shape in groups.values()) == pytest.approx(cheapest(tuple(lengths)))

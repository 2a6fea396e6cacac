"""`shapes=`: few sizes of microbatches, rows without a sample that add nothing, and a graph for each size."""

from typing import Any

import numpy as np
import pytest
import torch

from megabatch import GradientAccumulator, JointLoss, PlanError, loss, losses
from megabatch.batching import OneRow, padding
from megabatch.planning import choose_shapes
from megabatch.planning.plan import CostModel, plan_share
from megabatch.planning.shapes import plan_in_shapes
from tests.exact import models, shapes
from tests.exact.launch import of_ranks
from tests.exact.test_compiled import Counting

JOBS = ["ddp:list", "fsdp2:list", "ddp:deferred"]
found = of_ranks("tests.exact.shapes:run_job", {2: JOBS})
LENGTHS = np.random.default_rng(0).lognormal(np.log(485), 0.4, 4096).clip(50, 1692).astype(int)


def check(job: dict[str, Any]) -> None:
    assert max(job["errors"]) <= 1e-12
    assert max(map(abs, job["losses"])) <= 1e-12
    chosen = [tuple(each) for each in job["state"]]
    assert len(chosen) <= shapes.NUM_SHAPES
    assert len(set(map(tuple, job["seen"])) - set(chosen)) <= 1, "one for a sample that is longer than all before"


@pytest.mark.parametrize("kind", ["list", "deferred"])
def test_rows_without_a_sample_add_nothing(kind: str) -> None:
    check(shapes.run_job(f"plain:{kind}"))


@pytest.mark.full
@pytest.mark.parametrize("job", JOBS)
def test_ranks_have_the_same_shapes(found, job: str) -> None:
    ranks = found(job)
    for each in ranks:
        check(each)
    assert ranks[0]["state"] == ranks[1]["state"]


def test_a_planted_bug_is_seen(monkeypatch) -> None:
    monkeypatch.setattr(padding, "without_labels", dict)  # rows that fill a shape up keep their labels
    assert max(shapes.run_job("plain:list")["errors"]) > 1e-3


def test_a_graph_for_each_shape() -> None:
    torch._dynamo.reset()
    backend, model = Counting(), models.gpt2()
    model.transformer.forward = torch.compile(model.transformer.forward, backend=backend, dynamic=False)
    gradient = GradientAccumulator(model, max_microbatch_tokens=shapes.CAP, shapes=shapes.NUM_SHAPES)
    for step in range(4):
        lengths = [30, *np.random.default_rng(step).integers(3, 30, 9).tolist()]
        gradient.forward_backward(shapes.samples_of(lengths, step), losses.next_token)
        gradient.finalize()
    assert backend.num_graphs == len(gradient.state_dict()["shapes"]) == shapes.NUM_SHAPES
    torch._dynamo.reset()


def test_the_state_keeps_the_shapes() -> None:
    one, other = (GradientAccumulator(models.gpt2(), max_microbatch_tokens=shapes.CAP, shapes=3) for _ in range(2))
    one.forward_backward(shapes.samples_of([30, 4, 5, 9], 0), losses.next_token)
    one.finalize()
    other.load_state_dict(one.state_dict())
    batch = shapes.samples_of([8, 9, 2], 1)
    other.forward_backward(batch, losses.next_token)
    assert other.last_plan.microbatches == one.plan(batch).microbatches
    assert other.last_plan.shapes == one.plan(batch).shapes


def test_six_shapes_cost_little_more_than_any_six_lengths() -> None:
    """Padding of any six lengths over a run is at least 17 % on lengths like these; the free cut has 5 %."""
    chosen = choose_shapes(LENGTHS, 6, num_samples=256, max_tokens=8192)
    assert len(chosen) == 6
    assert chosen[0][1] == LENGTHS.max()
    assert all(rows * tokens <= 8192 for rows, tokens in chosen)
    free = padded = 0
    for start in range(0, 2048, 256):
        lengths = LENGTHS[start : start + 256].tolist()
        plan = plan_in_shapes(lengths, chosen, None, 8192, None)
        assert sorted(row for rows in plan.microbatches for row in rows) == list(range(256))
        assert all(plan.shapes[rows][1] >= max(plan.lengths_of(rows)) for rows in plan.microbatches)
        free, padded = free + plan_share(lengths, None, 8192, None).padded_tokens, padded + plan.padded_tokens
    assert padded <= 1.22 * free


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
        plan = plan_in_shapes(lengths, kinds, None, None, cost)
        assert sum(cost.seconds(*plan.shapes[rows]) for rows in plan.microbatches) == pytest.approx(
            cheapest(tuple(lengths))
        )


def of_samples(**added: Any) -> Any:
    return lambda: GradientAccumulator(models.gpt2(), **{"micro_batch_size": 2, "shapes": 2, **added})


def calling(batch: Any, loss_fn: Any) -> Any:
    return lambda: of_samples()().forward_backward(batch, loss_fn)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (of_samples(shapes=0), "expected a positive whole number"),
        (of_samples(shapes=[(2, 0)]), "tokens of a shape"),
        (of_samples(same_bits=True), "same_bits"),
        (of_samples(micro_batch_size=None, max_microbatch_tokens=64, collate=OneRow()), "collate="),
        (of_samples(length=len), "length="),
        (calling(shapes.samples_of([3], 0), loss(weigh=len)(lambda model, batch: None)), "leave them out"),
        (calling(shapes.samples_of([3], 0), JointLoss(len, len)), "leave them out"),
        (calling([{"input_ids": torch.ones(3).long()}] * 3, losses.next_token), "labels"),
        (
            calling([{**each, "box": torch.ones(7)} for each in shapes.samples_of([3, 4, 5], 0)], losses.next_token),
            "'box'",
        ),
        (lambda: next(of_samples()().microbatches(shapes.samples_of([3], 0))), "use forward_backward"),
    ],
)
def test_refusals(make: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words) as raised:
        make()
    assert "\n" not in str(raised.value)

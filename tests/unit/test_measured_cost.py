"""A cost that is measured in the updates that run: it decides the split alone."""

import copy
import json
import math
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from megabatch import CostModel, GradientAccumulator, PlanError
from megabatch.autotune import cost_meter
from megabatch.autotune.cost_meter import CostMeter
from megabatch.batching import OneRow
from megabatch.planners import Rows, SameBits, Tokens
from megabatch.planning.limit_search import TimedMicrobatch, cost_in_use
from megabatch.planning.plan import Plan
from tests.unit.failures.table import weighed_squares

LAUNCH, TOKEN = 0.02, 0.0005  # seconds
CAP = 64  # tokens
clock = [0.0]


@pytest.fixture(autouse=True)
def in_time_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a clock that only `Slow` moves stand in for the machine's, which other work moves too."""
    monkeypatch.setattr(cost_meter, "time", SimpleNamespace(perf_counter=lambda: clock[0]))


class Slow(nn.Module):
    """A layer whose forward takes the time of a launch and of its tokens."""

    def __init__(self, launch: float, token: float) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1).double()
        self.launch, self.token = launch, token

    def forward(self, x: Tensor) -> Tensor:
        clock[0] += self.launch + self.token * x.shape[0] * x.shape[1]
        return self.linear(x)


def samples(lengths: list[int]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [{"x": torch.randn(length, 1, generator=generator, dtype=torch.float64)} for length in lengths]


def trained(model: nn.Module, batches: list[Any], plans: list[Any] | None = None, cost: Any = None) -> Any:
    """Return the accumulator, and each update's gradient and plan; ``plans`` are those of another run."""
    gradient, found, cuts = GradientAccumulator(model, planner=Tokens(CAP, cost)), [], []
    for index, batch in enumerate(batches):
        expected = gradient.plan(batch) if plans is None else plans[index]
        gradient.forward_backward(batch, weighed_squares, plan=None if plans is None else plans[index])
        assert gradient.last_plan is not None
        assert gradient.last_plan.microbatches == expected.microbatches
        gradient.finalize()
        found.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
        cuts.append(gradient.last_plan)
    return gradient, found, cuts


def slow(launch: float, token: float) -> Slow:
    torch.manual_seed(0)
    return Slow(launch, token)


LENGTHS = [2, 3, 20, 30]  # of few samples, with relative costs in two or more microbatches


def test_few_samples_become_one_microbatch_where_a_launch_is_dear() -> None:
    batches = [samples(LENGTHS), samples([30, 31, 2]), samples([1, 1, 32, 2]), samples([2, 2, 16])]
    gradient, found, plans = trained(slow(LAUNCH, 1e-6), batches, cost="measure")
    assert plans[0].seconds is None, "nothing is measured yet"
    assert plans[0].num_microbatches > plans[-1].num_microbatches == 1
    assert gradient.cost is not None
    assert gradient.cost.seconds(3, 16) == pytest.approx(LAUNCH, rel=0.01)
    assert plans[-1].seconds == pytest.approx(LAUNCH, rel=0.01)
    # The split is all that a measured cost decides: the same cuts have the same bits.
    _, expected, _ = trained(slow(0, 0), batches, plans)
    assert all(map(torch.equal, found, expected))


def test_samples_of_other_lengths_stay_apart_where_tokens_are_dear() -> None:
    gradient, _, plans = trained(slow(0, TOKEN), [samples(LENGTHS)] * 3, cost="measure")
    assert [plan.padding > 0 for plan in plans] == [True, True, False]
    assert gradient.cost.seconds(1, 60) == pytest.approx(60 * TOKEN, rel=0.02)


def test_a_measured_cost_can_be_given_to_another_run() -> None:
    batches = [samples(LENGTHS), samples([30, 31, 2]), samples([1, 1, 32, 2])]
    gradient, _, _ = trained(slow(LAUNCH, 0), batches, cost="measure")
    other = GradientAccumulator(slow(0, 0), planner=Tokens(CAP, gradient.cost))
    for batch in batches:
        assert gradient.plan(batch) == other.plan(batch)
        other.forward_backward(batch, weighed_squares)
        other.finalize()
        assert other.cost == gradient.cost is not None


def test_nothing_changes_inside_of_an_update_or_where_sizes_are_alike() -> None:
    gradient = GradientAccumulator(slow(0, TOKEN), planner=Tokens(CAP, "measure"))
    for _ in range(3):
        gradient.forward_backward(samples([3, 60]), weighed_squares)
    assert gradient.cost is None
    gradient.finalize()
    assert gradient.cost is not None
    alike = GradientAccumulator(slow(0, TOKEN), planner=Rows(1, "measure"))
    for _ in range(4):
        alike.forward_backward(samples([9, 9, 10]), weighed_squares)
        alike.finalize()
    assert alike.cost is None


def test_a_copy_measures_on_its_own() -> None:
    gradient, _, _ = trained(slow(LAUNCH, 0), [samples(LENGTHS)] * 3, cost="measure")
    other, cost = copy.deepcopy(gradient), gradient.cost
    other.load_state_dict({"cost": asdict(CostModel())})
    assert gradient.cost == cost is not None
    assert other.cost == CostModel()


def test_a_state_has_the_cost_and_measuring_goes_on() -> None:
    batches = [samples(LENGTHS), samples([30, 31, 2]), samples([1, 1, 32, 2])]
    gradient, _, _ = trained(slow(LAUNCH, 0), batches, cost="measure")
    state = json.loads(json.dumps(gradient.state_dict()))
    assert state == {"cost": asdict(gradient.cost)}
    resumed = GradientAccumulator(slow(0, TOKEN), planner=Tokens(CAP, "measure"))
    assert resumed.state_dict() == {}
    resumed.load_state_dict(state)
    assert resumed.cost == gradient.cost
    assert resumed.plan(batches[0]) == gradient.plan(batches[0])
    for _ in range(2):
        resumed.forward_backward(batches[0], weighed_squares)
        resumed.finalize()
    resumed.load_state_dict({})
    for batch in (*batches, *batches):
        resumed.forward_backward(batch, weighed_squares)
        resumed.finalize()
    assert resumed.cost.seconds(1, 60) == pytest.approx(60 * TOKEN, rel=0.02), "that of the machine of now"
    given = GradientAccumulator(slow(0, 0), max_microbatch_tokens=CAP)
    given.load_state_dict(state)
    assert given.cost is None, "nothing is measured here"


def timed_shapes(seconds: tuple[float, ...], sync: str = "every", parts: Any = None, again: Any = None) -> Any:
    """Return what a meter keeps of three microbatches of a wrapper whose ranks may wait, by the tokens of each."""
    ranks = SimpleNamespace(num_all=2, degree=2, is_alone=False)
    wrapper: Any = SimpleNamespace(device=torch.device("cpu"), ranks=ranks)
    planner: Any = SimpleNamespace(batching=SimpleNamespace(has_rows=True))
    plan = Plan(((0,), (1,), (2,)), (4, 16, 40), (0, 1, 2), sync, "")
    prepared: Any = SimpleNamespace(plan=plan, parts=parts or {})
    meter = CostMeter(wrapper, planner)
    for times in (seconds, again or ()):
        steps: Any = (SimpleNamespace(index=index) for index in range(len(times)))
        call: Any = SimpleNamespace(prepared=prepared, is_new=False)
        for step in meter.surround_steps(steps, call):
            clock[0] += times[step.index]
    return {tokens: pytest.approx(kept) for (_, tokens), kept in meter._seconds.items()}


def test_a_meter_keeps_the_least_time_of_a_shape() -> None:
    assert timed_shapes((1.0, 2.0, 3.0), again=(9.0, 1.5, 9.0)) == {4: 1.0, 16: 1.5, 40: 3.0}


def test_a_microbatch_that_ran_again_in_parts_is_not_timed() -> None:
    assert timed_shapes((1.0, 2.0, 3.0), parts={1: [(1,)]}) == {4: 1.0, 40: 3.0}


@pytest.mark.parametrize("sync", ["last", "replica_last"])
def test_the_microbatch_that_waits_for_other_ranks_is_not_timed(sync: str) -> None:
    assert timed_shapes((1.0, 2.0, 30.0), sync) == {4: 1.0, 16: 2.0}


# The fit

factors = st.floats(1e-4, 1)


@given(factors, factors, st.integers(0, 4), st.floats(2, 100))
def test_interruptions_do_not_move_a_cost(launch: float, token: float, first: int, by: float) -> None:
    """One microbatch in five takes longer."""
    cost = CostModel(launch, token, 0.0)
    shapes = [(1 + index % 6, 10 + 7 * (index // 6)) for index in range(30)]
    timed = [
        TimedMicrobatch(*shape, cost.seconds(*shape) * (by if index % 5 == first else 1))
        for index, shape in enumerate(shapes)
    ]
    found = cost_in_use(timed, 0.0)
    assert found is not None
    for shape in shapes:
        assert found.seconds(*shape) == pytest.approx(cost.seconds(*shape), rel=0.3)


def test_a_launch_costs_at_least_what_its_host_takes() -> None:
    timed = [TimedMicrobatch(rows, 100, 0.001 * rows) for rows in (1, 4, 9)]
    free, waiting = cost_in_use(timed, 0.0), cost_in_use(timed, 0.5)
    assert free is not None
    assert waiting is not None
    assert free.seconds_per_microbatch == pytest.approx(0.001 / 16)
    assert waiting.seconds_per_microbatch == 0.5


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 99), st.floats(1e-6, 1e3)), max_size=12))
def test_whatever_was_timed_has_a_cost_that_splits(rows: list[tuple[int, int, float]]) -> None:
    cost = cost_in_use([TimedMicrobatch(*each) for each in rows], 0.0)
    if cost is not None:
        assert cost.seconds_per_microbatch > 0
        assert min(cost.seconds_per_token, cost.seconds_per_pair) >= 0
        assert all(map(math.isfinite, (cost.seconds_per_microbatch, cost.seconds_per_token, cost.seconds_per_pair)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"planner": Tokens(8, "measure"), "batching": OneRow()}, "packs samples by their tokens alone"),
        ({"planner": SameBits(Tokens(8, "measure"))}, "SameBits and cost="),
    ],
)
def test_a_cost_that_decides_nothing_is_refused(settings: dict[str, Any], words: str) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=16, n_embd=4, n_layer=1, n_head=1))
    with pytest.raises(PlanError, match=words):
        GradientAccumulator(model, **settings)


@pytest.mark.parametrize(
    ("device", "num_all", "words"), [("cpu", 2, "ranks along cp, tp or pp"), ("meta", 1, "of type")]
)
def test_ranks_that_split_alike_and_other_devices_are_refused(device: str, num_all: int, words: str) -> None:
    wrapper: Any = SimpleNamespace(device=torch.device(device), ranks=SimpleNamespace(num_all=num_all, degree=1))
    planner: Any = SimpleNamespace(batching=SimpleNamespace(has_rows=True))
    with pytest.raises(PlanError, match=words):
        CostMeter(wrapper, planner)

"""plan() and CostModel: shares, microbatches, prices, and the words that explain them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch import CostModel, Plan, plan

lengths_of_updates = st.lists(st.integers(0, 64), max_size=30)
bounds = st.one_of(
    st.fixed_dictionaries({"micro_batch_size": st.integers(1, 8)}),
    st.fixed_dictionaries({"max_microbatch_tokens": st.integers(64, 256)}),
)
degrees = st.integers(1, 5)

EXPLAINED = {
    Plan(((0, 1), (2,), ()), (3, 5, 2), steps=(2, 1)): [
        "3 samples in 3 microbatches of 1 to 2, 1 of them dummy microbatches of no weight",
        "10 real tokens, 20 computed: 50.0% padding",
        "sync last",
        "schedule steps of 2, 1 microbatches",
    ],
    plan([2, 2], micro_batch_size=2, cost=CostModel(1.0, 0.5, 0.0, 2**30, 2**28))[0]: [
        "2 samples in 1 microbatch of 2",
        "4 real tokens, 4 computed: 0.0% padding",
        "sync last",
        "predicted 3 seconds",
        "predicted peak 2.00 GiB",
    ],
}  # fmt: skip


@given(lengths_of_updates, bounds, degrees)
def test_every_sample_runs_once_on_one_rank(lengths, bound, dp_degree):
    plans = plan(lengths, dp_degree=dp_degree, **bound)
    assert len(plans) == dp_degree
    assert sorted(sample for each in plans for sample in each.samples) == list(range(len(lengths)))
    for each in plans:
        assert each.lengths == tuple(lengths[sample] for sample in each.samples)
        assert sorted(row for rows in each.microbatches for row in rows) == list(range(len(each.lengths)))


@given(lengths_of_updates, bounds, degrees)
def test_every_rank_runs_as_many_microbatches_with_stand_ins_last(lengths, bound, dp_degree):
    plans = plan(lengths, dp_degree=dp_degree, **bound)
    assert len({each.num_microbatches for each in plans}) == 1
    assert any(all(each.microbatches) for each in plans)  # the longest share has no dummy microbatch
    for each in plans:
        assert [bool(rows) for rows in each.microbatches] == sorted(map(bool, each.microbatches), reverse=True)


@given(lengths_of_updates, bounds, degrees)
def test_the_bound_holds(lengths, bound, dp_degree):
    for each in plan(lengths, dp_degree=dp_degree, **bound):
        for rows in filter(None, each.microbatches):
            assert len(rows) <= bound.get("micro_batch_size", len(rows))
            assert len(rows) * max(each.lengths[row] for row in rows) <= bound.get("max_microbatch_tokens", 10**9)


@given(lengths_of_updates, bounds, degrees)
def test_padding_is_what_is_computed_and_not_real(lengths, bound, dp_degree):
    for each in plan(lengths, dp_degree=dp_degree, **bound):
        assert 0 <= each.padding < 1
        assert each.num_tokens == sum(each.lengths)
        assert each.padded_tokens * (1 - each.padding) == pytest.approx(each.num_tokens)


SPLIT = [  # lengths, cap -> microbatches: one more is worth a sixteenth of the cap, here 5 tokens
    ([20, 16], 80, [(0, 1)]),  # 4 tokens of padding
    ([20, 12], 80, [(0,), (1,)]),  # 8
]


@pytest.mark.parametrize(("lengths", "cap", "microbatches"), SPLIT)
def test_padding_is_weighed_against_microbatches(lengths, cap, microbatches):
    assert list(plan(lengths, max_microbatch_tokens=cap)[0].microbatches) == microbatches


def test_a_price_is_predicted_only_by_a_model_that_was_given():
    cost = CostModel(10.0, 1.0, 0.0, 0.0, 2.0)
    (without,) = plan([4, 2, 1], micro_batch_size=2)
    (priced,) = plan([4, 2, 1], micro_batch_size=2, cost=cost)
    assert (without.seconds, without.peak_bytes) == (None, None)
    assert sorted(priced.microbatches) == [(0,), (1, 2)]
    assert (priced.seconds, priced.peak_bytes) == (10 + 4 + 10 + 4, 8)


@pytest.mark.parametrize(("explained", "lines"), EXPLAINED.items(), ids=range(len(EXPLAINED)))
def test_explained(explained, lines):
    assert explained.explain().splitlines() == lines


class OfLaunches(CostModel):
    """A price of its own: next to nothing but launches."""

    def seconds(self, rows: int, longest: int) -> float:
        return 1000.0 + super().seconds(rows, longest)


def test_a_cost_model_with_a_price_of_its_own_decides_the_cut():
    (found,) = plan([8, 7, 4, 4, 2, 2, 1, 1], max_microbatch_tokens=32, cost=OfLaunches())
    assert found.num_microbatches == 2


MODEL = CostModel(
    seconds_per_microbatch=10.0, seconds_per_token=2.0, seconds_per_pair=0.5, bytes_fixed=100.0, bytes_per_token=3.0
)
PRICES = [  # rows, longest, seconds, bytes
    (1, 1, 10 + 1 * (2 + 0.5), 103),
    (2, 8, 10 + 16 * (2 + 4), 148),
    (3, 0, 10, 100),
]
sizes = st.integers(1, 1000)


@pytest.mark.parametrize(("rows", "longest", "seconds", "size_bytes"), PRICES)
def test_the_formula(rows, longest, seconds, size_bytes):
    assert MODEL.seconds(rows, longest) == seconds
    assert MODEL.peak_bytes(rows, longest) == size_bytes


@given(sizes, sizes)
def test_the_price_grows_with_rows_and_with_length(rows, longest):
    assert MODEL.seconds(rows + 1, longest) > MODEL.seconds(rows, longest)
    assert MODEL.seconds(rows, longest + 1) > MODEL.seconds(rows, longest)


def test_by_default_attention_costs_as_much_as_the_rest_at_4096_tokens():
    assert CostModel(seconds_per_pair=0).sample_seconds(4096) * 2 == CostModel().sample_seconds(4096)

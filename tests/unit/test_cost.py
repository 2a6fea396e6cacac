"""CostModel: its formula, and what every model of cost must keep to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch import CostModel

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


@given(sizes)
def test_a_sample_on_its_own_pays_no_launch(length):
    assert MODEL.sample_seconds(length) == MODEL.seconds(1, length) - MODEL.seconds_per_microbatch


def test_by_default_attention_costs_as_much_as_the_rest_at_4096_tokens():
    assert CostModel(seconds_per_pair=0).sample_seconds(4096) * 2 == CostModel().sample_seconds(4096)

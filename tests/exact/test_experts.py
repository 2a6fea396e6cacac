"""Experts on two ranks: a balance per sequence is exact under every cut, and biases follow the load of the update."""

import pytest

from tests.exact.launch import of_ranks

pytestmark = pytest.mark.slow
BALANCE = [f"balance/{wrapper}/{size}/float64" for wrapper in ("plain", "ddp", "fsdp2") for size in (1, 3)]
BALANCE += ["balance/ep/1/float64", "balance/ep-fsdp2/3/float64"]
BALANCE_FLOAT32 = [f"balance/{wrapper}/2/float32" for wrapper in ("plain", "fsdp2")]
BIAS = [
    "bias/plain/once", "bias/plain/repeated", "bias/plain/repeated-reentrant", "bias/ddp/once", "bias/ddp/repeated",
    "bias/fsdp2/once", "bias/fsdp2/repeated", "bias/ep/once", "bias/ep/repeated", "bias/ep-fsdp2/once",
]  # fmt: skip


results = of_ranks("tests.exact.experts:run_job", {2: [*BALANCE, *BALANCE_FLOAT32, *BIAS]})


@pytest.mark.parametrize("job", BALANCE)
def test_a_balance_per_sequence_is_exact(results, job):
    assert max(results(job)) <= 1e-12


@pytest.mark.parametrize("job", BALANCE_FLOAT32)
def test_a_balance_in_float32_is_as_good_as_uncut(results, job):
    assert max(results(job)) <= 4


@pytest.mark.parametrize("job", BIAS)
def test_biases_follow_the_load_of_the_whole_update(results, job):
    assert results(job) == [[], []]

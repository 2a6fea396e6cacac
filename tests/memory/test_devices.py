"""Devices by name, and what a rank can send along which axis."""

import pytest
import torch

from megabatch import PlanError
from megabatch.simulate import DEVICES, device_named
from megabatch.simulate.traffic import find_axis

AXES = {"dp_replicate": 2, "dp_shard": 4, "tp": 2}
H100 = DEVICES["h100-80g"]


def test_devices_have_their_names_and_short_ones() -> None:
    assert all(device_named(name.upper()) is device for name, device in DEVICES.items())
    assert device_named("h100") is H100
    with pytest.raises(PlanError, match="the device 'h1' is not known; name one of a100-40g,"):
        device_named("h1")


def test_a_share_of_the_printed_rate_is_reached() -> None:
    assert H100.flops_per_second(torch.bfloat16) == 0.6 * 989e12
    assert H100.flops_per_second(torch.float8_e4m3fn) == H100.flops_per_second(torch.float32), "not listed"


@pytest.mark.parametrize(
    ("ranks", "rate", "why"),
    [
        (range(8), 360e9, "one node: NVLink"),
        (range(16), 360e9, "eight cards of 50 GB/s carry more than NVLink"),
        ([0, 8], 50e9, "one card"),
        ([0, 1, 8, 9], 100e9, "two cards"),
    ],
)
def test_between_nodes_the_cards_of_a_node_help_each_other(ranks: list[int], rate: float, why: str) -> None:
    assert H100.sending_bytes_per_second(list(ranks)) == pytest.approx(rate), why


@pytest.mark.parametrize(
    ("ranks", "rounds", "microseconds"),
    [
        ([0], 2, 0),
        (range(8), 1, 14 + 7 * 1.9),
        (range(512), 1, 14 + 448 * 1.9 + 63 * 4),
        (range(8), 2, 14 + 2 * 7 * 1.9),
        (range(512), 2, 14 + 2 * (7 * 1.9 + 6 * 4)),  # a tree
    ],
)
def test_a_collective_waits_for_its_messages(ranks: list[int], rounds: int, microseconds: float) -> None:
    assert H100.latency_seconds(list(ranks), rounds) == pytest.approx(microseconds / 1e6)
    assert DEVICES["cpu"].latency_seconds(list(ranks), rounds) == 0


@pytest.mark.parametrize(
    ("ranks", "axis"),
    [([0, 1], "tp"), ([0, 2, 4, 6], "dp_shard"), ([0, 8], "dp_replicate"), (range(0, 16, 2), "dp_replicate+dp_shard"),
     (range(16), "dp_replicate+dp_shard+tp")],
)  # fmt: skip
def test_a_group_is_named_by_the_axes_it_lies_along(ranks: list[int], axis: str) -> None:
    assert find_axis(list(ranks), AXES) == axis


def test_without_axes_a_group_is_of_the_world() -> None:
    assert find_axis([0, 1], {}) == "world"

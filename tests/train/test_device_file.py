"""Device files: measured figures are written, read, and used; wrong files are named in one line."""

import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from megabatch import PlanError
from megabatch.simulate import DEVICES
from megabatch.simulate.ledger import Ledger
from megabatch.train.plan.device_file import (
    REPEATS,
    WARM_UP,
    device_toml,
    fit_line,
    measure_device,
    measure_seconds,
    read_device,
)

CPU = torch.device("cpu")
FIGURES: dict[str, Any] = {
    "like": "h100-80g",
    "name": "a test",
    "torch": "2.13",
    "memory_bytes": 80 * 2**30,
    "memory_bytes_per_second": 3e12,
    "launch_seconds": 5e-6,
    "matmul_flops_per_second": {"float32": 5e13, "bfloat16": 7e14},
    "attention_flops_per_second": {"float32": 3e13, "bfloat16": 4e14},
    "all_gather": {"ranks": 8, "ranks_per_node": 8, "latency_seconds": 40e-6, "bytes_per_second": 3.1e11},
}


def changed(path: str, value: object) -> dict[str, Any]:
    """Return the figures with one of another value; None: without it."""
    figures = {key: dict(each) if isinstance(each, dict) else each for key, each in FIGURES.items()}
    table, _, key = path.rpartition(".")
    place = figures[table] if table else figures
    place[key] = value
    if value is None:
        del place[key]
    return figures


def written(tmp_path: Path, figures: dict[str, Any]) -> Path:
    path = tmp_path / "device.toml"
    path.write_text(device_toml(figures))
    return path


def test_a_measurement_of_this_machine_is_read_as_it_was(tmp_path: Path) -> None:
    lines: list[str] = []
    figures = measure_device(CPU, "cpu", lines.append)
    path = written(tmp_path, figures)
    assert tomllib.loads(path.read_text()) == figures
    device = read_device(path)
    assert device.flops_per_second(torch.bfloat16) == figures["matmul_flops_per_second"]["bfloat16"]
    assert device.launch_seconds == figures["launch_seconds"]
    assert device.memory_bytes_per_second == figures["memory_bytes_per_second"]
    assert len(lines) == 7, "one line per figure"


def test_the_time_is_the_median_after_the_warm_up_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, takes = [0.0], iter([4.0] * WARM_UP + [8.0] + [0.25] * (REPEATS - 1))
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def run() -> None:
        clock[0] += next(takes)

    assert measure_seconds(run, CPU) == 0.25
    assert next(takes, None) is None


def test_two_transfers_tell_latency_and_bandwidth() -> None:
    assert fit_line((1000, 1.5), (9000, 5.5)) == (1.0, 2000.0)
    with pytest.raises(PlanError, match="measure again without other work"):
        fit_line((1000, 1.5), (9000, 1.5))


def test_figures_of_the_file_replace_those_of_the_data_sheet(tmp_path: Path) -> None:
    device, like = read_device(written(tmp_path, FIGURES)), DEVICES["h100-80g"]
    ranks = list(range(8))
    assert device.sending_bytes_per_second(ranks) == 3.1e11
    assert device.latency_seconds(ranks, 1) == pytest.approx(40e-6)
    assert device.network_bytes_per_second == like.network_bytes_per_second
    assert device.flops_per_second(torch.bfloat16, is_attention=True) == 4e14
    assert device.flops_per_second(torch.float64) == like.flops_per_second(torch.float64)


def test_a_ring_over_nodes_tells_of_the_network(tmp_path: Path) -> None:
    device = read_device(written(tmp_path, changed("all_gather.ranks_per_node", 4)))
    assert device.sending_bytes_per_second(list(range(8))) == pytest.approx(3.1e11)
    assert device.sending_bytes_per_second([0, 4]) == pytest.approx(3.1e11 / 4)
    assert device.latency_seconds(list(range(8)), 1) == pytest.approx(40e-6)


@pytest.mark.parametrize(("key", "is_attention"), [("matmul", False), ("attention", True)])
def test_twice_the_rate_takes_half_of_the_arithmetic(tmp_path: Path, key: str, is_attention: bool) -> None:
    seconds: list[float] = []
    for rate in (1e8, 2e8):
        device = read_device(written(tmp_path, changed(f"{key}_flops_per_second.float32", rate)))
        query = torch.ones(1, 2, 64, 8)
        with Ledger(device) as ledger:
            if is_attention:
                torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
            else:
                torch.mm(query[0, 0], query[0, 0].T)
        seconds.append(ledger.log.record.arithmetic_seconds)
    assert seconds[0] == pytest.approx(2 * seconds[1])
    assert seconds[1] == pytest.approx(ledger.log.record.flops / 2e8)


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("matmul_flops_per_second.bfloat16", 989.0, "has matmul_flops_per_second.bfloat16 = 989.0; it must be"),
        ("matmul_flops_per_second.float32", None, "has no matmul_flops_per_second.float32; write it with"),
        ("matmul_flops_per_second.fp8", 1e15, "has the unknown key matmul_flops_per_second.fp8; remove it"),
        ("attention_flops_per_second", None, "has no attention_flops_per_second; write it with"),
        ("attention_flops_per_second", 1e12, "has attention_flops_per_second = 1000000000000.0; it must be a table"),
        ("memory_bytes", True, "has memory_bytes = True; it must be a valid number"),
        ("memory_bytes_per_second", float("nan"), "has memory_bytes_per_second = nan; it must be"),
        ("launch_seconds", 6000.0, "has launch_seconds = 6000.0; it must be at most 10: correct it or its unit"),
        ("launch_seconds", "6us", "has launch_seconds = '6us'; it must be a valid number"),
        ("all_gather.ranks", 8.5, "has all_gather.ranks = 8.5; it must be a whole number"),
        ("all_gather.latency_seconds", None, "has no all_gather.latency_seconds; write it with"),
        ("like", "abacus", "has like = 'abacus'; it must be 'a100-40g'"),
        ("name", 3, "has name = 3; it must be a valid string"),
        ("update", 3, "has the unknown key update; remove it"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line(tmp_path: Path, path: str, value: object, line: str) -> None:
    file = tmp_path / "device.toml"
    file.write_text(tomli_w.dumps(changed(path, value)))
    with pytest.raises(PlanError) as caught:
        read_device(file)
    assert str(caught.value).startswith(f"the device file {file} {line}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"like = ", b"\xff", b'{"like": "cpu"}'])
def test_what_is_no_toml_is_one_line(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "device.toml"
    file.write_bytes(text)
    with pytest.raises(PlanError, match=r"cannot be read .*; write it with megabatch plan --measure FILE") as caught:
        read_device(file)
    assert "\n" not in str(caught.value)

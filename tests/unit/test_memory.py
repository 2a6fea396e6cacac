"""Memory of an optimizer and of a device, known before either is there."""

import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn, optim

from megabatch.autotune import memory
from megabatch.autotune.memory import device_text, estimate_state_bytes, measure_budget
from megabatch.core.mesh import DataRanks

KEPT: list[tuple[Callable[..., optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {}), (optim.SGD, {"momentum": 0.9}), (optim.AdamW, {}), (optim.AdamW, {"amsgrad": True}),
    (optim.Adam, {"amsgrad": True}), (optim.NAdam, {}), (optim.RAdam, {}), (optim.Adamax, {}), (optim.Adadelta, {}),
    (optim.RMSprop, {}), (optim.RMSprop, {"momentum": 0.9, "centered": True}), (optim.Adagrad, {}), (optim.ASGD, {}),
    (optim.Rprop, {}), (optim.Muon, {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), KEPT)
def test_what_an_optimizer_will_keep_is_known_before_its_first_step(
    kind: Callable[..., optim.Optimizer], options: dict[str, Any]
) -> None:
    parameter = nn.Parameter(torch.ones(60, 50))
    parameter.grad = torch.ones(60, 50)
    optimizer = kind([parameter], **options)
    there = held(optimizer)
    to_come = estimate_state_bytes(optimizer, [parameter])
    optimizer.step()
    assert to_come == held(optimizer) - there
    assert estimate_state_bytes(optimizer, [parameter]) == (0.0 if held(optimizer) else to_come)


def held(optimizer: optim.Optimizer) -> int:
    """Bytes of the states as large as the parameter."""
    tensors = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    return sum(each.nbytes for each in tensors if each.ndim)


def test_the_limit_of_addresses_bounds_what_is_free() -> None:
    own, most = resource.getrlimit(resource.RLIMIT_AS)
    used = 1024 * int(re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])  # pyright: ignore
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, most))
        assert 0 <= memory.free_bytes() <= 2**26
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (own, most))
    assert memory.free_bytes() > 2**26


def test_a_cap_holds_while_it_is_measured_too() -> None:
    cpu = torch.device("cpu")
    free, capped = (measure_budget(cpu, cap, DataRanks()) for cap in (None, memory.resident_bytes() + 2**26))
    assert free.there > free.limit
    assert capped.there == capped.limit < free.limit


def test_a_container_with_another_limit_is_another_device(tmp_path: Path) -> None:
    process, group = tmp_path / "proc" / "self", tmp_path / "cgroup" / "here"
    process.mkdir(parents=True)
    group.mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: {64 * 2**20} kB\n")
    (process / "cgroup").write_text("0::/here\n")
    (group / "memory.stat").write_text("anon 4096\n")
    texts: list[str] = []
    for limit in ("max", str(16 * 2**30), str(200 * 2**30)):
        (group / "memory.max").write_text(limit)
        with patch.object(memory, "PROC", tmp_path / "proc"), patch.object(memory, "CGROUP", tmp_path / "cgroup"):
            texts.append(device_text(torch.device("cpu")))
    assert texts == ["cpu, 64 GiB", "cpu, 16 GiB", "cpu, 64 GiB"]

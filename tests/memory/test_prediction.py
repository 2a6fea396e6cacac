"""The prediction beside real updates: what the ledger counts of their tensors, and what ranks send.

What a process takes beyond its tensors depends on its processor: benchmarks/memory.py measures it.
"""

import functools
import warnings
from typing import Any

import pytest

from megabatch.simulate import Simulated
from megabatch.simulate.ledger import Ledger
from megabatch.simulate.replica import Replica
from tests.exact.launch import Found, of_ranks
from tests.memory.runs import Run, counted, predicted
from tests.tiers import full_unless

pytestmark = pytest.mark.slow
COUNTED = {
    "plain": Run("toy", rows=2, tokens=16, microbatches=2),
    "long": Run("toy", rows=2, tokens=512),  # 25 % more with a mask of tokens x tokens
    "ddp last": Run("toy", "ddp", 2, 16, 2),
    "ddp every": Run("toy", "ddp", 2, 16, 2, "every"),
    "fsdp2 last": Run("toy", "fsdp2", 2, 16, 2),
    "fsdp2 every": Run("toy", "fsdp2", 2, 16, 2, "every"),
    "cp": Run("toy", "cp", 2, 16, 2, "every"),
    "cp, recompute": Run("25m", "cp", 2, 256, 2, recompute="yes"),
    "tp": Run("toy", "tp", 2, 16, 2, "every"),
    "tp, large vocabulary": Run("wide", "tp", 16, microbatches=2, sync="every"),
    "recompute": Run(rows=8, recompute="yes"),
    "selective": Run(rows=8, recompute="selective"),
    "selective, fsdp2": Run("25m", "fsdp2", 8, microbatches=2, sync="every", recompute="selective"),
    "mixed": Run("toy", "fsdp2", 2, 16, 2, precision="mixed"),
    "large vocabulary": Run("wide", rows=16, microbatches=2),
    "large vocabulary, fsdp2": Run("wide", "fsdp2", 16, microbatches=2, precision="mixed"),
}
COUNTED |= {
    "offload": Run("toy", "offload", 2, 16, 2, "every"),
    "offload last": Run("25m", "offload", 1, 32, 2, "last", "adamw-fused"),
    "offload, mixed": Run("toy", "offload", 2, 16, 2, precision="mixed"),
}
MARGIN = 0.05
MESSAGES = (2, 1536, 768)  # calls, bytes gathered, bytes sent; of two ranks
SLOW = ("recompute", "cp, recompute", "selective, fsdp2", "tp, large vocabulary", "offload last")
TIERS = full_unless(COUNTED, lambda _, name: name not in SLOW)


real = of_ranks(
    "tests.memory.test_prediction:count",
    {world: [name for name, run in COUNTED.items() if run.world == world] for world in (1, 2)},
)


def count(name: str) -> dict[str, Any]:
    """The job of a rank."""
    return counted(str(COUNTED[name]))


@functools.cache
def simulated(run: Run) -> Simulated:
    return simulated_anew(run)


def simulated_anew(run: Run) -> Simulated:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about what it is going to rename
        return predicted(run)


@pytest.mark.parametrize("name", TIERS)
def test_the_ledger_counts_on_real_tensors_what_it_counts_on_fake_ones(real: Found, name: str) -> None:
    found = simulated(COUNTED[name])
    ratio = found.peak_bytes / real(name)[0]["peak_bytes"]
    assert 0.995 < ratio < 1.03, ratio  # fake operations keep a little more


@pytest.mark.parametrize("name", ["offload", pytest.param("offload last", marks=pytest.mark.full), "offload, mixed"])
def test_what_is_offloaded_is_counted_on_the_host(real: Found, name: str) -> None:
    found = simulated(COUNTED[name])
    assert found.host_bytes / real(name)[0]["host_bytes"] == pytest.approx(1, abs=0.01)
    whole = 4 * found.num_parameters
    assert found.host_bytes > 3 * whole / 2


def test_a_layer_waits_for_the_keys_of_other_ranks() -> None:
    """Each microbatch gathers keys and values as often as it sends their gradients back, and as many bytes."""
    found = simulated(COUNTED["cp"])
    awaited = sum(found.times[name] * phase.awaited_seconds for name, phase in found.phases.items() if name != "step")
    back = next(each.seconds for each in found.sent if each.collective == "all_to_all")
    assert awaited == pytest.approx(2 * back)
    assert back > 0
    others = simulated(COUNTED["fsdp2 every"]).phases
    assert {phase.awaited_seconds for name, phase in others.items() if name != "step"} == {0.0}


@pytest.mark.parametrize("name", ["ddp last", "ddp every"])
def test_without_buckets_ddp_would_be_predicted_wrong(real: Found, monkeypatch, name: str) -> None:
    monkeypatch.setattr(Replica, "forward", lambda replica, *inputs, **named: replica.module(*inputs, **named))
    ratio = simulated_anew(COUNTED[name]).peak_bytes / real(name)[0]["peak_bytes"]
    assert ratio < 1 - MARGIN, ratio


def test_without_resized_storages_fsdp2_would_be_predicted_wrong(real: Found, monkeypatch) -> None:
    monkeypatch.setattr(Ledger, "_watch_resize", lambda ledger, resize: resize)
    ratio = simulated_anew(COUNTED["fsdp2 every"]).peak_bytes / real("fsdp2 every")[0]["peak_bytes"]
    assert ratio > 1 + MARGIN, ratio


@pytest.mark.parametrize("name", TIERS)
def test_what_is_sent_is_what_real_ranks_send(real: Found, name: str) -> None:
    run = COUNTED[name]
    found = {f"{each.collective}:{each.axis}": [each.calls, each.buffer_bytes, each.sent_bytes]
             for each in simulated(run).sent}  # fmt: skip
    if run.axes:  # what the ranks tell each other before a call and after an update is not simulated
        key = f"all_gather:{[*run.axes][-1]}"
        found[key] = [each + more for each, more in zip(found.get(key, [0, 0, 0]), MESSAGES, strict=True)]
    assert real(name)[0]["sent"] == found

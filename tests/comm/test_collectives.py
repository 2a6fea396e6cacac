"""A sync policy is proved by counting: collectives and bytes of one update, per rank."""

import pytest

from tests.exact.launch import launch

pytestmark = pytest.mark.slow
WORLDS = (2, 3)
MICROBATCHES, CALLS = (1, 4), (1, 2)
JOBS = [
    *("pytorch:ddp", "pytorch:fsdp2", "model:fsdp2"),
    *(f"{wrapper}:{sync}:{microbatches}:{calls}" for wrapper in ("plain", "ddp", "fsdp2")
      for sync in ("last", "every", "auto") for microbatches in MICROBATCHES for calls in CALLS),
]  # fmt: skip


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"world{world}")
def counts(request, tmp_path_factory):
    """Counts by job; the same on every rank."""
    results = launch(request.param, "tests.comm.jobs:run_job", JOBS, tmp_path_factory.mktemp("comm"))

    def of(job: str) -> dict[str, int]:
        for result in results[job]:
            assert "error" not in result, result["error"]
        values = [result["value"] for result in results[job]]
        assert all(value == values[0] for value in values), values
        return values[0]

    return of


@pytest.fixture(params=[(n, c) for n in MICROBATCHES for c in CALLS], ids=lambda p: f"{p[0]}x{p[1]}")
def shape(request) -> tuple[int, int]:
    """Microbatches of a call, and calls of an update."""
    return request.param


def test_ddp_last_reduces_each_bucket_once_per_call(counts, shape) -> None:
    microbatches, calls = shape
    one, found = counts("pytorch:ddp"), counts(f"ddp:last:{microbatches}:{calls}")
    assert one["allreduce"] > 1, "several buckets"
    assert found["allreduce"] == one["allreduce"] * calls
    assert found["allreduce_bytes"] == counts("model:fsdp2")["gradient_bytes"] * calls


def test_ddp_every_reduces_each_bucket_at_every_microbatch(counts, shape) -> None:
    microbatches, calls = shape
    found = counts(f"ddp:every:{microbatches}:{calls}")
    assert found["allreduce"] == counts("pytorch:ddp")["allreduce"] * microbatches * calls


def test_ddp_last_broadcasts_no_buffers_between_microbatches(counts, shape) -> None:
    microbatches, calls = shape
    before_a_reducing_forward = counts("pytorch:ddp")["broadcast"]
    found = counts(f"ddp:last:{microbatches}:{calls}")
    assert found.get("broadcast", 0) <= before_a_reducing_forward * calls


def test_fsdp2_reduce_scatters_each_group_once_per_call_or_at_every_microbatch(counts, shape) -> None:
    microbatches, calls = shape
    groups = counts("model:fsdp2")["groups"]
    assert groups == 3
    for sync, times in (("last", 1), ("every", microbatches)):
        found = counts(f"fsdp2:{sync}:{microbatches}:{calls}")
        assert found["reduce_scatter_base"] == groups * times * calls, sync
        assert "allreduce" not in found


def test_fsdp2_gathers_as_often_as_plain_pytorch(counts, shape) -> None:
    microbatches, calls = shape
    groups, one = counts("model:fsdp2")["groups"], counts("pytorch:fsdp2")
    assert one["allgather_base"] == 2 * groups - 1
    for sync in ("last", "every"):
        found = counts(f"fsdp2:{sync}:{microbatches}:{calls}")
        assert found["allgather_base"] == microbatches * calls * (2 * groups - 1), sync
        assert found["allgather_base_bytes"] == microbatches * calls * one["allgather_base_bytes"], sync


def test_plain_sums_the_gradient_once_per_update(counts, shape) -> None:
    microbatches, calls = shape
    for sync in ("last", "every"):
        found = counts(f"plain:{sync}:{microbatches}:{calls}")
        assert found["allreduce_bytes"] == counts("model:fsdp2")["gradient_bytes"], sync


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "plain"])
@pytest.mark.parametrize("sync", ["last", "every"])
def test_one_message_per_call_and_one_per_update(counts, shape, wrapper: str, sync: str) -> None:
    microbatches, calls = shape
    found = counts(f"{wrapper}:{sync}:{microbatches}:{calls}")
    asks_who_has_gradients = wrapper == "plain"  # a parameter that only some ranks used has to be summed too
    assert found["message"] == calls + 1 + asks_who_has_gradients
    assert found["message_bytes"] < 1024 * found["message"]


@pytest.mark.parametrize(("wrapper", "policy"), [("plain", "last"), ("ddp", "last"), ("fsdp2", "every")])
def test_auto_is_the_cheapest_policy_of_the_wrapper(counts, shape, wrapper: str, policy: str) -> None:
    microbatches, calls = shape
    assert counts(f"{wrapper}:auto:{microbatches}:{calls}") == counts(f"{wrapper}:{policy}:{microbatches}:{calls}")

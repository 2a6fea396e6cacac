"""All gradient that autograd has made is reduced, once, or every rank says that it is not."""

import pytest

from tests.exact.launch import of_ranks
from tests.tiers import full_unless

pytestmark = pytest.mark.slow
SHOWN = ("namespace", "attribute", "hook", "closure", "generator")
PAST = [(2, f"past/{shows}/root/{sync}") for shows in SHOWN for sync in ("every", "last", "gather_once")]
PAST += [(2, "past/namespace/replicate/last"), (2, "past/namespace/replicate/every")]
PAST += [(4, f"past/namespace/hsdp/{sync}") for sync in ("replica_last", "last", "every")]
WEIGHTS = [(2, f"weight/blocks/{sync}") for sync in ("every", "last")]
LAST = [(2, f"last/{how}/{sync}") for how in ("root", "blocks") for sync in ("last", "every")]
SUMS = [(3, f"sums/{options}/{way}") for options in ("plain", "unused", "view", "static") for way in ("one", "open")]
RESUMES = [(3, f"resumes/{each}") for each in ("plain/dense", "unused/dense", "view/dense", "plain/sparse")]
BUFFERS = [(2, f"buffers/{how}") for how in ("open", "wide", "kept")]
BUCKETS = [(world, f"buckets/{num}") for world in (2, 3) for num in (0, 1, 40)]
ONCE = [(2, f"once/{sync}/{between}") for sync in ("gather_once", "every", "last")
        for between in ("nothing", "forward")]  # fmt: skip
JOBS: dict[int, list[str]] = {world: [] for world in (2, 3, 4)}
for its_world, its_job in [*PAST, *WEIGHTS, *LAST, *SUMS, *RESUMES, *BUFFERS, *BUCKETS, *ONCE]:
    JOBS[its_world].append(its_job)
results = of_ranks("tests.exact.reductions:run_job", JOBS)


def of_every(cells, is_quick=lambda *_: True):
    return pytest.mark.parametrize(("world", "job"), full_unless(cells, is_quick))


@of_every(PAST, lambda _, cell: cell[0] < 4)
def test_a_loss_past_the_outputs_of_fsdp2(results, world: int, job: str) -> None:
    for found in results(job, world):
        assert max(found.values()) <= 1e-12


@of_every(WEIGHTS)
def test_a_loss_that_gathers_a_weight_itself(results, world: int, job: str) -> None:
    assert all("uses a sharded parameter itself" in said for said in results(job, world))


@of_every(LAST)
def test_bfloat16_gradients_of_the_last_microbatch_alone(results, world: int, job: str) -> None:
    assert max(results(job, world)) <= 2.0**-6


@of_every(SUMS)
def test_three_ranks_of_ddp_leave_the_loss_as_it_is(results, world: int, job: str) -> None:
    for found in results(job, world):
        recorded_first = "static" in job  # a static graph reduces its first microbatch too, and averages there
        assert found["first"] <= (1e-6 if recorded_first else 1e-12)
        assert max(found["later"], 0.0 if recorded_first else found["second"]) <= 1e-12
        assert max(found["own"], found["own after a failure"]) <= 1e-6, "a backward outside of megabatch averages"


@of_every(RESUMES)
def test_ddp_goes_on_bit_for_bit(results, world: int, job: str) -> None:
    assert all(all(found) for found in results(job, world))


@of_every(BUFFERS)
def test_buffers_are_those_of_rank_0_unless_ddp_was_told_to_leave_them(results, world: int, job: str) -> None:
    for found in results(job, world):
        assert all(found) == ("kept" not in job)


@of_every(BUCKETS)
def test_small_tensors_are_summed_together(results, world: int, job: str) -> None:
    for found in results(job, world):
        assert found["right"]
        assert found["calls"] < max(found["tensors"], 4) if "40" in job else found["calls"] <= found["tensors"]


@of_every(ONCE)
def test_what_the_last_microbatch_leaves_out_has_new_weights_after_the_step(results, world: int, job: str) -> None:
    for found in results(job, world):
        assert max(found["errors"]) <= 1e-12
        assert found["gathered"] == 0

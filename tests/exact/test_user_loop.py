"""A loop that is not megabatch's has the gradient of the uncut update, and reduces as often as a call does."""

from pathlib import Path

import pytest

from tests.exact.launch import Result, Run, launch_all, of_ranks
from tests.exact.mutations import Mutation
from tests.exact.test_mutations import TIMEOUT_SECONDS, plant
from tests.exact.user_loop import FORMS
from tests.tiers import some

pytestmark = pytest.mark.slow
PAIRS = (  # of wrapper and sync
    ("plain", "auto"), ("ddp", "last"), ("ddp", "every"), ("fsdp2", "last"), ("fsdp2", "every"),
)  # fmt: skip
CASES = ("C1", "uneven-ranks", "empty-last-rank", "C4c")
JOBS = [
    f"{form}:{wrapper}:{sync}:{case}:no-clip:{world}:" for wrapper, sync in PAIRS for world in (1, 2, 3)
    for case in CASES for form in FORMS if not (case == "C4c" and "divided" in form)
    and not (world == 1 and case in ("uneven-ranks", "empty-last-rank"))
]  # fmt: skip
OTHERS = (  # wrapper, sync, world
    ("plain", "auto", 2), ("hsdp", "replica_last", 4), ("hsdp", "last", 4), ("fsdp1", "every", 2), ("fsdp1", "last", 2),
    ("replicate", "last", 2), ("tp", "last", 4), ("fsdp2-tp", "every", 4), ("ddp-static-graph", "last", 2),
    ("ddp-bucket-view", "last", 2), ("several-ddp", "last", 2),
)  # fmt: skip
JOBS += [
    f"{form}:{wrapper}:{sync}:uneven-ranks:loose:{world}:" for form in ("sum", "own-sum")
    for wrapper, sync, world in OTHERS
]  # fmt: skip
COUNTS = [f"{wrapper}:{sync}:{number}:2:" for wrapper, sync in PAIRS for number in (1, 3)]
COUNTS += [f"hsdp:{sync}:3:4:" for sync in ("last", "replica_last")]

LOST = ["lost:0:2:", "lost:1:2:"]

found = of_ranks("tests.exact.user_loop:run_job", JOBS)
counted = of_ranks("tests.exact.user_loop:count_job", COUNTS)
lost = of_ranks("tests.exact.user_loop:lost_job", LOST)


@pytest.mark.parametrize("job", some(JOBS, 37))
def test_gradient_is_that_of_the_uncut_update(found, job: str) -> None:
    for value in found(job):
        form, wrapper, *_ = job.split(":")
        averages = value["averages"] or ("own" in form and "ddp" in wrapper and ":3:" in job)
        rounds = averages or form == "mean"  # a mean times its count
        assert value["gradient"] <= (1e-15 if rounds else 0.0)
        assert not value["wrong"], value["wrong"]


@pytest.mark.parametrize("job", some(COUNTS, 3))
def test_a_loop_reduces_as_often_as_a_call(counted, job: str) -> None:
    for call, loop in counted(job):
        assert loop == call


@pytest.mark.parametrize("job", LOST)
def test_no_rank_waits_for_one_whose_update_was_lost(lost, job: str) -> None:
    """All begin the update again."""
    culprit = int(job.split(":")[1])
    for rank, ended in enumerate(lost(job)):
        assert ended == ["ValueError" if rank == culprit else "MegabatchError", "done"]


LOOP = "loops/user_loop.py"
PLANTED = {  # bugs, and a form and a wrapper whose cells then fail
    Mutation("forget the ranks by which DDP divides", LOOP,
             "self.divide_by(self.wrapper.loss_factor)", "self.divide_by(1.0)"): "own-sum:ddp:every",
    Mutation("divide by the weight of one rank", LOOP,
             "weight = math.fsum(weights)", "weight = weights[0]"): "before:plain:auto",
    Mutation("never reduce", LOOP, "is_last = self.wrapper, index == self.of - 1", "is_last = self.wrapper, False"):
        "sum:ddp:last",
    Mutation("leave a mean a mean", LOOP,
             "loss * value if kind == MEAN and value is not None else loss", "loss"): "mean:fsdp2:every",
    Mutation("count what a dummy sums", LOOP, "    return loss * 0.0\n", "    return loss\n"): "sum:plain:auto",
    Mutation("believe a guess", LOOP, "known = {} if agreement.weight is None else {PAIR_NAME: agreement.weight}",
             "known = {PAIR_NAME: agreement.divisor}"): "late:fsdp2:last",
}  # fmt: skip


@pytest.mark.full
def test_planted_bugs_are_caught(tmp_path: Path) -> None:
    runs: dict[str, Run] = {}
    for number, (mutation, cell) in enumerate(PLANTED.items()):
        folder = tmp_path / str(number)
        plant(mutation, folder)
        job = f"{cell}:uneven-ranks:no-clip:2:"
        runs[mutation.name] = Run(2, [job], folder / "run", [str(folder)], 1, TIMEOUT_SECONDS)
    found = launch_all("tests.exact.user_loop:run_job", list(runs.values()), tmp_path)
    passed = [name for name, (ranks,) in zip(runs, map(dict.values, found), strict=True) if all(map(_is_right, ranks))]
    assert not passed


def _is_right(result: Result) -> bool:
    return "error" not in result and not result["value"]["wrong"] and result["value"]["gradient"] <= 1e-15

"""A loop that is not megabatch's has the gradient of the uncut update, and reduces as often as a call does."""

import pytest

from tests.exact.launch import of_ranks
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

found = of_ranks("tests.exact.user_loop:run_job", JOBS)
counted = of_ranks("tests.exact.user_loop:count_job", COUNTS)


@pytest.mark.parametrize("job", some(JOBS, 20))
def test_gradient_is_that_of_the_uncut_update(found, job: str) -> None:
    for value in found(job):
        form, wrapper, *_ = job.split(":")
        averages = value["averages"] or ("own" in form and "ddp" in wrapper and ":3:" in job)
        rounds = averages or form == "mean"  # a mean times its count
        assert value["gradient"] <= (1e-15 if rounds else 0.0)
        assert not value["wrong"], value["wrong"]


@pytest.mark.parametrize("job", COUNTS)
def test_a_loop_reduces_as_often_as_a_call(counted, job: str) -> None:
    for call, loop in counted(job):
        assert loop == call

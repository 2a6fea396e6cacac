"""A parameter that only some ranks or microbatches use has the gradient of the uncut update, on every rank."""

import pytest

from tests.exact.launch import of_ranks
from tests.exact.routed import USERS
from tests.tiers import some

pytestmark = pytest.mark.slow
WORLDS = {"plain": (1, 3), "ddp": (1, 3), "fsdp2": (1, 3), "hsdp": (4,), "replicate": (3,), "fsdp1": (2,)}
JOBS = [f"{users}:{wrapper}:{world}:{sync}" for wrapper, worlds in WORLDS.items() for world in worlds
        for users in USERS for sync in ("last", "every")]  # fmt: skip
JOBS += [f"{users}:hsdp:4:replica_last" for users in USERS]


results = of_ranks("tests.exact.routed:run_job", JOBS)


@pytest.mark.parametrize("job", some(JOBS, 5))
def test_gradient_of_what_not_everyone_uses(results, job: str) -> None:
    for value in results(job):
        assert value["gradient"] <= (1e-15 if "ddp" in job and "every" in job else 0), value["parameter"]
        assert not value["wrong"], value["wrong"]


UNSAID = [f"second-of-all:ddp:{world}:last" for world in WORLDS["ddp"]]
unsaid = of_ranks("tests.exact.routed:run_unsaid", UNSAID)


@pytest.mark.parametrize("job", UNSAID)
def test_what_ddp_leaves_unreduced_is_an_error(unsaid, job: str) -> None:
    assert all("find_unused_parameters=True" in value for value in unsaid(job))

"""torch's own hooks that average are exact; every other is refused, by all ranks in the same words."""

import pytest

from tests.exact import hooks
from tests.exact.launch import of_ranks
from tests.tiers import full_unless

pytestmark = pytest.mark.slow
ACCEPTED = [f"accepted/{name}/{sync}" for name in hooks.ACCEPTED for sync in hooks.SYNCS]
REFUSED = [f"refused/{name}" for name in hooks.REFUSED]
LATE = "registered late"


results = of_ranks("tests.exact.hooks:run_job", {world: [*ACCEPTED, *REFUSED, LATE] for world in (2, 3)})
of_both = pytest.mark.parametrize("world", full_unless([2, 3], lambda _, world: world == 2))


@of_both
@pytest.mark.parametrize("job", ACCEPTED)
def test_a_hook_that_averages_is_exact(results, job, world):
    assert max(results(job, world)) <= (1e-15 if world == 3 else 0)  # a mean over 3 ranks rounds


@of_both
@pytest.mark.parametrize("job", REFUSED)
def test_another_hook_is_refused(results, job, world):
    name = job.split("/")[1]
    _, reason = hooks.REFUSED[name]
    expected = f"DDP has the communication hook {name.partition(',')[0]!r}, {reason}"
    for told in results(job, world):
        assert told == expected


@of_both
def test_a_hook_that_comes_late_is_refused_too(results, world):
    assert results(LATE, world) == [f"DDP has the communication hook 'sums', {hooks.UNKNOWN}"] * world

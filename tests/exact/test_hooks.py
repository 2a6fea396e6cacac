"""torch's own hooks that average are exact; every other is refused, by all ranks in the same words."""

import pytest

from tests.exact import hooks
from tests.exact.launch import launch

pytestmark = pytest.mark.slow
ACCEPTED = [f"accepted/{name}/{sync}" for name in hooks.ACCEPTED for sync in hooks.SYNCS]
REFUSED = [f"refused/{name}" for name in hooks.REFUSED]
LATE = "registered late"


@pytest.fixture(scope="module", params=[2, 3])
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"hooks{request.param}")
    return request.param, launch(request.param, "tests.exact.hooks:run_job", [*ACCEPTED, *REFUSED, LATE], folder)


def values(results, job: str) -> list:
    for result in results[job]:
        assert "error" not in result, result["error"]
    return [result["value"] for result in results[job]]


@pytest.mark.parametrize("job", ACCEPTED)
def test_a_hook_that_averages_is_exact(results, job):
    world, found = results
    assert max(values(found, job)) <= (1e-15 if world == 3 else 0)  # a mean over 3 ranks rounds


@pytest.mark.parametrize("job", REFUSED)
def test_another_hook_is_refused(results, job):
    _, found = results
    name = job.split("/")[1]
    _, reason = hooks.REFUSED[name]
    expected = f"DDP has the communication hook {name.partition(',')[0]!r}, {reason}"
    for told in values(found, job):
        assert told == expected


def test_a_hook_that_comes_late_is_refused_too(results):
    world, found = results
    assert values(found, LATE) == [f"DDP has the communication hook 'sums', {hooks.UNKNOWN}"] * world

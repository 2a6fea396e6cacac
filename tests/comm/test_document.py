"""The page on parallelism says what is counted, and its snippets run."""

import pytest

from tests.comm import document
from tests.comm.planned import AUTO, POLICIES
from tests.exact.launch import launch
from tests.exact.wrappers import WRAPPERS

PAGE = document.PAGE.read_text()
SNIPPETS = document.snippets(PAGE)


def test_the_table_is_what_is_planned() -> None:
    assert document.written(PAGE) == PAGE, "run python -m tests.comm.document"


def test_every_policy_of_every_wrapper_is_in_the_table() -> None:
    planned = {(policy.wrapper, policy.sync) for policy in POLICIES}
    assert len(planned) == len(POLICIES)
    assert {wrapper for wrapper, _ in planned} == set(document.CALLS)
    one_policy = {"plain", "tp", "tp-sp"}  # whatever is asked for, they are summed once
    for wrapper in AUTO:
        syncs = {sync for sync in ("last", "every", "replica_last") if sync not in WRAPPERS[wrapper].refused}
        syncs |= {"gather_once"} if wrapper in ("fsdp2", "hsdp") else set()
        assert {sync for its, sync in planned if its == wrapper} == ({"last"} if wrapper in one_policy else syncs)


@pytest.mark.slow
def test_the_snippets_run(tmp_path) -> None:
    assert len(SNIPPETS) >= 2
    names = [f"snippet:{number}" for number in range(len(SNIPPETS))]
    for results in launch(2, "tests.comm.jobs:run_job", names, tmp_path).values():
        for result in results:
            assert "error" not in result, result["error"]

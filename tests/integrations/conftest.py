"""The ranks on which a loop of another library runs."""

import pytest


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "on two ranks"])
def world(request: pytest.FixtureRequest) -> int:
    return request.param

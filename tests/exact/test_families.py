"""30 families of models and more: the cut gradient of each is exact, or it is refused."""

import pytest

from tests.exact import families
from tests.exact.launch import Run, launch_all

pytestmark = pytest.mark.slow
TOLERANCE = 1e-12
LEAST_FAMILIES = 30


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder, names = tmp_path_factory.mktemp("families"), list(families.FAMILIES)
    (found,) = launch_all("tests.exact.families:run_job", [Run(1, names, folder, max_failures=len(names))], folder)
    return found


@pytest.mark.parametrize("name", families.FAMILIES)
def test_exact_or_refused(results, name: str) -> None:
    (result,) = results[name]
    assert "error" not in result, result["error"]
    family = families.FAMILIES[name]
    for way, found in result["value"].items():
        fragment = family.verify_refuses if way == "verify" else family.refused
        if fragment:
            assert isinstance(found, str), f"{way}: {fragment!r} was not refused"
            assert fragment in found
            assert len(found.splitlines()) == 1, found
        else:
            assert isinstance(found, float), f"{way}: {found}"
            assert found <= TOLERANCE, way


def test_there_are_30_families() -> None:
    assert len(families.FAMILIES) >= LEAST_FAMILIES

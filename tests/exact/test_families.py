"""30 families of models and more: the cut gradient of each is exact, or it is refused."""

import pytest

from tests.exact import families
from tests.exact.launch import of_ranks
from tests.tiers import some

pytestmark = pytest.mark.slow
TOLERANCE = 1e-12
LEAST_FAMILIES = 30


results = of_ranks("tests.exact.families:run_job", {1: families.FAMILIES}, max_failures=len(families.FAMILIES))


@pytest.mark.parametrize("name", some(families.FAMILIES, 4))
def test_exact_or_refused(results, name: str) -> None:
    (ways,) = results(name)
    family = families.FAMILIES[name]
    for way, found in ways.items():
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

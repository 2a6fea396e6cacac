"""`shapes=`: few sizes of microbatches, tokens without a label that add nothing, and a graph for each size."""

from typing import Any

import pytest

from tests.exact import shapes
from tests.exact.launch import of_ranks

KINDS = ("list", "rows", "deferred", "weighed", "row")
WAYS = ("once", "calls", "opened", "told", "every", "evaluated", "planned", "lowered", "loaded")
JOBS = [
    *[f"ddp:{kind}:once" for kind in KINDS],
    *[f"ddp:{kind}:{way}" for kind in ("list", "row") for way in WAYS[1:]],
    *[f"fsdp2:{kind}:{way}" for kind in ("list", "deferred", "row") for way in ("once", "calls", "opened")],
    "plain:row:once",
    "plain:compiled:once",
    "ddp:compiled:once",
]
found = of_ranks("tests.exact.shapes:run_job", {2: JOBS, 3: JOBS})


def check(job: dict[str, Any], name: str) -> None:
    assert max(job["errors"]) <= 1e-12
    chosen = set(map(tuple, job["chosen"]))
    assert len(chosen) <= shapes.NUM_SHAPES
    if not name.endswith(("lowered", "evaluated")):  # which have smaller shapes, and those of before the choice
        assert set(map(tuple, job["seen"])) <= chosen
    if "compiled" in name:
        assert job["graphs"] <= shapes.NUM_SHAPES


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("job", JOBS)
def test_ranks(found, job: str, world: int) -> None:
    ranks = found(job, world)
    for each in ranks:
        check(each, job)
        assert each["chosen"] == ranks[0]["chosen"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_alone(kind: str, way: str) -> None:
    check(shapes.run_job(f"plain:{kind}:{way}"), way)

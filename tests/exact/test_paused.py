"""An update that is saved between two calls and goes on elsewhere has the gradient of one that was never saved."""

import pytest

from tests.exact.cases import SEVERAL_CALLS
from tests.exact.cells import MAIN, OTHERS
from tests.exact.launch import of_ranks
from tests.exact.wrappers import WRAPPERS
from tests.tiers import some

pytestmark = pytest.mark.slow
REFUSED = [name for name in OTHERS if name.startswith("fsdp1")]
SAVED = [name for name in OTHERS if name not in (*REFUSED, "several-unlike", "hsdp-tp")]
JOBS = [
    f"bits:{wrapper}:{case}:{loss}:no-clip:{world}:{sync}"
    for wrapper in MAIN
    for case in sorted(SEVERAL_CALLS)
    for loss in ("weigh", "late")
    for world in (1, 2, 3)
    for sync in ("last", "every")
    if world > 1 or case != "calls-empty-ranks"
]
JOBS += [
    f"bits:{wrapper}:calls:mixed:no-clip:{max(WRAPPERS[wrapper].worlds)}:{sync}"
    for wrapper in SAVED
    for sync in ("last", "every", "replica_last")
    if sync not in WRAPPERS[wrapper].refused
]
JOBS += [f"float64:{wrapper}:calls:weigh:tight:2:auto" for wrapper in (*MAIN, "hsdp", "replicate", "tp", "tp-sp")]
JOBS += [f"float32:{wrapper}:calls:weigh:loose:2:auto" for wrapper in (*MAIN, "hsdp")]


results = of_ranks("tests.exact.paused:run_job", JOBS)


@pytest.mark.parametrize("job", some(JOBS, 5))
def test_it_has_the_same_gradient(results, job: str) -> None:
    evidence, wrapper, _, _, _, world, sync = job.split(":")
    averages = WRAPPERS[wrapper].averages != "never" and WRAPPERS[wrapper].data_degree(int(world)) == 3
    tolerance = {"bits": 1e-15 if averages else 0.0, "float64": 1e-12, "float32": 4.0}[evidence]
    for value in results(job):
        assert not value["wrong"], value["wrong"]
        assert value["gradient"] <= tolerance, (sync, value["parameter"])
        assert value["different"] <= (1e-15 if averages else 0.0), "from the update that was never saved"
        assert value["num_paused"]

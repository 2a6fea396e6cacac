"""Memory runs out inside an update, and its gradient is exact."""

from typing import Any

import pytest

from tests.exact.launch import Result, Run, launch_all, of_ranks, values
from tests.exact.memory import NUM_MICROBATCHES, PHASES
from tests.exact.mutations import Mutation
from tests.exact.test_mutations import plant
from tests.tiers import some

pytestmark = pytest.mark.slow
RANGE = range(NUM_MICROBATCHES)
JOBS = [f"bits:weigh:once:{phase}:{place}:{index}:all:plain:1:auto"
        for phase in PHASES for place in range(4) for index in RANGE]  # fmt: skip
JOBS += [f"bits:{loss}:once:backward:1:{index}:all:plain:1:auto"
         for loss in ("late", "terms", "metric") for index in RANGE]  # fmt: skip
JOBS += [f"bits:weigh:{depth}:{phase}:{place}:{index}:all:plain:1:auto" for phase in PHASES for place in range(4)
         for depth in ("half-too", "other-half-too", "to-single-samples") for index in (0, 1)]  # fmt: skip
JOBS += [f"{evidence}:weigh:{depth}:backward:{place}:1:all:plain:1:auto" for evidence in ("float64", "float32")
         for depth in ("once", "half-too") for place in range(4)]  # fmt: skip
JOBS += [f"bits:weigh:once:{phase}:{place}:{index}:1:{wrapper}:2:last" for phase in PHASES for place in (0, 2)
         for wrapper in ("plain", "ddp") for index in RANGE if wrapper == "plain" or index < RANGE[-1]]  # fmt: skip
JOBS += [f"bits:weigh:half-too:backward:{place}:0:{who}:{wrapper}:2:last" for place in range(4) for who in ("all", 0)
         for wrapper in ("plain", "ddp", "ddp-find-unused", "ddp-bucket-view", "several-ddp")]  # fmt: skip
JOBS += [f"bits:weigh:once:backward:{place}:1:1:ddp-static-graph:2:last" for place in range(4)]
JOBS += [f"float64:weigh:once:backward:{place}:1:0:ddp:2:last" for place in range(4)]
JOBS += [f"bits:weigh:in-second-call:backward:{place}:1:1:{wrapper}:2:last" for place in (0, 2)
         for wrapper in ("plain", "ddp", "ddp-find-unused")]  # fmt: skip
JOBS += [f"bits:{loss}:in-opened-call:backward:{place}:{index}:1:{wrapper}:2:last" for place in (0, 2)
         for index in (1, RANGE[-1]) for loss in ("weigh", "late") for wrapper in ("plain", "ddp")]  # fmt: skip


results = of_ranks("tests.exact.memory:run_job", JOBS)


def check(value: dict[str, Any]) -> None:
    assert value["gradient"] <= value["tolerance"], value["parameter"]
    assert not value["wrong"], value["wrong"]
    (first, num_split), (second, num_split_later) = value["cuts"]
    assert sum(first) == sum(second) == 8
    assert (num_split, num_split_later) == (int(value["failed"]), 0)
    assert (value["learned"] is not None) == value["failed"]
    if value["failed"]:
        assert max(second) <= value["learned"][0] < value["size"]


@pytest.mark.parametrize("job", some(JOBS, 4))
def test_the_gradient_is_exact(results, job: str) -> None:
    for value in results(job):
        check(value)


LATER, FIRST = ("bits:weigh:half-too:backward:{}:{}:all:plain:1:auto".format(*where) for where in ((1, 1), (0, 0)))
RETRY = "guards/oom_retry.py"
PLANTED = {  # bugs, and a job that sees each
    Mutation("differentiate again for all", RETRY, "received = _received(before)\n        return",
             "received: set[int] = set()\n        return"): LATER,
    Mutation("keep new gradients", RETRY, "parameter.grad = None", "pass"): FIRST,
    Mutation("see replaced gradients only", RETRY, " or count_writes(gradient) != writes", ""): LATER,
    Mutation("forget what the first half lacked", RETRY,
             "self._wrapper.parameters if wanted is None else wanted", "self._wrapper.parameters"): LATER,
    Mutation("run one part", RETRY,
             "in split_in_halves(rows):\n            sums", "in split_in_halves(rows)[:1]:\n            sums"): FIRST,
    Mutation("count sums twice", "core/update.py",
             "self._sums, self._differ, self._counted = before\n", "pass\n"): FIRST,
    Mutation("learn nothing", "core/call.py",
             "replace(self, learned=MicrobatchLimit(*map(min, bound, self.learned or bound)))",
             "self"): FIRST,
}  # fmt: skip


def passes(ranks: list[Result]) -> bool:
    try:
        for value in values(ranks):
            check(value)
    except AssertionError:
        return False
    return True


def test_planted_bugs_are_seen(tmp_path) -> None:
    runs = []
    for number, (mutation, job) in enumerate(PLANTED.items()):
        planted = tmp_path / str(number)
        plant(mutation, planted)
        runs.append(Run(1, [job], planted / "run", [str(planted)]))
    found = launch_all("tests.exact.memory:run_job", runs, tmp_path)
    passing = [m.name for (m, job), each in zip(PLANTED.items(), found, strict=True) if passes(each[job])]
    assert passing == []

"""Linear layers that add to their gradients themselves: exact in every wrapper that keeps gradients where they are."""

import pytest

from tests.exact.launch import Result, Run, launch_all, launch_by_world
from tests.exact.mutations import Mutation
from tests.exact.test_mutations import plant

pytestmark = pytest.mark.slow
CASES = ("C1", "calls", "short-tail", "updates")
JOBS = [f"fused:bits:{case}:{wrapper}:{world}:last" for case in CASES
        for wrapper, world in (("plain", 1), ("plain", 2), ("ddp", 2), ("ddp-find-unused", 2), ("ddp-bucket-view", 2),
                               ("ddp-static-graph", 2), ("several", 2), ("several-ddp", 2), ("fsdp2", 2),
                               ("replicate", 2))
       ]  # fmt: skip
JOBS += ["fused:bits:uneven-ranks:ddp:3:last", "fused:bits:uneven-ranks:fsdp2:3:last", "fused:bits:C1:ddp:2:every",
         "fused:bits:C1:hsdp:4:last", "fused:bits:C1:fsdp2-tp:4:last"]  # fmt: skip
JOBS += [f"{variant}:{evidence}:C1:{wrapper}:{world}:last" for evidence in ("float64", "float32")
         for variant in ("fused", "checkpointed", "checkpointed-reentrant")
         for wrapper, world in (("plain", 1), ("ddp", 2), ("fsdp2", 2))
         if not (variant.endswith("reentrant") and wrapper == "ddp")]  # fmt: skip
JOBS += [f"spike:{evidence}:C1:{wrapper}:{world}:last" for evidence in ("bits", "float64")
         for wrapper, world in (("plain", 1), ("plain", 2), ("ddp", 2))]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch_by_world("tests.exact.fusing:run_job", JOBS, tmp_path_factory.mktemp("fusing"))


def check(result: Result) -> None:
    assert "error" not in result, result["error"]
    value = result["value"]
    assert value["gradient"] <= value["tolerance"], value["parameter"]
    assert not value["wrong"], value["wrong"]
    assert not value["left"], value["left"]


@pytest.mark.parametrize("job", JOBS)
def test_the_gradient_is_exact(results, job: str) -> None:
    for result in results[job]:
        check(result)


def numbers(results, job: str) -> set[int]:
    return {number for result in results[job] for number in result["value"]["fused"]}


@pytest.mark.parametrize(
    ("job", "number"),
    {
        "fused:bits:C1:plain:1:last": 3 * 3,  # all microbatches but the first
        "fused:bits:C1:ddp:2:last": 3 * 2,  # and the last, in which DDP reduces
        "fused:bits:C1:ddp:2:every": 0,
        "fused:bits:C1:fsdp2:2:last": 3,  # the head, since fully_shard makes another class of what it is given
        "fused:float64:C1:plain:1:last": 13 * 3,
        "fused:float64:C1:fsdp2:2:last": 13 * 3,
        "checkpointed:float64:C1:plain:1:last": 13 * 3,
        "checkpointed:float64:C1:ddp:2:last": 13 * 2,
        "checkpointed-reentrant:float64:C1:plain:1:last": 13 * 3,
        "spike:bits:C1:plain:1:last": 3 * 2 + 2,  # of a microbatch that fails, what its backward has come to
    }.items(),
)
def test_products_are_added(results, job: str, number: int) -> None:
    assert numbers(results, job) == {number}


PLAIN, DDP, SPIKE = "fused:bits:C1:plain:1:last", "fused:bits:C1:ddp:2:last", "spike:bits:C1:plain:1:last"
ADD = "total.addmm_(gradients.T, inputs)"
PLANTED = {  # bugs, and a job that sees each
    Mutation("add twice", "wrappers/fusing.py", ADD, "total.addmm_(gradients.T, inputs, alpha=2)"): DDP,
    Mutation("add and return", "wrappers/fusing.py", "None if added else ", ""): DDP,
    Mutation("forget to add", "wrappers/fusing.py", ADD, "pass"): PLAIN,
    Mutation("forget the sum", "wrappers/fusing.py", ADD, "torch.mm(gradients.T, inputs, out=total)"): PLAIN,
    Mutation("leave the forward", "wrappers/fusing.py", 'vars(layer).pop("forward", None)', "pass"): PLAIN,
    Mutation("see no addition in place", "engine/oom_retry.py", " or found._version != version", ""): SPIKE,
}


def passes(result: Result) -> bool:
    try:
        check(result)
    except AssertionError:
        return False
    return True


def test_planted_bugs_are_seen(tmp_path) -> None:
    runs = []
    for number, (mutation, job) in enumerate(PLANTED.items()):
        planted = tmp_path / str(number)
        plant(mutation, planted)
        runs.append(Run(int(job.split(":")[-2]), [job], planted / "run", [str(planted)]))
    found = launch_all("tests.exact.fusing:run_job", runs, tmp_path)
    passing = [m.name for (m, job), each in zip(PLANTED.items(), found, strict=True) if passes(each[job][0])]
    assert passing == []

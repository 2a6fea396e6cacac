"""A loss that couples samples has the gradient of the uncut one, in every wrapper, and planted bugs are caught."""

import pytest

from tests.exact.joint import DROPPED, PLANTED, jobs
from tests.exact.launch import Result, Run, launch_all, of_ranks
from tests.exact.mutations import Mutation
from tests.exact.test_mutations import plant
from tests.tiers import some
from tests.unit.failures import joint as failures
from tests.unit.failures.table import check_ranks

pytestmark = pytest.mark.slow
JOBS = jobs()
TOLERANCES = {job.name: job.tolerance for job in JOBS} | dict.fromkeys([*DROPPED, *PLANTED], 1e-15)
TIMEOUT_SECONDS = 4.0  # ranks that disagree wait for each other
AGAIN = "leaves = pytree.tree_leaves(call.joint.encode(call.model, step.microbatch))\n"
BUGS = (
    Mutation("count the loss on every rank", "losses/coupled_loss.py", "is_dummy=not counts", "is_dummy=False"),
    Mutation(
        "drop other features the second time",
        "losses/coupled_loss.py",
        f"            with random_state.replay(encoded.random):\n                {AGAIN}"
        "            if not step.is_dummy:\n",
        f"            {AGAIN}            if False:\n",
    ),
    Mutation(
        "see the samples of this rank alone",
        "losses/coupled_loss.py",
        "gathered = ranks.gather_on_device(padded)",
        "gathered = torch.stack([padded] * len(sizes))",
    ),
    Mutation("keep the order of the plan", "losses/coupled_loss.py", "in_order(local_rows, places)", "local_rows"),
    Mutation(
        "keep the order of the batch on the way back",
        "losses/coupled_loss.py",
        "in_order(gradient[local_rows], encoded_rows)",
        "gradient[local_rows].clone()",
    ),
    Mutation("take the gradients of another rank", "losses/coupled_loss.py", "slice(start, start + ", "slice(0, "),
    Mutation("differentiate a dummy microbatch", "losses/coupled_loss.py", "torch.zeros_like", "torch.ones_like"),
)


WORLDS = {job.name: job.cell.world for job in JOBS} | dict.fromkeys(DROPPED, 3) | dict.fromkeys(failures.JOBS, 2)
results = of_ranks(
    "tests.exact.joint:run_job",
    {world: [name for name, its in WORLDS.items() if its == world] for world in (1, 2, 3, 4)},
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> dict[str, dict[str, list[Result]]]:
    """Results by job, with each bug."""
    folder, runs = tmp_path_factory.mktemp("joint"), []
    for number, bug in enumerate(BUGS):
        place = folder / f"bug{number}"
        plant(bug, place)
        runs.append(Run(3, list(PLANTED), place / "run", [str(place)], len(PLANTED), TIMEOUT_SECONDS))
    found = launch_all("tests.exact.joint:run_job", runs, folder)
    return dict(zip([bug.name for bug in BUGS], found, strict=True))


def check(name: str, result: Result) -> None:
    assert "error" not in result, result["error"]
    value = result["value"]
    assert value["gradient"] <= TOLERANCES[name], f"gradient of {value['parameter']}: {value['gradient']:.2e}"
    assert not value["wrong"], "; ".join(value["wrong"])


@pytest.mark.parametrize("job", some(JOBS, 3), ids=lambda job: job.name)
def test_gradient_is_that_of_all_samples_in_one_graph(results, job) -> None:
    for result in results.results(job.name):
        check(job.name, result)


@pytest.mark.parametrize("name", DROPPED)
def test_the_second_forward_drops_what_the_first_has_dropped(results, name: str) -> None:
    for result in results.results(name):
        check(name, result)


@pytest.mark.parametrize("name", failures.JOBS)
def test_both_ranks_are_told(results, name: str) -> None:
    check_ranks([value["told"] for value in results(name)], failures.JOBS[name][1])


@pytest.mark.parametrize("bug", [bug.name for bug in BUGS])
def test_the_planted_bug_is_caught(planted, bug: str) -> None:
    failing: set[str] = set()
    for name, ranks in planted[bug].items():
        for result in ranks:
            try:
                check(name, result)
            except AssertionError:
                failing.add(name)
    assert failing
    if bug == "drop other features the second time":
        assert failing == {DROPPED[0]}


def test_the_table_has_every_wrapper_and_every_way() -> None:
    cells = [job.cell for job in JOBS]
    assert {(cell.wrapper, cell.world) for cell in cells} >= {
        (name, world) for name in ("plain", "ddp", "fsdp2") for world in (1, 2, 3, 4)
    }
    assert {cell.loss for cell in cells} == {"late", "terms", "metric-late"}
    assert {job.encode for job in JOBS} == {"once", "twice"}

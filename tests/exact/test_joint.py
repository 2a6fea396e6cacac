"""A loss that couples samples has the gradient of the uncut one, in every wrapper, and planted bugs are caught."""

import shutil
from pathlib import Path

import pytest

import megabatch
from tests.exact.joint import DROPPED, PLANTED, jobs
from tests.exact.launch import Result, Run, launch_all
from tests.tiers import some
from tests.unit.failures import joint as failures
from tests.unit.failures.table import check_ranks

pytestmark = pytest.mark.slow
JOBS = jobs()
TOLERANCES = {job.name: job.tolerance for job in JOBS} | dict.fromkeys([*DROPPED, *PLANTED], 1e-15)
LIBRARY = Path(megabatch.__file__).parent
TIMEOUT_SECONDS = 4.0  # ranks that disagree wait for each other
AGAIN = "leaves = pytree.tree_leaves(call.joint.encode(call.model, step.microbatch))\n"
BUGS = {  # the file, its text, and what is planted instead
    "count the loss on every rank": ("engine/coupled_loss.py", "is_dummy=not counts", "is_dummy=False"),
    "drop other features the second time": (
        "engine/coupled_loss.py",
        f"            with random_state.replay(encoded.random):\n                {AGAIN}"
        "            if not step.is_dummy:\n",
        f"            {AGAIN}            if False:\n",
    ),
    "see the samples of this rank alone": (
        "engine/coupled_loss.py",
        "gathered = ranks.gather_on_device(padded)",
        "gathered = torch.stack([padded] * len(sizes))",
    ),
    "keep the order of the plan": ("engine/coupled_loss.py", "in_order(own, places)", "own"),
    "keep the order of the batch on the way back": (
        "engine/coupled_loss.py", "in_order(each[mine], encoded_rows)", "each[mine].clone()",
    ),
    "take the gradients of another rank": ("engine/coupled_loss.py", "slice(start, start + ", "slice(0, "),
    "differentiate a dummy microbatch": ("engine/coupled_loss.py", "torch.zeros_like", "torch.ones_like"),
}  # fmt: skip


def plant(file: str, text: str, planted: str, folder: Path) -> None:
    """A copy of the library with one text replaced."""
    shutil.copytree(LIBRARY, folder / "megabatch", ignore=shutil.ignore_patterns("__pycache__"))
    source = (LIBRARY / file).read_text()
    assert source.count(text) == 1, f"{text!r} occurs {source.count(text)} times in {file}"
    (folder / "megabatch" / file).write_text(source.replace(text, planted))


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict[str, list[Result]]]:
    """Results by job, of the library as it is ("") and with each bug: one import of torch for all."""
    folder = tmp_path_factory.mktemp("joint")
    worlds = {job.name: job.cell.world for job in JOBS} | dict.fromkeys(DROPPED, 3) | dict.fromkeys(failures.JOBS, 2)
    runs = [
        Run(world, [name for name in worlds if worlds[name] == world], folder / str(world)) for world in (1, 2, 3, 4)
    ]
    for number, bug in enumerate(BUGS):
        plant(*BUGS[bug], folder / f"bug{number}")
        place = folder / f"bug{number}"
        runs.append(Run(3, list(PLANTED), place / "run", [str(place)], len(PLANTED), TIMEOUT_SECONDS))
    results = launch_all("tests.exact.joint:run_job", runs, folder)
    as_it_is = {name: result for each in results[:4] for name, result in each.items()}
    return {"": as_it_is} | dict(zip(BUGS, results[4:], strict=True))


def check(name: str, result: Result) -> None:
    assert "error" not in result, result["error"]
    value = result["value"]
    assert value["gradient"] <= TOLERANCES[name], f"gradient of {value['parameter']}: {value['gradient']:.2e}"
    assert not value["wrong"], "; ".join(value["wrong"])


@pytest.mark.parametrize("job", some(JOBS, 3), ids=lambda job: job.name)
def test_gradient_is_that_of_all_samples_in_one_graph(found, job) -> None:
    for result in found[""][job.name]:
        check(job.name, result)


@pytest.mark.parametrize("name", DROPPED)
def test_the_second_forward_drops_what_the_first_has_dropped(found, name: str) -> None:
    for result in found[""][name]:
        check(name, result)


@pytest.mark.parametrize("name", failures.JOBS)
def test_both_ranks_are_told(found, name: str) -> None:
    check_ranks([result["value"]["told"] for result in found[""][name]], failures.JOBS[name][1])


@pytest.mark.parametrize("bug", BUGS)
def test_the_planted_bug_is_caught(found, bug: str) -> None:
    failing: set[str] = set()
    for name, results in found[bug].items():
        for result in results:
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

"""Pipelines give the gradient of the uncut model: every schedule, over every wrapper that its stages may have."""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.exact.cells import Cell
from tests.exact.launch import Result, Run, launch_all, of_ranks, values
from tests.exact.mutations import MUTATIONS, Mutation
from tests.exact.pipeline import BITS, CAP_TOKENS, LENGTHS, NUM_STAGES, SPLITS
from tests.exact.test_mutations import plant
from tests.tiers import some
from tests.unit.failures import pipeline as failures
from tests.unit.failures.table import check_error, check_ranks

pytestmark = pytest.mark.slow
CELLS = {  # what is run with each schedule; of so many data ranks
    1: (
        "float64:plain:1:auto:C1:list:terms:tokens:forward_backward:tight",
        "float64:plain:1:auto:C4c:mapping:weigh:one-sample:forward_backward:no-clip",
        "float64:plain:1:auto:calls-none-between:list:mixed:two-samples:forward_backward:tight",
        "float64:plain:1:auto:one-microbatch:list:metric-late:one-sample:forward_backward:tight",
        "float32:plain:1:auto:C5u:list:weigh:one-sample:forward_backward:no-clip",
    ),
    2: (
        "float64:plain:2:auto:calls-empty-ranks:list:late:one-sample:forward_backward:tight",
        "float64:plain:2:auto:uneven-ranks:list:terms:two-samples:forward_backward:no-clip",
        "float64:plain:2:auto:short-tail:list:metric:tokens:forward_backward:tight",
        "float32:plain:2:auto:C2:list:weigh:three-samples:forward_backward:no-clip",
    ),
    4: ("float64:plain:4:auto:calls-empty-ranks:list:late:one-sample:forward_backward:tight",),
}
WRAPPERS = ("plain", "ddp", "fsdp2", "replicate")


def _jobs_of_four() -> list[str]:
    """Each schedule with each wrapper that it can have, on the hardest cell; the others with each wrapper."""
    pairs = [(schedule, wrapper) for schedule in NUM_STAGES for wrapper in WRAPPERS
             if wrapper != "ddp" or schedule not in SPLITS]  # fmt: skip
    first, *others = CELLS[2]
    schedules = {"plain": "DualPipeV", "ddp": "1F1B", "fsdp2": "InterleavedZeroBubble", "replicate": "LoopedBFS"}
    return [
        *(f"{schedule}/{wrapper}/{first}" for schedule, wrapper in pairs),
        *(f"{schedules[wrapper]}/{wrapper}/{cell}" for wrapper in WRAPPERS for cell in others),
    ]


RAGGED = {  # samples of unequal lengths, in a few schedule steps
    2: ["ragged/language/DualPipeV/plain", "ragged/bits/GPipe/plain"],
    4: [
        *(f"ragged/language/{schedule}/{wrapper}"
          for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
          for wrapper in WRAPPERS if wrapper != "ddp" or schedule not in SPLITS),
        *(f"ragged/bits/1F1B/{wrapper}" for wrapper in WRAPPERS),
    ],
    8: ["ragged/language/1F1B/hsdp"],
}  # fmt: skip
EVALUATED = ("evaluated/GPipe/plain", "evaluated/1F1B/fsdp2", "evaluated/Interleaved1F1B/ddp")
JOBS = {  # by the number of ranks
    2: [
        *RAGGED[2],
        *(f"{schedule}/plain/{cell}" for schedule in NUM_STAGES for cell in CELLS[1]),
        *(f"{schedule}/plain/{BITS.format(1)}" for schedule in ("GPipe", "1F1B")),
        *(f"told/{name}" for name in failures.JOBS),
        "fault/plain",
    ],
    4: [
        *_jobs_of_four(),
        *RAGGED[4],
        *EVALUATED,
        "unreadable/ddp",
        *(f"1F1B/{wrapper}/{BITS.format(2)}" for wrapper in ("ddp", "fsdp2", "replicate")),
        *(f"counts/{wrapper}/{shape}" for wrapper in WRAPPERS
          for shape in ("2/1", "4/1", "4/2")),
        "fault/fsdp2",
    ],
    8: [
        *RAGGED[8],
        f"1F1B/fsdp2-tp/{CELLS[2][0]}",
        f"DualPipeV/hsdp/{CELLS[4][0]}",
    ],
}  # fmt: skip
EXACT = {world: [job for job in jobs if job.split("/")[0] in (*NUM_STAGES, "fault")] for world, jobs in JOBS.items()}


results = of_ranks("tests.exact.pipeline:run_job", JOBS)


REDUCTIONS = (("fsdp2", "reduce_scatter", 2), ("replicate", "all_reduce", 2), ("ddp", "all_reduce", 1))


def check(job: str, found: Iterable[dict[str, Any]]) -> None:
    tolerance = Cell.parse(job.split("/")[2]).tolerance if not job.startswith("fault") else 1e-12
    for value in found:
        assert value["gradient"] <= tolerance, value["parameter"]
        assert not value["wrong"], value["wrong"]


@pytest.mark.parametrize("job", some([job for jobs in EXACT.values() for job in jobs], 4))
def test_exact(results, job: str) -> None:
    check(job, results(job))


@pytest.mark.parametrize("job", ["fault/plain", "fault/fsdp2"])
def test_what_a_loss_did_wrong_is_told_to_all(results, job: str) -> None:
    said = {value["said"] for value in results(job)}
    assert len(said) == 1
    check_error(said.pop(), "a NoneType")


@pytest.mark.parametrize("name", failures.JOBS)
def test_told_to_both(results, name: str) -> None:
    _, expected = failures.JOBS[name]
    check_ranks(results(f"told/{name}"), expected)


@pytest.mark.parametrize(("wrapper", "collective", "once"), REDUCTIONS)
def test_a_call_reduces_once(results, wrapper: str, collective: str, once: int) -> None:
    """FSDP2 has two groups of parameters on each rank, DDP one bucket; however many microbatches there are."""
    for microbatches, calls in ((2, 1), (4, 1), (4, 2)):
        for value in results(f"counts/{wrapper}/{microbatches}/{calls}"):
            assert value == {"reduce_scatter": 0, "all_reduce": 0} | {collective: once * calls}


@pytest.mark.parametrize("job", some([job for jobs in RAGGED.values() for job in jobs], 4))
def test_unequal_lengths_run_in_a_few_steps(results, job: str) -> None:
    check_ragged(job, results(job))


def check_ragged(job: str, found: list[dict[str, Any]]) -> None:
    """The exact gradient, the same steps on all ranks, half of the tokens of one shape, and a reduction a call."""
    _, kind, schedule, wrapper = job.split("/")
    for value in found:
        assert value["gradient"] <= (0 if kind == "bits" else 1e-12)
        assert value["steps"] == found[0]["steps"]
        assert all(2 <= len(steps) <= 4 for steps in value["steps"])
        assert value["most"] <= CAP_TOKENS
        for name, collective, once in REDUCTIONS if schedule == "1F1B" else ():
            if wrapper == name:
                assert value["reductions"] == {"reduce_scatter": 0, "all_reduce": 0} | {collective: 2 * once}
    num_samples = 20 if len(found) > 2 else 32  # of the first data rank, in two calls, one a microbatch
    assert max(value["computed"] for value in found) <= 0.5 * 2 * num_samples * max(LENGTHS)


@pytest.mark.parametrize("job", EVALUATED)
def test_an_evaluation_groups_microbatches_by_length(results, job: str) -> None:
    found = results(job)
    assert all(value["error"] <= 1e-12 for value in found)
    assert max(value["computed"] for value in found) <= 0.7 * found[0]["in_one_shape"]


def test_a_batch_without_lengths_is_told_to_all(results) -> None:
    """Ranks have exchanged their lengths by then, and none is left waiting."""
    for first, second in results("unreadable/ddp"):
        assert "sample 0 of the batch has length 0; leave it out" in first
        assert second == "nothing"


def test_plain_stages_are_summed_once_per_update(results) -> None:
    first, *others = [results(f"counts/plain/{shape}") for shape in ("2/1", "4/1", "4/2")]
    assert others == [first, first]


OWN = (
    Mutation("let torch divide by the microbatches", "pipeline/stages.py", "scale_grads=False", "scale_grads=True"),
    Mutation("let torch drop the gradients of earlier calls", "pipeline/stages.py",
             '"""Do nothing: all shapes are known. torch would drop the gradients of earlier calls here."""',
             "[setattr(each, 'grad', None) for each in self.submod.parameters()]"),
    Mutation("reshard before the gradients of weights", "pipeline/stages.py", "_keep_unsharded(stage.submod)", "pass"),
    Mutation("leave what was filled up", "pipeline/pad_to_shape.py",
             "[leaf[tuple(map(slice, target.shape))] for", "[leaf for"),
    Mutation("forget the norm of other stages", "wrappers/pipeline_wrapper.py",
             "self.norm_groups = list(self.stage_ranks.pipeline_groups)", "self.norm_groups = []"),
)  # fmt: skip
OF_STEPS = (
    Mutation("reduce in every schedule step", "pipeline/stages.py", "and self.reduces:", "and True:"),
    Mutation("let DDP reduce in every schedule step", "pipeline/stages.py",
             "last_backward and self.reduces", "last_backward"),
    Mutation("give a schedule step the microbatches of the first", "pipeline/run.py",
             "index = self._start + place", "index = place"),
)  # fmt: skip
PLANTED = (
    *OWN,
    *OF_STEPS,
    *(each for each in MUTATIONS if each.name in ("differentiate a dummy microbatch", "count a dummy microbatch")),
)
SEEN_BY = (f"1F1B/fsdp2/{CELLS[2][0]}", f"InterleavedZeroBubble/fsdp2/{CELLS[2][1]}")
STEPS_SEEN_BY = ("ragged/language/1F1B/fsdp2", "ragged/language/1F1B/ddp")


@pytest.fixture(scope="module")
def failing(tmp_path_factory) -> dict[str, list[str]]:
    """The jobs that fail, by mutation; "" is the library as it is."""
    folder = tmp_path_factory.mktemp("planted")
    runs = {"": Run(4, [*SEEN_BY, *STEPS_SEEN_BY], folder / "none")}
    for number, mutation in enumerate(PLANTED):
        planted, jobs = folder / str(number), STEPS_SEEN_BY if mutation in OF_STEPS else SEEN_BY
        plant(mutation, planted)
        runs[mutation.name] = Run(4, list(jobs), planted / "run", [str(planted)], len(jobs), 10.0)
    found = launch_all("tests.exact.pipeline:run_job", list(runs.values()), folder)
    return {name: [job for job in ranks if _fails(job, ranks[job])] for name, ranks in zip(runs, found, strict=True)}


def _fails(job: str, ranks: list[Result]) -> bool:
    try:
        (check_ragged if job.startswith("ragged") else check)(job, list(values(ranks)))
    except AssertionError:
        return True
    return False


def test_the_library_passes(failing) -> None:
    assert failing[""] == []


@pytest.mark.parametrize("mutation", PLANTED, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_the_planted_bug_is_caught(failing, mutation: Mutation) -> None:
    assert failing[mutation.name]

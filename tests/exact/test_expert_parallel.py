"""Experts on ranks of their own: the gradient of one process, for every family, layout, sync and number of calls."""

import pytest

from tests.exact.expert_parallel import FAMILIES, OPTIONS, Cell
from tests.exact.launch import Result, Run, launch_all, of_ranks
from tests.exact.mutations import Mutation
from tests.exact.test_mutations import plant
from tests.tiers import full_unless

pytestmark = pytest.mark.slow
LAYOUTS = (("plain", 2, 2), ("plain", 4, 2), ("plain", 4, 4), ("sharded", 2, 2), ("sharded", 4, 2), ("sharded", 4, 4),
           ("hybrid", 4, 2))  # fmt: skip
SYNCS = {
    "plain": ("auto",),
    "sharded": ("every", "last", "gather_once"),
    "hybrid": ("replica_last", "every", "last", "gather_once"),
}
CELLS = [
    Cell(family, layout, sync, way, dtype, world, degree)
    for family in (*FAMILIES, "sparse")
    for layout, world, degree in LAYOUTS
    for sync in SYNCS[layout]
    for way in ("calls", "open")
    for dtype in ("float64", "float32")
]
TOLERANCES = {"float64": 1e-12, "float32": 4e-6}  # of a parameter's gradient, loss and norm
WHOLE_TOLERANCES = {"float64": 1e-12, "float32": 1e-6}  # of all gradients as one vector


def is_quick(cell: Cell) -> bool:
    """One cell of each family and layout on two ranks, and every sync on four."""
    is_first = cell.sync == SYNCS[cell.layout][0] and cell.way == "calls"
    if cell.dtype == "float32":
        return is_first and cell.family == "mixtral" and cell.world == 2
    if cell.family == "sparse" and cell.world == 4:
        return cell.degree == 2 and (cell.way == "open") == (cell.sync in ("auto", "last"))
    return is_first and (cell.world == 2 or cell.family == "mixtral")


NAMES = {f"cell/{cell.name}": cell for cell in CELLS}
WAYS = [f"option/{option}:{layout}:2:2" for option in OPTIONS for layout in ("plain", "sharded")]
EXCHANGES_OF_SHARED = ("mixtral:all_reduce", "mixtral:all_to_all", "sparse:own")
SHARED = [f"shared/{exchange}:{world}:2" for exchange in EXCHANGES_OF_SHARED for world in (2, 4)]
VERIFIED = {  # models, and what verify says of them
    **{f"verify/{family}:{layout}:right:2:2": "" for family in FAMILIES for layout in ("plain", "sharded")},
    **{f"verify/mixtral:{layout}:right:4:2": "" for layout in ("plain", "sharded", "hybrid")},
    "verify/mixtral:plain:shared:2:2": "",
    "verify/mixtral:sharded:divided:2:2": "the total of 'loss' is no sum",
    "verify/mixtral:plain:exchange:2:2": "the gradients differ",
}
EXCHANGES = 2 * 3 * 5  # layers, microbatches; of counts, and of tokens and results with their gradients
# Reductions of an update, and how often they carry the gradients of experts and of other weights, by the whole of both.
# Weights of experts that no other rank has are reduced over no shard, and the shards of two replicas are halves.
COUNTS: dict[str, dict[str, tuple[int, float, float]]] = {
    "count/sparse:plain:auto:2:2": {"all_reduce": (1, 0, 1)},
    "count/sparse:plain:auto:4:2": {"all_reduce": (2 + 1, 1, 2)},  # along ep and dp; experts along dp
    "count/sparse:sharded:every:4:2": {"reduce_scatter": (3 * 5, 3, 3)},  # of two blocks, their experts and the root
    "count/sparse:sharded:last:4:2": {"reduce_scatter": (5, 1, 1)},
    "count/sparse:sharded:gather_once:4:2": {"reduce_scatter": (3 * 5, 3, 3)},
    "count/sparse:sharded:every:4:4": {"reduce_scatter": (3 * 3, 0, 3)},
    "count/sparse:hybrid:every:4:2": {"reduce_scatter": (3 * 3, 0, 3), "all_reduce": (3 * 5, 3, 3 / 2)},
    "count/sparse:hybrid:replica_last:4:2": {"reduce_scatter": (3 * 3, 0, 3), "all_reduce": (5, 1, 1 / 2)},
    "count/sparse:hybrid:last:4:2": {"reduce_scatter": (3, 0, 1), "all_reduce": (5, 1, 1 / 2)},
    "count/sparse:hybrid:gather_once:4:2": {"reduce_scatter": (3 * 3, 0, 3), "all_reduce": (5, 1, 1 / 2)},
    "count/mixtral:plain:auto:4:2": {"all_reduce": (2 + 1, 1, 2)},
    "count/mixtral:sharded:every:4:2": {"reduce_scatter": (3 * 6, 3, 3)},  # and the embedding
    "count/mixtral:hybrid:replica_last:4:2": {"reduce_scatter": (3 * 4, 0, 3), "all_reduce": (6, 1, 1 / 2)},
}
JOBS = [*NAMES, *WAYS, *SHARED, *VERIFIED, *COUNTS]
results = of_ranks("tests.exact.expert_parallel:run_job", JOBS, max_failures=len(JOBS))


@pytest.mark.parametrize("job", full_unless(NAMES, lambda _, job: is_quick(NAMES[job])))
def test_the_gradient_is_that_of_one_process(results, job: str) -> None:
    for found in results(job):
        assert found["error"] <= TOLERANCES[NAMES[job].dtype], found["of"]
        assert found["whole"] <= WHOLE_TOLERANCES[NAMES[job].dtype]


@pytest.mark.parametrize("job", WAYS)
def test_other_ways_to_make_an_update(results, job: str) -> None:
    for found in results(job):
        assert found["error"] <= TOLERANCES["float64"], found["of"]


@pytest.mark.parametrize("job", SHARED)
def test_experts_of_ranks_that_share_samples_are_along_tp(results, job: str) -> None:
    for found in results(job):
        assert found["error"] <= TOLERANCES["float64"], found["of"]


@pytest.mark.parametrize("job", full_unless(VERIFIED, lambda _, job: "mixtral" in job and job.endswith("2:2")))
def test_verify_compares_with_all_experts_on_one_rank(results, job: str) -> None:
    for found in results(job):
        assert found["same"]
        assert found["ok"] == (not VERIFIED[job]), found
        assert VERIFIED[job] in "".join(found["causes"])
        assert found["error"] <= TOLERANCES["float64"] if found["ok"] else found["error"] > 0.1


@pytest.mark.parametrize("job", COUNTS)
def test_nothing_is_exchanged_or_reduced_twice(results, job: str) -> None:
    for found in results(job):
        assert found["all_to_all"] == EXCHANGES
        reductions = {kind: found[kind] for kind in ("all_reduce", "reduce_scatter") if kind in found}
        assert reductions == {kind: calls for kind, (calls, _, _) in COUNTS[job].items()}
        for kind, (_, experts, others) in COUNTS[job].items():
            assert found[f"{kind}_bytes"] == experts * found["expert_bytes"] + others * found["dense_bytes"], kind


EXPERTS, SHARDED = "wrappers/expert_parallel.py", "cell/sparse:sharded:every:calls:float64:4:2"
ALONE, COPIES = "cell/sparse:plain:auto:calls:float64:2:2", "cell/sparse:plain:auto:calls:float64:4:2"
VERIFIED_ALONE, VERIFIED_LOADED = "verify/mixtral:plain:right:2:2", "verify/mixtral:sharded:right:2:2"
LOADED = "cell/mixtral:sharded:every:calls:float64:2:2"
PLANTED = {  # bugs, and a job that sees each
    Mutation("sum different experts", EXPERTS,
             "for group in self._replica_groups:", "for group in self.ranks.groups:"): ALONE,
    Mutation("leave copies of an expert unsummed", EXPERTS,
             "for group in self._replica_groups:", "for group in ():"): COPIES,
    Mutation("sum other parameters over copies alone", EXPERTS,
             "for group in self.ranks.groups:", "for group in self._replica_groups:"): ALONE,
    Mutation("divide experts by their ranks", EXPERTS,
             "sum_over_ranks(experts, group)\n", "sum_over_ranks(experts, group)\n"
             "            for each in experts:\n                each /= self.ranks.degree\n"): ALONE,
    Mutation("weigh the samples of copies alone", EXPERTS,
             "DataRanks(groups_of(mesh, SAMPLE_AXES)[::-1])", "DataRanks(groups_of(mesh, DATA_AXES)[::-1])"): COPIES,
    Mutation("divide experts by their ranks, and verify", EXPERTS,
             "sum_over_ranks(experts, group)\n", "sum_over_ranks(experts, group)\n"
             "            for each in experts:\n                each /= self.ranks.degree\n"): VERIFIED_ALONE,
    Mutation("count experts twice in the norm", EXPERTS,
             "self._replica_groups = [",
             "self.norm_groups = groups_of(mesh, (EXPERT_AXIS,))\n        self._replica_groups = ["): ALONE,
    Mutation("count shards twice in the norm", EXPERTS,
             "self.kind_name = f", "self.norm_groups = ranks.groups\n        self.kind_name = f"): SHARDED,
    Mutation("let FSDP2 average experts", "wrappers/fsdp2.py",
             "module.set_gradient_divide_factor(1.0)",
             "module.set_gradient_divide_factor(2.0 if 'Experts' in type(module).__name__ else 1.0)"): LOADED,
    Mutation("let FSDP2 average experts, and verify", "wrappers/fsdp2.py",
             "module.set_gradient_divide_factor(1.0)",
             "module.set_gradient_divide_factor(2.0 if 'Experts' in type(module).__name__ else 1.0)"): VERIFIED_LOADED,
    Mutation("let FSDP2 average over its ranks", "wrappers/fsdp2.py",
             "module.set_gradient_divide_factor(1.0)", "pass"): SHARDED,
    Mutation("weigh the samples of FSDP2's copies alone", EXPERTS,
             "return DataRanks(groups_of_info(info))", "return DataRanks(groups_of_info("
             "next(each for each in groups if each not in dense).mesh_info))"): SHARDED,
    Mutation("differentiate a dummy microbatch", "core/update.py",
             "        if step.is_dummy:\n            factors", "        if False:\n            factors"): COPIES,
}  # fmt: skip


def passes(ranks: list[Result]) -> bool:
    return all("error" not in each and each["value"]["error"] <= TOLERANCES["float64"] for each in ranks)


def test_planted_bugs_are_seen(tmp_path) -> None:
    runs = []
    for number, (mutation, job) in enumerate(PLANTED.items()):
        planted = tmp_path / str(number)
        plant(mutation, planted)
        runs.append(Run(int(job.split(":")[-2]), [job], planted / "run", [str(planted)], group_timeout_seconds=10.0))
    found = launch_all("tests.exact.expert_parallel:run_job", runs, tmp_path)
    passing = [m.name for (m, job), each in zip(PLANTED.items(), found, strict=True) if passes(each[job])]
    assert passing == []

"""Runs with ``same_bits=True`` leave the same bits on any number of ranks, under any wrapper and sync."""

from pathlib import Path

import pytest

from tests.exact.launch import Run, launch_all, of_ranks
from tests.exact.mutations import Mutation
from tests.exact.same_bits import DTYPES, LIMITS, MODELS, SYNCS, WORLDS
from tests.exact.test_mutations import plant
from tests.tiers import full_unless

QUICK = {"plain": (1, 3), "ddp": (2,), "fsdp2": (3,), "hsdp": (4,)}  # worlds of each wrapper
NUM_UPDATES = {"quick": 8, "full": 50}


def jobs_of(loss: str, dtype: str, limit: str, tier: str) -> list[tuple[str, str]]:
    """Jobs that must leave the same bits: the first, and each of the others."""
    worlds = QUICK if tier == "quick" else WORLDS
    jobs = [
        f"{loss}:{dtype}:{wrapper}:{limit}:{sync}:{NUM_UPDATES[tier]}:{world}:"
        for wrapper in worlds
        for sync in SYNCS[wrapper][-1 if tier == "quick" else 0 :]
        for world in worlds[wrapper]
    ]
    return [(jobs[0], job) for job in jobs[1:]]


QUICK_PAIRS = [*jobs_of("gpt2", "float32", "tokens", "quick"), *jobs_of("late", "bfloat16", "count", "quick")]
PAIRS = [
    *QUICK_PAIRS,
    *(pair for loss in MODELS for dtype in DTYPES for limit in LIMITS for pair in jobs_of(loss, dtype, limit, "full")),
    *(pair for loss in ("late", "several") for limit in LIMITS for pair in jobs_of(loss, "float32", limit, "full")),
]
found = of_ranks("tests.exact.same_bits:run_job", list(dict.fromkeys(job for pair in PAIRS for job in pair)))


def test_the_table_is_the_promise() -> None:
    assert len(PAIRS) == 2 * 4 + 16 * 21


@pytest.mark.slow
@pytest.mark.parametrize(("first", "job"), full_unless(PAIRS, lambda _, pair: pair in QUICK_PAIRS))
def test_the_same_bits(found, first: str, job: str) -> None:
    (one, *_), ranks = found(first), found(job)
    assert {each["clipped"] for each in (one, *ranks)} == {int(job.split(":")[5])}, "a clip does not bite"
    assert len(ranks) < 4 or any(each["empty"] for each in ranks), "every rank always has samples"
    assert {each["weights"] for each in ranks} == {one["weights"]}
    assert {each["reports"] for each in ranks} == {one["reports"]}


MUTATIONS = (  # with the job that then differs from the first
    (Mutation("round before the sum", "wrappers/wide_gradients.py",
              "if parameter.grad is not None and parameter.grad.dtype != self.dtype:", "if False:"),
     ("gpt2:float32:plain:tokens:last:6:1:", "gpt2:float32:plain:tokens:last:6:3:")),
    (Mutation("let FSDP2 round what it has reduced", "torch_private/fsdp2_groups.py",
              "setattr(place, name, dtype)", "pass"),
     ("gpt2:float32:fsdp2:tokens:every:6:1:", "gpt2:float32:fsdp2:tokens:every:6:3:")),
    (Mutation("take torch's norm of the shards", "wrappers/exact_gradients.py",
              "return exact_norm(parameters)", "return super().norm(parameters, groups, uncounted)"),
     ("gpt2:float32:fsdp2:tokens:every:6:1:", "gpt2:float32:fsdp2:tokens:every:6:3:")),
    (Mutation("deal ties in another order", "planning/balancing.py",
              "microbatches = fill(lengths, max_rows=max_rows, max_tokens=max_tokens)",
              "microbatches = [tuple(len(lengths) - 1 - item for item in group)"
              " for group in fill(lengths[::-1], max_rows=max_rows, max_tokens=max_tokens)]"),
     ("conv:float32:plain:count:last:6:1:", "conv:float32:plain:count:last:6:3:")),
    (Mutation("cut by rank", "planning/sampler.py", "        if self._same_bits:\n            return self._ranks_of_m",
              "        if False:\n            return self._ranks_of_m"),
     ("gpt2:float32:plain:tokens:last:6:1:", "gpt2:float32:plain:tokens:last:6:3:")),
    (Mutation("add weights in the order of ranks", "core/update.py",
              "totals, weights = self.sums_over_ranks(names, totals, weights)", "pass"),
     ("late:float32:plain:tokens:last:6:1:", "late:float32:plain:tokens:last:6:3:")),
    (Mutation("leave an unused parameter None", "wrappers/exact_gradients.py",
              "parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.add_(0.0)",
             "pass"),
     ("late:float32:plain:tokens:last:6:1:", "late:float32:fsdp2:tokens:last:6:3:")),
)  # fmt: skip


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("mutation", "jobs"), MUTATIONS, ids=lambda each: getattr(each, "name", "").replace(" ", "-"))
def test_a_planted_bug_is_caught(mutation: Mutation, jobs: tuple[str, str], tmp_path: Path) -> None:
    plant(mutation, tmp_path)
    runs = [Run(int(job.split(":")[-2]), [job], tmp_path / job, [str(tmp_path)]) for job in jobs]
    results = [ranks for each in launch_all("tests.exact.same_bits:run_job", runs, tmp_path) for ranks in each.values()]
    assert "error" not in results[0][0], results[0][0]
    assert results[0][0]["value"] | {"empty": 0} != results[1][0].get("value", {}) | {"empty": 0}

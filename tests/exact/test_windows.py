"""Bugs that are planted in updates of several calls, forwards without a backward, and shared prefixes are seen."""

from pathlib import Path

import pytest

from tests.exact import test_inputs
from tests.exact.cells import Cell
from tests.exact.launch import Result, Run, launch_all, values
from tests.exact.mutations import Mutation
from tests.exact.test_exact import check
from tests.exact.test_mutations import TIMEOUT_SECONDS, plant

pytestmark = pytest.mark.slow
CELL, ROW, COUNT = "tests.exact.harness:run_cell", "tests.exact.inputs:run_job", "tests.comm.jobs:run_job"
REDUCED = "tests.exact.reductions:run_job"


def told(wrapper: str, loss: str = "late", sync: str = "last") -> tuple[str, ...]:
    world = 4 if wrapper == "hsdp" else 2
    return CELL, f"bits:{wrapper}:{world}:{sync}:calls:list:{loss}:two-samples:told:no-clip"


FLUSH = "self._set(reduce=True, all_reduce=True, last=True)\n            # A model"
ADD = "sums.add(terms_of(forwards.run(loss_fn, gradient.model, step.microbatch)), step)"
AVERAGE = ADD.replace("sums.add(", "terms = ").replace(", step)", "") + (
    "\n                "
    "sums.add({name: type(each)(each.total / each.weight, 1.0) for name, each in terms.items()}, step)"
)
RANDOM = "stack.enter_context(random_state.replay(random_state.note(wrapper.device)))"
PLANTED = {  # bugs, and the jobs that see each
    Mutation("tell each rank its own weight", "core/agreement.py",
             "math.fsum(column[: ranks.degree])", "math.fsum(column[:1])"): told("plain"),
    Mutation("divide each call by its own weight", "core/divisors.py",
             '"""Keep the divisors that were told."""', "self.by_term = _divisors_of(weights)"): told("plain", "terms"),
    Mutation("keep the factor of a mean", "wrappers/ddp.py",
             "self._sums or self._waits else", "self._sums or self._is_local else"): told("ddp"),
    Mutation("reduce with each call", "wrappers/ddp.py",
             'if policy == "last" and not self._hooks', "if False"):
        (COUNT, "opened:ddp:last:2:1", "opened:ddp:last:2:3"),
    Mutation("forget to reduce at the end", "wrappers/fsdp2.py",
             "with self._reducing_wide():\n                    reduce_fsdp_gradients(self._modules)", "pass"):
        told("fsdp2"),
    Mutation("forget the replicas at the end", "wrappers/fsdp2.py",
             FLUSH, FLUSH.replace("all_reduce=True", "all_reduce=False")): told("hsdp", sync="replica_last"),
    Mutation("leave buffers as each rank has them", "wrappers/ddp.py",
             "broadcast_buffers(self.ddp)", "pass"): (REDUCED, "buffers/open"),
    Mutation("leave gathered what the last microbatch has not used", "wrappers/fsdp2.py",
             "                self.reshard()\n", "                pass\n"): (REDUCED, "once/gather_once/forward"),
    Mutation("step what was left out", "core/update.py",
             "if bool(_differs(returned, announced)):", "if False:"): (ROW, "a_sum_that_is_another-half:2"),
    Mutation("average averages", "loops/forwards.py", ADD, AVERAGE): (ROW, "evaluated_by_counts_that_differ-plain:2"),
    Mutation("return outputs in the order of the cut", "loops/sample_outputs.py",
             "outputs_of_samples[row] = ", "outputs_of_samples[outputs_of_samples.index(None)] = "):
        (ROW, "outputs_of_samples:1"),
    Mutation("leave parameters gathered", "loops/forwards.py",
             "there was none.\n        wrapper.reshard()\n", "there was none.\n        pass\n"):
        (ROW, "forwards_in_an_open_update-fsdp2:2"),
    Mutation("let branches see each other", "batching/shared_prefix.py",
             "(query_branch == key_branch) | (key_branch == 0)", "key_branch >= 0"):
        (ROW, "attention_that_adds_its_mask-sdpa:1"),
    Mutation("go on with positions over branches", "batching/shared_prefix.py",
             "source % longest, target", "np.arange(source.size).reshape(source.shape) % width, target"):
        (ROW, "prompts_with_targets-llama:1"),
    Mutation("gather the token before", "batching/shared_prefix.py",
             "number * width + np.arange(start, end)\n                target",
             "number * width + np.arange(start, end) - 1\n                target"): (ROW, "a_batch_of_one_length:1"),
    Mutation("share one token more", "batching/shared_prefix.py",
             "return int(differs.argmax()) if", "return int(differs.argmax()) + 1 if"):
        (ROW, "prompts_with_targets-gpt2:1"),
    Mutation("trees beyond the window", "batching/shared_prefix.py",
             "min(max_tokens, self.longest_tree or max_tokens)", "max_tokens"): (ROW, "a_window_that_bounds_trees:1"),
    Mutation("try no rows beside the tree", "batching/packing_check.py",
             "is_seen or not equal_but_rounding(apart, together)", "is_seen"):
        (ROW, "models_whose_branches_may_see_each_other-window:1"),
    Mutation("share with dropout", "batching/shared_prefix.py",
             "        _refuse_dropout(model)\n", ""):
        (ROW, "models_whose_branches_may_see_each_other-dropout:1"),
    Mutation("take the plan of other tokens", "core/call.py",
             "self.batching.check_plan(samples, plan)", "pass"):
        (ROW, "a_plan_of_samples_that_begin_otherwise:1"),
    Mutation("draw numbers for good", "loops/forwards.py", RANDOM, "pass"):
        (ROW, "forwards_in_an_open_update-plain:2"),
}  # fmt: skip


def check_cells(found: dict[str, list[Result]]) -> None:
    for job, ranks in found.items():
        for result in ranks:
            check(Cell.parse(job), result)


def check_counts(found: dict[str, list[Result]]) -> None:
    one, several = (next(values(ranks)) for ranks in found.values())
    assert several["all_reduce"] == one["all_reduce"]


def check_rows(found: dict[str, list[Result]]) -> None:
    for job, ranks in found.items():
        test_inputs.check(job, list(values(ranks)))


def check_reduced(found: dict[str, list[Result]]) -> None:
    for job, ranks in found.items():
        for value in values(ranks):
            assert all(value) if job.startswith("buffers") else max(value["errors"]) <= 1e-12


CHECKS = {CELL: check_cells, ROW: check_rows, COUNT: check_counts, REDUCED: check_reduced}


def passes(function: str, found: dict[str, list[Result]]) -> bool:
    try:
        CHECKS[function](found)
    except AssertionError:
        return False
    return True


def world(job: str) -> int:
    return next((int(part) for part in job.split(":") if part in ("1", "2", "4")), 2)


def passing(folder: Path, planted: bool) -> list[str]:
    """The bugs whose jobs pass, with the bugs or without."""
    found: list[str] = []
    for kind, function in enumerate(CHECKS):
        bugs = [(bug, jobs) for bug, (its, *jobs) in PLANTED.items() if its == function]
        runs: list[Run] = []
        for number, (bug, jobs) in enumerate(bugs):
            place = folder / f"{kind}-{number}"
            if planted:
                plant(bug, place)
            path = [str(place)] if planted else []
            runs.append(Run(world(jobs[0]), jobs, place / "run", path, len(jobs), TIMEOUT_SECONDS))
        results = launch_all(function, runs, folder)
        found += [bug.name for (bug, _), each in zip(bugs, results, strict=True) if passes(function, each)]
    return found


def test_planted_bugs_are_seen(tmp_path) -> None:
    assert passing(tmp_path, planted=True) == []


@pytest.mark.full
def test_the_library_passes(tmp_path) -> None:
    assert sorted(passing(tmp_path, planted=False)) == sorted(bug.name for bug in PLANTED)

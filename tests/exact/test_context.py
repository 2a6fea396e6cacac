"""Sequences that are cut over ranks have the gradient of the uncut model; planted bugs do not."""

import pytest

from tests.exact.launch import of_ranks
from tests.tiers import some

pytestmark = pytest.mark.slow
FAMILIES = ("gpt2", "gpt_neox", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3")
CASES = ("uneven", "one", "short", "masked", "left", "packed", "weightless")
WAYS = ("plain", "plain-calls", "ddp", "fsdp2", "fsdp2-calls", "hsdp")
BOUNDS = {"float64": 1e-12, "float32": 2e-6}
JOBS = {
    2: [
        *[f"alone:{family}:{case}:float64:2" for family in ("gpt2", "llama") for case in CASES],
        *[f"alone:{family}:packed:float64:2" for family in FAMILIES[1:] if family != "llama"],
        *[f"{way}:gpt2:uneven:float64:2" for way in WAYS],
        "plain:llama:packed:float32:2", "fsdp2:gpt2:uneven:float32:2", "alone:gpt2:packed:bfloat16:2",
        *[f"checkpointed:{family}:packed:float64:2" for family in ("gpt2", "llama")],
    ],
    4: [
        *[f"{way}:{model}:float64:2" for way in WAYS for model in ("gpt2:uneven", "llama:packed", "llama:one")],
        *[f"alone:gpt2:{case}:float64:4" for case in ("short", "uneven", "left")],
        *[f"fsdp2:llama:{case}:float64:4" for case in ("short", "packed")],
    ],
}  # fmt: skip
BUGS = {  # and a case in which each is to be seen
    "shift within the stretch": "uneven",
    "positions of the stretch in the mask": "packed",
    "positions of the stretch in the order": "uneven",
    "documents see each other": "packed",
    "pieces in the order of ranks": "uneven",
    "gradients of other ranks' queries lost": "uneven",
    "positions from the stretch": "uneven",
}
PLANTED = [f"{bug}:gpt2:{case}:float64:2" for bug, case in BUGS.items()]


results = of_ranks(
    "tests.exact.context:run_job", {2: ["names", "traffic", "labels-are-read", *JOBS[2], *PLANTED], 4: JOBS[4]}
)


@pytest.mark.parametrize("job", some(dict.fromkeys(job for jobs in JOBS.values() for job in jobs), 3))
def test_the_gradient_of_the_uncut_model(results, job: str) -> None:
    for value in results(job):
        bound = BOUNDS.get(job.split(":")[3]) or 2 * value["uncut"]
        assert value["error"] <= bound, value


def test_nothing_is_left_out(results) -> None:
    assert results("names")[0] == [sorted(FAMILIES), sorted(CASES), sorted(BUGS)]


@pytest.mark.parametrize("job", PLANTED)
def test_a_planted_bug_is_caught(results, job: str) -> None:
    assert all(value["error"] > 1e-3 for value in results(job))


def test_a_layer_gathers_once_and_sends_back_once(results) -> None:
    assert results("traffic")[0] == {"all_gather": 2, "all_to_all": 2}


def test_a_loss_that_reads_labels_is_told(results) -> None:
    for text in results("labels-are-read"):
        assert text.startswith("labels is not in a stretch of a sequence that is cut over ranks")

"""Context parallelism in pipelines gives the gradient of the whole model; planted bugs do not."""

from typing import Any

import pytest

from tests.exact.launch import Result, Run, launch_all, of_ranks, values
from tests.exact.mutations import Mutation
from tests.exact.test_mutations import plant
from tests.tiers import full_unless

pytestmark = pytest.mark.slow
JOBS = {  # ranks → "family schedule wrapper kind"
    4: [
        "gpt2 1F1B replicate ragged",
        "gpt2 InterleavedZeroBubble fsdp2 packed",
        "llama 1F1B fsdp2 packed",
        "llama 1F1B fsdp2 mixed",
        "llama Interleaved1F1B fsdp2 masked",
        "llama DualPipeV replicate ragged",
        "qwen3 GPipe replicate packed",
        "tied-qwen3 LoopedBFS fsdp2 ragged",
        "qwen2 ZBVZeroBubble replicate masked",
    ],
    8: ["llama 1F1B fsdp2 packed", "tied-gpt2 Interleaved1F1B replicate ragged"],
}
SEEN_BY = ("gpt2 1F1B replicate ragged", "llama DualPipeV replicate ragged", "llama 1F1B fsdp2 mixed")  # every bug


results = of_ranks("tests.exact.context_stages:run_job", JOBS)


@pytest.mark.parametrize("name", full_unless([*JOBS[4], *JOBS[8]], lambda _, name: name in SEEN_BY))
def test_stages_compute_what_the_whole_model_does(results: Any, name: str) -> None:
    check(results(name))


def check(found: list[dict[str, Any]]) -> None:
    for value in found:
        assert max(value["error"], value["loss"], value["evaluation"]) < 1e-12, value["parameter"]
        assert value["counts"]
        assert value["steps"] == found[0]["steps"]


BUGS = (
    Mutation("give each stretch of a schedule step a length of its own", "planning/stretches.py",
             "max(document.shape[1] for document in documents) // (2 * degree)",
             "documents[-1].shape[1] // (2 * degree)"),
    Mutation("give each stretch of a schedule step a mask of its own", "planning/stretches.py",
             "whole, None if plain else each", "whole, None if _order_says_all(each, whole) else each"),
    Mutation("let order decide where documents do", "planning/stretches.py",
             "plain = all(map(", "plain = any(map("),
    Mutation("leave the dummy microbatches of cut sequences whole", "pipeline/run.py",
             "dummy=iter(parts[num_real:]).__next__", "dummy=iter(wholes[num_real:]).__next__"),
    Mutation("weigh stretches by a length of their own", "pipeline/run.py",
             "collated=tuple(parts[:num_real]), weights=weights", "collated=tuple(parts[:num_real])"),
)  # fmt: skip


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The jobs that fail with a bug planted; "" is the library as it is."""
    folder = tmp_path_factory.mktemp("planted")
    runs = {"": Run(4, list(SEEN_BY), folder / "none")}
    for number, mutation in enumerate(BUGS):
        planted = folder / str(number)
        plant(mutation, planted)
        runs[mutation.name] = Run(4, list(SEEN_BY), planted / "run", [str(planted)], len(SEEN_BY), 10.0)
    found = launch_all("tests.exact.context_stages:run_job", list(runs.values()), folder)
    return {name: [job for job in ranks if _fails(ranks[job])] for name, ranks in zip(runs, found, strict=True)}


def _fails(ranks: list[Result]) -> bool:
    try:
        check(list(values(ranks)))
    except AssertionError:
        return True
    return False


@pytest.mark.full
def test_the_library_passes(failing: dict[str, list[str]]) -> None:
    assert failing[""] == []


@pytest.mark.full
@pytest.mark.parametrize("mutation", BUGS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_planted_bug_is_caught(failing: dict[str, list[str]], mutation: Mutation) -> None:
    assert failing[mutation.name]

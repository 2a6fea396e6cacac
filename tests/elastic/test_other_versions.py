"""A checkpoint that was made with other versions says so, and resumes."""

import json
from pathlib import Path

import pytest

from megabatch.train.checkpoints.metadata import describe_versions, installed_version
from megabatch.train.runtime.files import sealed_text
from tests.train.conftest import NO_DROPOUT, Bench, bench_in


def change_versions(checkpoint: Path, versions: object) -> None:
    meta = json.loads((checkpoint / "meta.json").read_text())
    del meta["sha256"]
    (checkpoint / "meta.json").write_text(sealed_text({**meta, "versions": versions}))


@pytest.fixture(scope="module")
def two_updates(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = bench_in(tmp_path_factory.mktemp("run"))
    bench.train(run__max_steps=2, eval__num_samples=0, **NO_DROPOUT)
    return bench


def test_other_versions_are_told(two_updates: Bench) -> None:
    step = two_updates.folder / "checkpoints" / "step-2"
    change_versions(step, {"torch": "2.9.1", "megabatch": "0.0.1"})
    said = two_updates.train(run__max_steps=3, eval__num_samples=0, run__resume=True, **NO_DROPOUT)
    here = f"torch {installed_version('torch')}, megabatch {installed_version('megabatch')}"
    assert f"warning: {step} was made with torch 2.9.1, megabatch 0.0.1, and this is {here}" in said


@pytest.mark.parametrize("versions", [{"torch": installed_version("torch"), "other": "1"}, "odd"])
def test_the_same_versions_are_no_news(two_updates: Bench, versions: object) -> None:
    step = two_updates.folder / "checkpoints" / "step-2"
    change_versions(step, versions)
    assert describe_versions(step) == []

"""A checkpoint of an earlier version loads with a warning, and other versions of what made it are told."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megabatch.train.checkpoints.export import find_checkpoint
from megabatch.train.checkpoints.metadata import describe_age, installed_version
from tests.train.conftest import NO_DROPOUT, Bench, bench_in, states_of

OLD = "is of an earlier version and has no sums: its files are long enough, and what is in them is not checked"


def take_sums(checkpoint: Path, **versions: str) -> None:
    """Write a checkpoint's metadata as earlier versions did, without digests."""
    meta = json.loads((checkpoint / "meta.json").read_text())
    for key in ("sha256", "files"):
        meta.pop(key, None)
    meta["versions"].update(versions)
    (checkpoint / "meta.json").write_text(json.dumps(meta))


@pytest.fixture(scope="module")
def two_updates(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = bench_in(tmp_path_factory.mktemp("run"))
    bench.train(run__max_steps=2, eval__num_samples=0, **NO_DROPOUT)
    return bench


@pytest.mark.full
def test_a_checkpoint_without_sums_is_gone_on_from_to_the_bit(two_updates: Bench, tmp_path: Path) -> None:
    bench = two_updates
    values = {"run__max_steps": 4, "eval__num_samples": 0, **NO_DROPOUT}
    whole = bench.path / "whole"
    bench.train(**values, run__folder=whole)
    step = bench.folder / "checkpoints" / "step-2"
    take_sums(step, torch="2.9.1", megabatch="0.0.1")
    said = bench.train(**values, run__resume=True)
    assert f"warning: {step} {OLD}" in said
    here = f"torch {installed_version('torch')}, megabatch {installed_version('megabatch')}"
    assert f"warning: {step} was made with torch 2.9.1, megabatch 0.0.1, and this is {here}" in said
    resumed, expected = (
        states_of(folder / "checkpoints" / "step-4", tmp_path / name)
        for folder, name in ((bench.folder, "a"), (whole, "b"))
    )
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


@pytest.fixture
def old(two_updates: Bench, tmp_path: Path) -> Path:
    """A run whose only checkpoint has no sums."""
    source = two_updates.folder / "checkpoints" / "step-2"
    checkpoint = tmp_path / "old" / "checkpoints" / "step-2"
    checkpoint.mkdir(parents=True)
    for path in source.iterdir():
        (checkpoint / path.name).write_bytes(path.read_bytes())
    take_sums(checkpoint)
    return checkpoint


def test_files_that_are_there_and_long_enough_are_taken(old: Path) -> None:
    assert find_checkpoint(old.parents[1], None).path == old
    assert describe_age(old)[0] == f"{old} {OLD}"


def cut(checkpoint: Path) -> None:
    (part,) = checkpoint.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-1000])


def remove(checkpoint: Path) -> None:
    (part,) = checkpoint.glob("*.distcp")
    part.unlink()


def link(checkpoint: Path) -> None:
    (part,) = checkpoint.glob("*.distcp")
    part.rename(checkpoint.parents[1] / "elsewhere")
    part.symlink_to(checkpoint.parents[1] / "elsewhere")


def cut_description(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes((checkpoint / ".metadata").read_bytes()[:100])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(cut, "bytes of"), (remove, "is not there"), (link, "is a link, not a file"), (cut_description, "")],
)
def test_files_that_are_cut_or_missing_are_not(old: Path, damage: Callable[[Path], object], reason: str) -> None:
    damage(old)
    with pytest.raises(Exception, match=f"has no whole checkpoint to resume from: step-2 .*{reason}"):
        find_checkpoint(old.parents[1], None)


def test_metadata_that_lost_its_sum_alone_is_damaged(old: Path) -> None:
    """A table with sums is checked by them."""
    meta = json.loads((old / "meta.json").read_text())
    (old / "meta.json").write_text(json.dumps({**meta, "files": {}}))
    with pytest.raises(Exception, match="its SHA-256 is another"):
        find_checkpoint(old.parents[1], None)


def test_the_same_versions_are_no_news(old: Path) -> None:
    meta = json.loads((old / "meta.json").read_text())
    meta["versions"] = {"torch": installed_version("torch"), "other": "1"}
    (old / "meta.json").write_text(json.dumps(meta))
    assert describe_age(old) == [f"{old} {OLD}"]
    meta["versions"] = "odd"
    (old / "meta.json").write_text(json.dumps(meta))
    assert describe_age(old) == [f"{old} {OLD}"]

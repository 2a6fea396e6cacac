"""Which of a run's checkpoints is gone on from, on every rank the same one, and what is said of it."""

import json
import shutil
from pathlib import Path

import pytest

from megabatch import MegabatchError
from megabatch.train.checkpoints.metadata import DamagedError, read_meta
from megabatch.train.checkpoints.paths import checkpoints_of, has_checkpoint, path_of, step_of
from megabatch.train.checkpoints.retention import Checkpoints, ValidCheckpoint, resumed_from
from megabatch.train.config import RunConfig
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.files import replace_text
from megabatch.train.runtime.ranks import Ranks
from tests.train.conftest import Bench
from tests.train.on_ranks import on_ranks
from tests.train.test_checkpoint import ALONE, line_of, names, save
from tests.train.test_resume import timeless


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three checkpoints."""
    for step in (2, 4, 6):
        save(tmp_path, step)
    return tmp_path


def spoil(run: Path, step: int) -> Path:
    """Another last byte in the file of tensors."""
    path = min(path_of(run, step).glob("*.distcp"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def choose(run: Path) -> ValidCheckpoint:
    return Checkpoints(run).latest_valid(ALONE)


def step_chosen(run: Path) -> int | None:
    return step_of(choose(run).path.name)


def test_a_whole_one_is_taken_without_a_word(run: Path) -> None:
    assert choose(run) == ValidCheckpoint(path_of(run, 6))


def test_the_one_before_is_taken_and_that_is_said(run: Path) -> None:
    spoil(run, 6)
    reason = "__0_0.distcp is not what was written: its SHA-256 is another"
    first = f"{path_of(run, 6)} is damaged ({reason}); the run resumes from step-4"
    assert choose(run) == ValidCheckpoint(path_of(run, 4), (first,))
    spoil(run, 4).unlink()
    second = f"{path_of(run, 4)} is damaged (__0_0.distcp is not there); the run resumes from step-2"
    assert choose(run).warnings == (first.replace("step-4", "step-2"), second)
    (path_of(run, 2) / "meta.json").write_text("{}")
    assert line_of(choose, run) == (
        f"{checkpoints_of(run)} has no whole checkpoint to resume from: step-6 ({reason}), step-4 (__0_0.distcp is not "
        "there), step-2 (meta.json: it is of step None); put back a copy of one, or start in a new run.folder"
    )
    assert names(run) == ["latest", "step-2", "step-4", "step-6"]  # left where they are


def test_a_checkpoint_under_the_name_of_another_is_damaged(run: Path) -> None:
    shutil.rmtree(path_of(run, 6))
    shutil.copytree(path_of(run, 4), path_of(run, 6))
    assert choose(run).warnings == (
        f"{path_of(run, 6)} is damaged (meta.json: it is of step 4); the run resumes from step-4",
    )


@pytest.mark.parametrize("text", ["", "step-", "step-06", "../step-6", "step-6.tmp", "\0", "step-\u0666"])
def test_where_the_pointer_names_nothing_the_newest_whole_one_is_taken(run: Path, text: str) -> None:
    pointer = checkpoints_of(run) / "latest"
    pointer.write_text(text)
    assert choose(run) == ValidCheckpoint(
        path_of(run, 6), (f"{pointer} names no checkpoint ({text or 'nothing'}); the run resumes from step-6",)
    )
    pointer.unlink()
    assert has_checkpoint(run)
    assert step_chosen(run) == 6


def test_what_lies_beyond_the_pointer_is_never_taken(run: Path) -> None:
    pointer = checkpoints_of(run) / "latest"
    pointer.write_text("step-4")
    beyond = f"{path_of(run, 6)} lies beyond step-4, from which the run resumes"
    assert choose(run) == ValidCheckpoint(path_of(run, 4), (beyond,))
    pointer.write_text("step-5")
    first = f"{path_of(run, 5)} is damaged (it is not there); the run resumes from step-4"
    assert choose(run) == ValidCheckpoint(path_of(run, 4), (first, beyond))
    for step in (2, 4):
        spoil(run, step)
    assert f"; name step-6, which lies beyond, in {pointer}, or start in a new run.folder" in line_of(choose, run)


def test_a_checkpoint_of_an_earlier_version_is_loaded_and_that_is_said(run: Path) -> None:
    path = path_of(run, 6)
    meta = json.loads((path / "meta.json").read_text())
    unsealed = {key: meta[key] for key in meta if key not in ("files", "sha256")}
    (path / "meta.json").write_text(json.dumps(unsealed))
    line = f"{path} has no checksums, as of an earlier version: only that its files are there is known"
    assert choose(run) == ValidCheckpoint(path, (line,))
    (tensors,) = path.glob("*.distcp")
    tensors.write_bytes(tensors.read_bytes()[:-1])
    assert "is damaged (__0_0.distcp has " in choose(run).warnings[0]
    tensors.unlink()
    assert "is damaged (__0_0.distcp is not there); " in choose(run).warnings[0]
    (path / ".metadata").unlink()
    assert "is damaged (FileNotFoundError: " in choose(run).warnings[0]
    (path / "meta.json").write_text(json.dumps({"step": 6}))
    assert choose(run).warnings == (f"{path} is damaged (meta.json: settings is missing); the run resumes from step-4",)


@pytest.mark.parametrize("key", ["files", "sha256", "step", "updates"])
def test_what_is_taken_out_of_a_sealed_meta_is_seen(run: Path, key: str) -> None:
    """Not even without its sums is it taken for one of an earlier version."""
    path = path_of(run, 6) / "meta.json"
    meta = json.loads(path.read_text())
    del meta[key]
    path.write_text(json.dumps(meta))
    with pytest.raises(DamagedError, match="its SHA-256 is another"):
        read_meta(path.parent)
    assert step_chosen(run) == 4


def test_only_whole_ones_are_counted_among_the_last_to_keep(run: Path) -> None:
    spoil(run, 4)
    save(run, 8)
    Checkpoints(run).prune(2, ALONE)
    assert names(run) == ["latest", "step-6", "step-8"]  # 4 lay before two whole ones
    save(run, 10)
    spoil(run, 8)
    Checkpoints(run).prune(2, ALONE)
    assert names(run) == ["latest", "step-10", "step-6", "step-8"]
    save(run, 8)
    assert step_chosen(run) == 8  # a run that has come to it again


def test_a_file_that_cannot_be_written_through_leaves_the_old_one_and_no_part(tmp_path: Path) -> None:
    replace_text(tmp_path / "latest", "step-2")
    (tmp_path / "latest.tmp").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        replace_text(tmp_path / "latest", "step-4")
    assert (tmp_path / "latest").read_text() == "step-2"


def chosen_by(ranks: Ranks, run: Path) -> list[str]:
    """What a rank goes on from; with a file that only the second rank's share of the sums finds damaged."""
    told = [str(resumed_from(RunConfig(folder=str(run), resume=True), ranks, Console(enabled=False, loss_digits=4)))]
    ranks.barrier()
    if ranks.is_main:
        (path_of(run, 4) / ".metadata").write_bytes(b"")
        (path_of(run, 2) / "meta.json").unlink()
    ranks.barrier()
    try:
        Checkpoints(run).latest_valid(ranks)
    except MegabatchError as error:
        told.append(str(error))
    return told


@pytest.mark.slow
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_all_ranks_take_the_same_one(run: Path, name: str) -> None:
    path = path_of(run, 6) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    told = on_ranks(2, run, chosen_by, run)
    assert told[0] == told[1]
    assert told[0][0] == str(path_of(run, 4))
    assert told[0][1].startswith(
        f"{checkpoints_of(run)} has no whole checkpoint to resume from: step-6 ({name} is not what"
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_from_the_one_before_as_if_never_damaged(bench: Bench, tmp_path: Path, ranks: int) -> None:
    """Metrics, TensorBoard and samples follow; the damaged one is written again when the run comes to it."""
    values = {"run__save_every": 2, "run__max_epochs": 2, "run__keep_last": 3}
    whole = tmp_path / "whole"
    bench.train(ranks=ranks, run__folder=whole, **values)
    bench.train(ranks=ranks, run__max_steps=8, **values)
    spoil(bench.folder, 8)
    said = bench.train(ranks=ranks, run__resume=True, **values)
    assert f"warning: {path_of(bench.folder, 8)} is damaged (" in said
    assert f"resumed from {path_of(bench.folder, 6)}\n" in said
    assert timeless(bench.rows()) == timeless(bench.rows(whole))
    assert choose(bench.folder) == ValidCheckpoint(path_of(bench.folder, 12))
    for step in (2, 4, 6, 8, 10, 12):
        if path_of(bench.folder, step).exists():
            (path_of(bench.folder, step) / "meta.json").write_text("{")
    finished = bench.finish(ranks=ranks, run__resume=True, **values)
    (line,) = [line for each in finished for line in each.err.splitlines()]
    assert f"{checkpoints_of(bench.folder)} has no whole checkpoint to resume from: step-12 (" in line
    assert [each.status for each in finished] == [2] * ranks

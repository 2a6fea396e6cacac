"""A checkpoint: whole or not there; which are kept; the exact line that one gets that cannot be gone on from."""

import json
import logging
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megabatch import GradientAccumulator, Learner, losses
from megabatch.train.checkpoints import metadata as meta
from megabatch.train.checkpoints import paths as naming
from megabatch.train.checkpoints import retention as shelf
from megabatch.train.checkpoints import tensor_files as checkpoint
from megabatch.train.checkpoints.metadata import DamagedError, hash_file, read_meta
from megabatch.train.checkpoints.paths import checkpoints_of, has_checkpoint, path_of, step_of
from megabatch.train.checkpoints.retention import Checkpoints, ValidCheckpoint, point_to_best
from tests.train.conftest import Bench, timeless
from tests.train.contexts import ALONE
from tests.unit.failures.table import line_of

META = {
    "step": 3, "updates": {}, "watch": {}, "settings": {}, "model_config": {}, "parameters": {}, "data": {},
    "derived": {},
}  # fmt: skip
INSTEAD = "name an earlier step-N folder in the file checkpoints/latest, or start in a new run.folder"


class Average:
    """A second part of a run, beside the learner."""

    def __init__(self, value: float) -> None:
        self.weight = torch.full((3,), value)

    def state_dict(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.weight = state["weight"]


def learner(seed: int = 0) -> Learner:
    torch.manual_seed(seed)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return Learner(model, optimizer, GradientAccumulator(model, micro_batch_size=1), scheduler=schedule)


def stepped(learner: Learner) -> Learner:
    sample = {"inputs": torch.ones(2), "labels": torch.zeros(2)}
    learner.forward_backward([sample], losses.mse)
    learner.optim_step()
    return learner


def save(folder: Path, step: int = 3, **more: Any) -> Path:
    return save_state(folder, {"learner": learner()}, META | {"step": step} | more)


def save_state(folder: Path, state: dict[str, Any], said: dict[str, Any]) -> Path:
    return checkpoint.save(folder, checkpoint.states_of(state), said, ALONE)


def reseal(saved: Path) -> None:
    """Let the checkpoint say that its files are as they are now."""
    said = json.loads((saved / "meta.json").read_text())
    (saved / "meta.json").unlink()
    meta.write_meta(saved, said, {name: hash_file(saved / name) for name in said["files"]})


def best(folder: Path) -> str:
    return naming.named_by(naming.checkpoints_of(folder) / "best")


def latest(folder: Path) -> Path:
    return Checkpoints(folder).latest_valid(ALONE).path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in naming.checkpoints_of(folder).iterdir())


def test_a_whole_checkpoint_is_read(saved: Path) -> None:
    assert latest(saved.parents[1]) == saved
    assert meta.read_meta(saved) == META
    checkpoint.load(saved, {"learner": learner()})


def test_every_part_comes_back_as_it_was(tmp_path: Path) -> None:
    there, here = stepped(learner()), learner(seed=1)
    saved = save_state(tmp_path, {"learner": there, "average": Average(3.0)}, META)
    average = Average(0.0)
    checkpoint.load(saved, {"learner": here, "average": average})
    assert average.weight.tolist() == [3.0, 3.0, 3.0]
    assert here.step == 1
    for a, b in zip(stepped(there).model.parameters(), stepped(here).model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_part_that_was_not_saved_gets_its_line(saved: Path) -> None:
    line = line_of(checkpoint.load, saved, {"learner": learner(), "average": Average(0.0)})
    assert line.startswith(f"{saved} is damaged (")
    assert line.endswith(f"); {INSTEAD}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "3",
        "{}",
        json.dumps(META | {"data": 3}),
        json.dumps({"step": 3}),
        "[" * 100_000,
        json.dumps(META | {"files": {}}),
    ],
)
def test_a_damaged_meta_gets_its_line(saved: Path, text: str) -> None:
    (saved / "meta.json").write_text(text)
    line = line_of(meta.read_meta, saved)
    assert line.startswith(f"{saved}/meta.json is damaged (")
    assert line.endswith(f"); {INSTEAD}")


@pytest.mark.parametrize("damage", ["removed", "cut off", "without .metadata"])
def test_missing_or_cut_tensors_get_their_line(saved: Path, damage: str, capfd: pytest.CaptureFixture[str]) -> None:
    (tensors,) = saved.glob("*.distcp")
    if damage == "cut off":
        tensors.write_bytes(tensors.read_bytes()[:50])
    else:
        (tensors if damage == "removed" else saved / ".metadata").unlink()
    line = line_of(checkpoint.load, saved, {"learner": learner()})
    assert line.startswith(f"{saved} is damaged (")
    assert line.endswith(f"); {INSTEAD}")
    assert capfd.readouterr().err == ""


def test_where_nothing_can_be_written_one_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    beside = tmp_path / "checkpoints" / "step-3.tmp"
    assert line_of(save, tmp_path) == (
        f"cannot write {beside} (Not a directory); make room, allow it, or choose another run.folder"
    )


def test_all_are_kept_unless_told_otherwise(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        save(tmp_path, step)
        Checkpoints(tmp_path).prune(None, ALONE)
    assert names(tmp_path) == ["latest", "step-10", "step-2", "step-4"]


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 8, 10, 12):
        save(tmp_path, step)
        if step == 4:
            point_to_best(tmp_path, step, ALONE)
        Checkpoints(tmp_path).prune(2, ALONE)
    assert names(tmp_path) == ["best", "latest", "step-10", "step-12", "step-4"]
    assert best(tmp_path) == "step-4"
    assert latest(tmp_path) == naming.path_of(tmp_path, 12)


@pytest.mark.parametrize("keep_last", [None, 1, 5])
def test_what_was_only_saved_as_the_best_goes_when_it_is_not_any_more(tmp_path: Path, keep_last: int | None) -> None:
    for step in (3, 5, 7):
        save(tmp_path, step, best_only=True)
        point_to_best(tmp_path, step, ALONE)
        Checkpoints(tmp_path).prune(keep_last, ALONE)
        assert names(tmp_path) == ["best", "latest", f"step-{step}"]
    save(tmp_path, 8)
    Checkpoints(tmp_path).prune(keep_last, ALONE)
    assert names(tmp_path) == ["best", "latest", "step-7", "step-8"]


def test_there_is_no_best_until_one_is_pointed_to_and_whole(tmp_path: Path) -> None:
    assert best(tmp_path) == ""
    save(tmp_path, 2)
    point_to_best(tmp_path, 3, ALONE)
    assert best(tmp_path) == ""
    assert names(tmp_path) == ["latest", "step-2"]


def test_what_a_kill_has_left_is_swept_away_and_what_lies_beyond_the_latest_is_not(tmp_path: Path) -> None:
    for step in (1, 2, 4, 20):
        save(tmp_path, step)
    checkpoints = naming.checkpoints_of(tmp_path)
    (checkpoints / "latest").write_text("step-4")  # the user went back
    (checkpoints / "step-7.tmp").mkdir()
    (checkpoints / "step-of mine").mkdir()
    (checkpoints / "step-1" / "meta.json").write_text("damaged")
    Checkpoints(tmp_path).prune(2, ALONE)
    assert names(tmp_path) == ["latest", "step-2", "step-20", "step-4", "step-of mine"]


def test_a_checkpoint_is_never_half_deleted_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if killed while the first one is being deleted."""
    deleted: list[str] = []

    def killed(path: Path, **_: Any) -> None:
        deleted.append(path.name)
        if path.exists():
            raise KeyboardInterrupt

    for step in (2, 4):
        save(tmp_path, step)
    monkeypatch.setattr(shelf.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path).prune(1, ALONE)
    assert set(deleted) == {"step-2.tmp"}
    assert names(tmp_path) == ["latest", "step-2.tmp", "step-4"]


def here(**parts: Any) -> dict[str, Any]:
    identity = {"model_config": {"n_embd": 16, "rope": {"theta": 1e4}}, "parameters": {"w": ["float32", 2]}}
    given = {
        "model": identity,
        "data": {"fingerprint": "ab", "samples": 45},
        "settings": {"run.seed": 0},
        "derived": {"optim.decay_steps": 120},
    }
    return meta.describe_run(**(given | parts))


def test_parameters_are_no_secrets_whatever_their_names(tmp_path: Path) -> None:
    saved, now = (here(model={"parameters": {"vit.cls_token": ["float32", 4, digest]}}) for digest in ("ab", "cd"))
    assert saved["parameters"]["vit.cls_token"] == ["float32", 4, "ab"]
    line = line_of(lambda: meta.check_same_run(tmp_path / "run" / "checkpoints" / "step-1", saved, now))
    assert "vit.cls_token is ['float32', 4, 'ab'] there and ['float32', 4, 'cd'] here" in line
    assert here(settings={"api_token": "abc"})["settings"] == {"api_token": "(masked)"}
    older = {**now, "parameters": {"vit.cls_token": "(masked)"}}
    meta.check_same_run(tmp_path / "run" / "checkpoints" / "step-1", older, now)


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        (
            {"model": {"model_config": {"n_embd": 16, "rope": {"theta": 5e5}}, "parameters": {}}},
            "another model: model.config.rope.theta is 10000.0 there and 500000.0 here",
        ),
        (
            {"model": {"parameters": {"w": ["float32", 3]}}},
            "another model: model.config.n_embd is 16 there and missing here",
        ),
        ({"data": {"fingerprint": "cd", "samples": 9}}, "another data set: data: samples is 45 there and 9 here"),
        (
            {"data": {"fingerprint": "cd", "samples": 45}},
            "another data set: data: fingerprint is ab there and cd here",
        ),
        ({"settings": {"run.seed": 1}}, "another recipe: run.seed is 0 there and 1 here"),
        (
            {"settings": {"run.seed": "a" * 99}},
            f"another recipe: run.seed is 0 there and {'a' * 80}... here",
        ),
    ],
)
def test_another_run_is_refused_by_what_says_most(tmp_path: Path, parts: dict[str, Any], line: str) -> None:
    meta.check_same_run(tmp_path, here(), json.loads(json.dumps(here())))
    assert line_of(meta.check_same_run, tmp_path, here(), here(**parts)) == (
        f"{tmp_path} is of {line}; resume with the recipe it was made with, or start in a new run.folder"
    )


def test_what_json_cannot_keep_is_compared_as_it_will_be_read() -> None:
    described = here(settings={"optim.betas": (0.9, 0.95), "data.path": Path("a")})
    assert json.loads(json.dumps(described)) == described
    assert described["settings"] == {"optim.betas": [0.9, 0.95], "data.path": "a"}


@pytest.mark.parametrize("point", [0, 1])
def test_a_save_that_is_killed_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    """As if killed where the folder gets its name, and where the pointer does."""
    before = save(tmp_path, 2)
    replace, calls = os.replace, iter(range(2))

    def killed(source: Path, target: Path) -> None:
        if next(calls) == point:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 4)
    assert latest(tmp_path) == before
    checkpoint.load(before, {"learner": learner()})
    assert latest(tmp_path) != save(tmp_path, 4) == latest(tmp_path)
    Checkpoints(tmp_path).prune(1, ALONE)
    assert names(tmp_path) == ["latest", "step-4"]


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
        "there), step-2 (meta.json: it is not what was written: its SHA-256 is another); put back a copy of one, or "
        "start in a new run.folder"
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


@pytest.mark.parametrize("key", ["files", "sha256", "step", "updates"])
def test_what_is_taken_out_of_a_sealed_meta_is_seen(run: Path, key: str) -> None:
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


class Evil:
    """Runs something where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class Groups:
    """A part of a run that is no tensor."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"groups": [{"lr": self.value, "weight": torch.zeros(1)}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["groups"][0]["lr"]


@pytest.mark.parametrize("within", [False, True])
def test_a_description_that_would_run_something_is_refused(
    saved: Path, tmp_path: Path, within: bool, caplog: pytest.LogCaptureFixture
) -> None:
    description = pickle.loads((saved / ".metadata").read_bytes())
    description.planner_data = Evil(tmp_path / "ran")
    (saved / ".metadata").write_bytes(pickle.dumps(description if within else description.planner_data))
    line = line_of(checkpoint.load, saved, {"learner": learner()})
    assert line.startswith(f"{saved} is damaged (")
    assert "which no checkpoint needs" in line
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []  # shown on stderr
    assert line.endswith(f"); {INSTEAD}")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ["a text", {"state_dict_metadata": {}}, torch.float32])
def test_a_description_of_something_else_gets_its_line(saved: Path, text: object) -> None:
    (saved / ".metadata").write_bytes(pickle.dumps(text))
    line = line_of(checkpoint.load, saved, {"learner": learner()})
    assert line.startswith(f"{saved} is damaged (")
    assert "not what describes a checkpoint" in line


def test_what_is_no_tensor_is_loaded_as_data_and_never_run(tmp_path: Path) -> None:
    for step, value in enumerate(
        [0.1, None, True, "a", [1, (2.0, "b")], {"a"}, np.float64(0.1), np.int64(3), torch.float32]
    ):
        saved = save_state(tmp_path, {"own": Groups(value)}, META | {"step": step})
        here = Groups(0)
        checkpoint.load(saved, {"own": here})
        assert (here.value, type(here.value)) == (value, type(value))
    saved = save_state(tmp_path, {"own": Groups(Evil(tmp_path / "ran"))}, META | {"step": 99})
    line = line_of(checkpoint.load, saved, {"own": Groups(0)})
    assert line == (
        f"{saved} is damaged (UnpicklingError: own.groups.0.lr is more than numbers, texts and containers of them); "
        f"{INSTEAD}"
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_tensors_of_any_type_and_layout_are_described(tmp_path: Path, dtype: torch.dtype) -> None:
    there, here = Average(0.0), Average(0.0)
    there.weight = torch.ones(2, 3, 4, 5).to(dtype).to(memory_format=torch.channels_last)
    here.weight = torch.zeros(2, 3, 4, 5).to(dtype)
    checkpoint.load(save_state(tmp_path, {"average": there}, META), {"average": here})
    assert torch.equal(here.weight.float(), there.weight.float())

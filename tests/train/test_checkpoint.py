"""A checkpoint: whole or not there; which are kept; the exact line that one gets that cannot be gone on from."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megabatch import GradientAccumulator, Learner, MegabatchError, losses
from megabatch.train.checkpoints import metadata as meta
from megabatch.train.checkpoints import paths as naming
from megabatch.train.checkpoints import retention as shelf
from megabatch.train.checkpoints import tensor_files as checkpoint
from megabatch.train.checkpoints.metadata import hash_file
from megabatch.train.checkpoints.retention import Checkpoints, point_to_best
from megabatch.train.runtime.ranks import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"))
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
    meta.write_meta(saved, said, {name: hash_file(saved / name) for name in said["files"]})


def best(folder: Path) -> str:
    return naming.named_by(naming.checkpoints_of(folder) / "best")


def latest(folder: Path) -> Path:
    return Checkpoints(folder).latest_valid(ALONE).path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path)


def line_of(call: object, *arguments: object) -> str:
    with pytest.raises(MegabatchError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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


def test_a_schedule_that_follows_from_the_data_is_said_to(tmp_path: Path) -> None:
    assert line_of(meta.check_same_run, tmp_path, here(), here(derived={"optim.decay_steps": 240})) == (
        f"{tmp_path} is of another recipe: optim.decay_steps is 120 there and 240 here; where it is not set it follows "
        "from run.max_epochs and the data: set optim.decay_steps to 120, or start in a new run.folder"
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

"""A checkpoint, or a folder, that cannot be gone on from: the exact line that it gets."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from megabatch import GradientAccumulator, Learner, MegabatchError
from megabatch.train import checkpoint
from megabatch.train.ranks import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"))
META = {"step": 3, "sampler": {}, "settings": {}, "model_config": {}, "parameters": {}, "data": {}, "derived": {}}
INSTEAD = "name an earlier step-N folder in the file checkpoints/latest, or start in a new run.folder"


def learner() -> Learner:
    model = nn.Linear(2, 2)
    return Learner(model, torch.optim.AdamW(model.parameters()), GradientAccumulator(model, micro_batch_size=1))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return checkpoint.save(tmp_path, learner(), META, ALONE)


def line_of(call: object, *arguments: object) -> str:
    with pytest.raises(MegabatchError) as caught:
        call(*arguments)  # pyright: ignore
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_checkpoint_is_read(saved: Path) -> None:
    assert checkpoint.latest(saved.parents[1]) == saved
    assert checkpoint.read_meta(saved) == META
    checkpoint.load(saved, learner())


@pytest.mark.parametrize("text", ["", "{", "3", "{}", json.dumps(META | {"data": 3}), "[" * 100_000])
def test_a_damaged_meta_gets_its_line(saved: Path, text: str) -> None:
    (saved / "meta.json").write_text(text)
    line = line_of(checkpoint.read_meta, saved)
    assert line.startswith(f"{saved}/meta.json is damaged (")
    assert line.endswith(f"); {INSTEAD}")


@pytest.mark.parametrize("damage", ["removed", "cut off", "without .metadata"])
def test_missing_or_cut_tensors_get_their_line(saved: Path, damage: str, capfd: pytest.CaptureFixture[str]) -> None:
    (tensors,) = saved.glob("*.distcp")
    if damage == "cut off":
        tensors.write_bytes(tensors.read_bytes()[:50])
    else:
        (tensors if damage == "removed" else saved / ".metadata").unlink()
    line = line_of(checkpoint.load, saved, learner())
    assert line.startswith(f"{saved} is damaged (")
    assert line.endswith(f"); {INSTEAD}")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints"])
def test_a_run_without_a_checkpoint_cannot_be_gone_on_with(tmp_path: Path, left: str) -> None:
    (tmp_path / left).mkdir()
    assert line_of(checkpoint.check_unused, tmp_path) == (
        f"{tmp_path} holds a run that stopped before its first checkpoint; choose another run.folder or delete it"
    )


def test_a_run_with_a_checkpoint_can(saved: Path) -> None:
    folder = saved.parents[1]
    assert line_of(checkpoint.check_unused, folder) == (
        f"{folder} already holds a run; go on with --run.resume=true, or choose another run.folder"
    )

"""Nothing in a checkpoint is run, and all that a run writes comes back."""

import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megabatch.train.checkpoints import tensor_files as checkpoint
from tests.train.test_checkpoint import INSTEAD, META, Average, learner, line_of, save, save_state


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path)


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

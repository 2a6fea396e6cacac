"""Checkpoints that are written beside the run: of the state that they are named by, whole or not there."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch.train.checkpoints.paths import checkpoints_of, has_checkpoint, path_of
from megabatch.train.checkpoints.retention import Checkpoints
from megabatch.train.checkpoints.tensor_files import load, states_of
from megabatch.train.checkpoints.writer import CheckpointRequest, Writer, in_background, staged
from megabatch.train.config import CheckpointConfig, Config, ModelConfig, RunConfig, UpdateConfig
from megabatch.train.runtime.console import Console
from tests.train.conftest import NO_DROPOUT, Bench, timeless
from tests.train.conftest import states_of as tensors_of
from tests.train.contexts import ALONE
from tests.train.test_checkpoint import META, Average, learner, stepped


class Gate:
    """A part of a checkpoint that is written only when the gate is open; it comes before the tensors."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __deepcopy__(self, _: Any) -> "Gate":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        self.reached.set()
        assert self.open.wait(30)
        return int, (3,)


def writer_of(folder: Path, **run: Any) -> Writer:
    config = Config(
        model=ModelConfig(),
        update=UpdateConfig(global_batch_size=1, micro_batch_size=1),
        run=RunConfig(folder=str(folder), **run),
        checkpoint=CheckpointConfig(background=True),
    )
    return Writer(config, ALONE, Console(enabled=True, loss_digits=4), lambda: None)


def request(step: int, states: dict[str, Any], *, in_turn: bool = True, is_best: bool = False) -> CheckpointRequest:
    return CheckpointRequest(step, states, META | {"step": step}, is_best, in_turn)


def test_a_copy_has_nothing_in_common_with_the_state() -> None:
    states = states_of({"learner": stepped(learner()), "average": Average(3.0)})
    copied = staged(states)
    before = [tensor.clone() for tensor in leaves(copied)]
    assert len(before) > 7
    with torch.no_grad():
        for tensor in leaves(states):
            tensor.fill_(77)
    states["learner"]["scheduler"]["base_lrs"][0] = 77
    assert all(map(torch.equal, before, leaves(copied)))
    assert copied["learner"]["scheduler"]["base_lrs"][0] != 77


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    return [value] if isinstance(value, torch.Tensor) else []


def test_what_is_written_is_the_state_of_its_step_though_updates_go_on(tmp_path: Path) -> None:
    there, here, gate, writer = stepped(learner()), learner(seed=1), Gate(), writer_of(tmp_path)
    before = [parameter.detach().clone() for parameter in there.model.parameters()]
    writer.write(request(1, {"learner": there.state_dict(), "gate": gate}))
    stepped(there)
    assert gate.reached.wait(30)
    writer.poll()
    assert writer.written_step is None
    assert not has_checkpoint(tmp_path)  # not whole, so not there
    assert [path.name for path in checkpoints_of(tmp_path).iterdir()] == ["step-1.tmp"]
    gate.open.set()
    writer.wait()
    assert writer.written_step == 1
    load(Checkpoints(tmp_path).latest_valid(ALONE).path, {"learner": here})
    assert here.step == 1
    assert all(map(torch.equal, before, here.model.parameters()))
    assert not any(map(torch.equal, before, there.model.parameters()))


def test_the_next_one_waits_for_the_one_before(tmp_path: Path) -> None:
    there, gate, writer = learner(), Gate(), writer_of(tmp_path, keep_last=1)
    writer.write(request(1, {"learner": there.state_dict(), "gate": gate}))
    threading.Timer(0.2, gate.open.set).start()
    writer.write(request(2, {"learner": there.state_dict()}))
    assert writer.written_step == 1
    writer.wait()
    assert sorted(path.name for path in checkpoints_of(tmp_path).iterdir()) == ["latest", "step-2"]


def test_a_run_that_fails_has_what_is_on_its_way_written_still(tmp_path: Path) -> None:
    gate, writer = Gate(), writer_of(tmp_path)
    with pytest.raises(ValueError, match="of a loss"):
        fail_while_it_is_written(writer, {"learner": learner().state_dict(), "gate": gate}, gate)
    assert Checkpoints(tmp_path).latest_valid(ALONE).path == path_of(tmp_path, 1)


def fail_while_it_is_written(writer: Writer, states: dict[str, Any], gate: Gate) -> None:
    with writer.closing():
        writer.write(request(1, states))
        threading.Timer(0.2, gate.open.set).start()
        raise ValueError("of a loss")


def test_what_cannot_be_written_is_warned_of_and_wanted_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    writer, states = writer_of(tmp_path), {"learner": learner().state_dict()}
    for step, again in ((4, 5), (5, 7), (7, 11)):
        writer.write(request(step, states))
        writer.wait()
        assert not writer.is_due(again - 1)
        assert writer.is_due(again)
        assert capsys.readouterr().out == (
            f"warning: cannot write {tmp_path}/checkpoints/step-{step}.tmp (Not a directory); make room, allow it, or "
            f"choose another run.folder; the run continues, and step-{step} is tried again after update {again}\n"
        )
    writer.write(request(8, states, in_turn=False, is_best=True))
    writer.wait()
    assert "the run continues, and step-8 is not the best one that is kept" in capsys.readouterr().out
    (tmp_path / "checkpoints").unlink()
    writer.write(request(11, states))
    writer.wait()
    assert writer.written_step == 11
    assert not writer.is_due(10**6)


def test_a_state_that_cannot_be_copied_is_written_while_the_run_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = writer_of(tmp_path)
    writer.write(request(2, {"learner": learner().state_dict(), "own": Uncopied()}))
    said = capsys.readouterr().out
    assert said.startswith("warning: the state cannot be copied (ValueError: not me); the run waits until step-2 is")
    assert writer.written_step == 2


class Uncopied:
    """Fits no memory a second time."""

    def __deepcopy__(self, _: Any) -> None:
        raise ValueError("not me")


def test_it_is_the_devices_choice_unless_it_is_said() -> None:
    assert in_background(config := _config(None), ALONE) is False
    assert in_background(config, type(ALONE)(0, 1, torch.device("cuda"))) is True
    assert in_background(_config(True), ALONE) is True
    assert in_background(_config(False), type(ALONE)(0, 1, torch.device("cuda"))) is False


def _config(background: bool | None) -> Config:
    return Config(
        model=ModelConfig(),
        update=UpdateConfig(global_batch_size=1, micro_batch_size=1),
        run=RunConfig(folder="a"),
        checkpoint=CheckpointConfig(background=background),
    )


LAYOUTS: list[tuple[int, str | None]] = [(1, None), (2, "ddp"), (2, "fsdp2")]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "wrapper"), LAYOUTS)
def test_a_run_that_is_killed_while_it_writes_goes_on_as_if_never_killed(
    bench: Bench, tmp_path: Path, ranks: int, wrapper: str | None
) -> None:
    values = {"run__max_epochs": 2, "run__save_every": 1, "run__keep_last": 3, "parallel__wrapper": wrapper}
    whole, own = tmp_path / "whole", {"checkpoint__background": "true"}
    bench.train(ranks=ranks, run__folder=whole, **values)
    run = bench.start(ranks=ranks, **values, **own)
    checkpoints = bench.folder / "checkpoints"
    run.kill_when(lambda: (checkpoints / "step-3").exists() and any(checkpoints.glob("step-*.tmp")))
    assert "saved" in bench.train(ranks=ranks, run__resume=True, **values, **own)
    assert timeless(bench.rows()) == timeless(bench.rows(whole))
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-10", "step-11", "step-12"]
    for step in (10, 12):
        one, other = (
            tensors_of(folder / "checkpoints" / f"step-{step}", tmp_path / f"{number}.pt")
            for number, folder in enumerate((whole, bench.folder))
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "hsdp": (4, {"parallel__wrapper": "fsdp2", "parallel__dp_replicate": 2, "parallel__dp_shard": 2}),
    "tensor parallel": (2, {"parallel__tp": 2}),
    "pipeline": (2, {"parallel__pp": 2, "model__config__tie_word_embeddings": "false"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_copy_of_any_mesh_has_the_bits_of_the_state(bench: Bench, tmp_path: Path, name: str) -> None:
    ranks, values = MESHES[name]
    values = {"run__save_every": 2, "run__max_steps": 3, "optim__ema_decay": 0.5, "optim__decay_steps": 9, **values}
    found: list[dict[str, Any]] = []
    for background in ("false", "true"):
        said = bench.train(
            ranks=ranks, run__folder=tmp_path / background, checkpoint__background=background, **NO_DROPOUT, **values
        )
        assert "cannot be copied" not in said
        found.append(tensors_of(tmp_path / background / "checkpoints" / "step-2", tmp_path / f"{background}.pt"))
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) > 50
    assert all(torch.equal(found[0][each], found[1][each]) for each in found[0])


FAILS = """
def after(event):
    if event.step == 3 and not event.is_main:
        raise ValueError("of my own")
"""


@pytest.mark.slow
def test_all_ranks_leave_where_one_fails_while_others_write(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FAILS)
    after = {"run__after_update": f"{tmp_path}/own.py:after", "checkpoint__background": "true", "run__save_every": 1}
    finished = bench.start(ranks=2, parallel__wrapper="ddp", **after).wait(60)
    assert [each.status for each in finished] == [2, 2]
    lines = [line for each in finished for line in each.err.splitlines()]
    assert len(lines) == 1
    assert "of my own" in lines[0]
    bench.train(ranks=2, run__resume=True, parallel__wrapper="ddp")

"""Whatever surrounds the core of a run survives: each row of survival.md is a case here."""

import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata

from megabatch.train.checkpoints.tensor_files import SafeReader
from megabatch.train.cli import commands as cli
from megabatch.train.cli import front
from megabatch.train.config import RunConfig
from megabatch.train.runtime.files import replace_text, write_synced
from megabatch.train.trust import reason_to_ask
from tests.elastic.conftest import OWN
from tests.elastic.damages import flip
from tests.train.conftest import NO_DROPOUT, Bench, states_of, timeless
from tests.train.processes import Run, overrides
from tests.train.test_full_disk import filling, small_disk

Case = Callable[[Bench, pytest.CaptureFixture[str]], str]
CASES: dict[str, Any] = {}
PAGE = Path(__file__).with_name("survival.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("|")]
TABLE = [(event, re.findall("`([^`]+)`", said)) for event, said in ROWS[2:]]


def case(name: str, *marks: Any) -> Callable[[Case], Case]:
    """Enter a case under the words that the table has for it. It is full where quick tests show its parts."""

    def enter(run: Case) -> Case:
        CASES[name] = pytest.param(name, run, marks=marks, id=name)
        return run

    return enter


def said_by(ends: list[Any], status: int) -> str:
    """Return what ranks said, which must all have ended with this status and without a traceback."""
    text = "".join(end.out + end.err for end in ends)
    assert [end.status for end in ends] == [status] * len(ends), text
    assert "Traceback" not in text, text
    return text


def test_the_table_has_every_case() -> None:
    assert [event for event, _ in TABLE] == list(CASES)
    assert all(said for _, said in TABLE)


# Tokenized data


@case("a bit of the tokenized data flips", pytest.mark.full)
def flipped_bit(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    bench.train(run__folder=bench.path / "whole", run__max_steps=3)
    (table,) = (bench.path / "cache").glob("*/samples.arrow")
    content, draw, said = table.read_bytes(), Random(0), ""
    for number in range(3):
        flip(table, draw)
        said = bench.train(run__folder=bench.path / f"run{number}", run__max_steps=3)
        assert table.read_bytes() == content
        assert bench.losses(bench.path / f"run{number}") == bench.losses(bench.path / "whole")
    return said


@case("the summary of the tokenized data is changed", pytest.mark.full)
def changed_summary(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    bench.train(run__max_steps=1)
    (summary,) = (bench.path / "cache").glob("*/summary.json")
    content = summary.read_text()
    summary.write_text(content.replace('"broken": 0', '"broken": 9'))
    assert summary.read_text() != content
    said = bench.train(run__folder=bench.path / "other", run__max_steps=1)
    assert "9 broken rows" not in said
    return said


@case("a sample of yours has a token beyond the model's vocabulary")
def token_beyond(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    own = bench.path / "own.py"
    own.write_text(
        "import torch\n\ndef samples():\n"
        "    rows = [torch.arange(1, 9) for _ in range(20)]\n"
        "    rows[7][3] = 1000\n"
        "    return [{'input_ids': row, 'labels': row.clone()} for row in rows]\n"
    )
    recipe = bench.path / "own.toml"
    recipe.write_text(
        bench.recipe.read_text()
        .replace('source = "jsonl"\n', "")
        .replace(f'path = "{bench.path}/data.jsonl"', f'function = "{own}:samples"')
    )
    return said_by(bench.finish(recipe=recipe, eval__num_samples=0), 2)


# Files beside the checkpoints


def resumed_after(bench: Bench, damage: Callable[[Path], None]) -> str:
    """Return what a run says that resumes from update 4 after some damage; it must end as one that never stopped."""
    values = {"run__save_every": 2}
    bench.train(run__folder=bench.path / "whole", **values)
    bench.train(**values, run__max_steps=4)
    damage(bench.folder)
    said = bench.train(**values, run__resume=True)
    paths = [folder / "checkpoints" / "step-6" for folder in (bench.path / "whole", bench.folder)]
    one, other = (states_of(path, bench.path / "state.pt") for path in paths)
    assert all(torch.equal(one[name], other[name]) for name in one)
    return said


@case("a line of every log is damaged", pytest.mark.full)
def damaged_logs(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    names = ("metrics.jsonl", "cuts.jsonl", "timeline.jsonl")

    def damage(folder: Path) -> None:
        for name in names:
            lines = (folder / name).read_text().splitlines(keepends=True)
            (folder / name).write_text("".join([lines[0], '{"step": 2, "lo\n', *lines[1:]]))

    said = resumed_after(bench, damage)
    assert all((bench.folder / f"{name}.damaged-1").exists() for name in names)
    assert timeless(bench.rows()) == timeless(bench.rows(bench.path / "whole"))
    return said


@case("environment.json is empty", pytest.mark.full)
def empty_environment(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    return resumed_after(bench, lambda folder: (folder / "environment.json").write_text(""))


@case("rows of metrics.jsonl are missing, and others are doubled", pytest.mark.full)
def lost_rows(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    def damage(folder: Path) -> None:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        updates = [line for line in lines if "set" not in json.loads(line)]
        (folder / "metrics.jsonl").write_text("".join([updates[0], *updates[2:], updates[2]]))

    return resumed_after(bench, damage)


def test_a_checkpoint_is_never_ahead_of_rows_on_the_disk(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    synced, fsync = list[str](), os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    assert cli.run(["train", str(bench.recipe), "--run.max_steps=2", f"--data.cache={bench.path / 'cache'}"]) == 0
    assert synced.index("metrics.jsonl") < synced.index("cuts.jsonl") < synced.index("meta.json")
    assert "checkpoints" in synced[synced.index("meta.json") :]


# Dropout


@case("a run with dropout resumes on other ranks and in another cut", pytest.mark.full)
def resized_with_dropout(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    bench.train(run__folder=bench.path / "whole")
    bench.train(run__max_steps=3)
    said = bench.train(ranks=2, recipe=bench.folder, run__max_steps=6, update__max_microbatch_tokens=512)
    paths = [folder / "checkpoints" / "step-6" for folder in (bench.path / "whole", bench.folder)]
    one, other = (states_of(path, bench.path / "state.pt") for path in paths)
    assert max(float((one[name] - other[name]).abs().max()) for name in one if one[name].numel()) < 1e-10
    assert "by rank" not in said
    return said


@case("it has dropout of attention, which the model draws itself")
def dropout_of_attention(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    values = {"model__config__attn_pdrop": 0.1}
    assert "by rank" not in bench.train(run__max_steps=2, **values)
    return bench.train(run__resume=True, run__max_steps=3, **values)


# The launcher


@case("torchrun is killed, and the run is started again at once", pytest.mark.full)
def killed_launcher(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    arguments = [str(bench.recipe), "--run.max_epochs=500", "--eval.every=none", f"--data.cache={bench.path / 'cache'}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "megabatch", "train"]
    log = bench.path / "torchrun.log"
    with log.open("w") as file:
        launcher = subprocess.Popen([*command, *arguments], stdout=file, stderr=file, start_new_session=True)
    metrics = bench.folder / "metrics.jsonl"
    deadline = time.monotonic() + 100
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 5) and time.monotonic() < deadline:
        time.sleep(0.1)
    launcher.kill()
    launcher.wait()
    log_of_run, since = bench.folder / "log.txt", time.monotonic()
    run = bench.start(recipe=bench.folder)
    run.kill_when(lambda: "resumed from" in log_of_run.read_text())
    assert time.monotonic() - since < 60
    return log.read_text() + log_of_run.read_text()


# Time


def disturbed(bench: Bench, **what: Any) -> dict[str, Any]:
    """Write the user's functions of conftest.py, and when rank 1 sleeps in them; return the keys that name them."""
    own = bench.path / "own.py"
    own.write_text(OWN)
    (bench.path / "disturb.json").write_text(json.dumps({"ranks": [1], "signals": [0], **what}))
    return {"run__after_update": f"{own}:after_update", "loss__function": f"{own}:within", "eval__num_samples": 0}


@case("a rank works for longer than torch lets others wait", pytest.mark.full)
def long_work(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    values = disturbed(bench, place="after", step=2, seconds=8) | {"data__cache": bench.path / "cache"}
    script = bench.path / "script.py"
    script.write_text(
        "from datetime import timedelta\nfrom torch.distributed import distributed_c10d\n"
        "distributed_c10d.default_pg_timeout = timedelta(seconds=3)  # half an hour\n"
        "from megabatch.train.cli.commands import main\nmain()\n"
    )
    run = Run(["train", str(bench.recipe), *overrides(values)], bench.path / "logs", 2, script)
    return said_by(run.wait(), 0)


@case("a rank works for longer than `run.collective_timeout`", pytest.mark.full)
def too_long_work(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    values = disturbed(bench, place="after", step=2, seconds=8)
    ends = bench.finish(ranks=2, run__collective_timeout=3, **values)
    assert all(end.status != 0 for end in ends)
    return "".join(end.err for end in ends)


@case("a rank is stuck in a function of yours, with `run.stuck_after`", pytest.mark.full)
def stuck_rank(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    values = disturbed(bench, place="within", step=12, seconds=1000)
    limits = {"run__stuck_after": 3, "run__answer_within_seconds": 3, "run__max_epochs": 10}
    ends = bench.finish(ranks=2, **limits, **values)
    assert sorted(end.status for end in ends) in ([1, 1], [1, 2])
    assert "in disturb" in (bench.folder / "stuck" / "rank-1.txt").read_text()
    assert not (bench.folder / "stuck" / "rank-0.txt").exists()
    (line,) = [line for end in ends for line in end.err.splitlines()]
    return line


# Hardware


def computing_wrong(bench: Bench) -> dict[str, Any]:
    """Return the keys of a run whose rank 1 computes a little more than it should from update 4 on."""
    own = bench.path / "own.py"
    own.write_text(
        "import os\n\nfrom megabatch import loss, losses\n\nstep = 0\n\n"
        "def after_update(event):\n    global step\n    step = event.step\n\n"
        "@loss(weigh=losses.next_token.weigh)\ndef wrong(model, microbatch):\n"
        "    total, weight = losses.next_token(model, microbatch)\n"
        "    return total * (1 + 1e-6 * (step >= 3 and os.environ['RANK'] == '1')), weight\n"
    )
    values = {"run__after_update": f"{own}:after_update", "loss__function": f"{own}:wrong", "eval__num_samples": 0}
    return {**values, **NO_DROPOUT, "run__check_hardware_every": 2}


@case("a device computes wrong, with `run.check_hardware_every`", pytest.mark.full)
def wrong_device(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    said = said_by(bench.finish(ranks=3, **computing_wrong(bench)), 1)
    assert len(bench.rows()) == 3
    return said


@pytest.mark.full
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_a_check_of_the_hardware_changes_nothing(bench: Bench, wrapper: str) -> None:
    values = {"parallel__wrapper": wrapper, **NO_DROPOUT}
    bench.train(ranks=2, run__folder=bench.path / "plain", **values)
    bench.train(ranks=2, run__check_hardware_every=2, **values)
    assert timeless(bench.rows()) == timeless(bench.rows(bench.path / "plain"))


@pytest.mark.full
def test_random_numbers_by_rank_are_refused(bench: Bench) -> None:
    said = said_by(bench.finish(ranks=2, run__check_hardware_every=1, model__config__attn_pdrop=0.1), 2)
    assert "the model draws random numbers by rank (dropout)" in said


# Room


@case("half an hour passes, and a recipe says nothing of checkpoints")
def by_the_clock(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    assert (RunConfig(folder="x").save_every_minutes, RunConfig(folder="x").keep_last) == (30, 2)
    said = bench.train(run__save_every_minutes=1e-6, run__keep_last=2, run__max_epochs=2, eval__every="none")
    assert said.count("saved ") > 3
    assert len(list((bench.folder / "checkpoints").glob("step-*"))) == 2
    return said


@case("the disk has no room for a third checkpoint", pytest.mark.full)
def room_for_two(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    with small_disk(bench.path / "disk") as (disk, mounted):
        if not mounted:
            pytest.skip("needs root, who mounts a small disk")
        after = filling(bench.path / "own.py", disk, mounted=mounted, full=5, empty=99)
        own, full = bench.path / "own.py", "        except OSError:\n            "
        own.write_text(own.read_text().replace(f"{full}return", f"{full}return file.truncate(file.tell() - 2**17)"))
        values = {"run__save_every": 2, "run__keep_last": 2, "run__max_steps": 6, "run__tensorboard": False}
        said = bench.train(run__folder=disk / "run", run__after_update=after, **values)
        assert sorted(path.name for path in (disk / "run" / "checkpoints").glob("step-*")) == ["step-4", "step-6"]
    return said


# Trust


@case("a recipe holds a secret")
def secret_in_recipe(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    own = bench.path / "own.py"
    own.write_text(
        "import torch\n\ndef samples(hf_token, url):\n"
        "    assert (hf_token, url) == ('hf_SECRET1', 'https://me:SECRET2@host/x')\n"
        "    return [{'input_ids': torch.arange(1, 9), 'labels': torch.arange(1, 9)} for _ in range(20)]\n"
    )
    recipe = bench.path / "own.toml"
    text = bench.recipe.read_text().replace('source = "jsonl"\n', "")
    recipe.write_text(text.replace(f'path = "{bench.path}/data.jsonl"', f'function = "{own}:samples"'))
    secrets = {"data__options__hf_token": "hf_SECRET1", "data__options__url": "https://me:SECRET2@host/x"}
    values = {"eval__num_samples": 0, **secrets}
    bench.train(recipe=recipe, run__max_steps=1, **values)
    files = [path for path in bench.folder.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [path for path in files if b"SECRET" in path.read_bytes()] == []
    (refused,) = bench.finish(recipe=bench.folder)
    assert refused.status == 2
    return refused.err + bench.train(recipe=bench.folder, run__max_steps=2, **secrets)


OWN_LOSS = (
    "from megabatch import losses\n\ndef loss(model, microbatch):\n    return losses.next_token(model, microbatch)\n"
)


def with_loss(bench: Bench, function: str) -> Path:
    """Return a recipe whose file names this loss."""
    recipe = bench.path / "with-loss.toml"
    recipe.write_text(f'{bench.recipe.read_text()}\n[loss]\nfunction = "{function}"\n')
    return recipe


@case("a recipe names a function that may be somebody else's")
def foreign_function(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    recipe = with_loss(bench, "os:system")
    capsys.readouterr()
    assert [front.run([name, str(recipe)]) for name in ("train", "plan", "verify")] == [2, 2, 2]
    refused = capsys.readouterr().err
    ways = (["--trust"], ["--loss.function=os:system"])  # what is typed is nobody else's
    assert [front.run(["train", str(recipe), *way]) for way in ways] == [None, None]  # nothing is wrong so far
    return refused


@case("a run's folder comes from somebody else")
def foreign_run(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    (bench.path / "own.py").write_text(OWN_LOSS)
    bench.train(recipe=with_loss(bench, f"{bench.path}/own.py:loss"), run__max_steps=2)
    moved = bench.folder.rename(bench.path / "moved")
    assert "resumed from" in bench.train(recipe=moved, run__max_steps=3)
    path = moved / "config.toml"
    path.write_text(path.read_text().replace("lr = 0.01", "lr = 0.02"))
    commands = [["train", str(moved)], ["plan", str(moved)], ["export", str(moved), "--to", str(bench.path / "model")]]
    capsys.readouterr()
    assert [cli.run(command) for command in commands] == [2, 2, 2]
    refused = capsys.readouterr().err
    assert cli.run([*commands[2], "--trust"]) == 0
    return refused


OTHERS: dict[str, Callable[[Path], object]] = {  # what somebody else may have done to a function of yours → why
    "": lambda file: None,
    "own.py belongs to another user": lambda file: os.chown(file, 12345, -1),
    "everybody may write to": lambda file: file.parent.chmod(0o777),
    "which is neither below": lambda file: file.rename(file.parents[1] / file.name),
}


@pytest.mark.parametrize(("reason", "change"), OTHERS.items())
def test_a_function_of_yours_is_one_that_only_you_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, change: Callable[[Path], object]
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "own.py").touch()
    (folder / "recipe.toml").touch()
    if "another user" in reason and os.geteuid():
        pytest.skip("only root can give a file away")
    monkeypatch.chdir(folder)
    change(folder / "own.py")
    found = reason_to_ask(str(next(tmp_path.rglob("own.py"))), folder / "recipe.toml", is_run=False)
    assert reason in found
    assert bool(found) == bool(reason)


@pytest.mark.parametrize("name", ["os", "torch.hub", "megabatch.train.runtime.plugins"])
def test_a_module_that_is_installed_is_not_yours_whatever_lies_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    assert "neither below" in reason_to_ask(name, tmp_path / "recipe.toml", is_run=False)


@pytest.mark.parametrize("path", ["../outside.distcp", "/etc/passwd", "a/b"])
def test_a_part_of_a_checkpoint_lies_inside_it(tmp_path: Path, path: str) -> None:
    index, info = metadata.MetadataIndex("x"), filesystem._StorageInfo(path, 0, 1)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata.Metadata({}, storage_data={index: info})))
    with pytest.raises(pickle.UnpicklingError, match=f"names {path}, which lies outside"):
        SafeReader(tmp_path).read_metadata()


def test_a_file_is_never_written_through_a_link(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("mine")
    link.symlink_to(victim)
    with pytest.raises(OSError, match="File exists"):
        write_synced(link, "theirs")
    replace_text(link, "a run's")
    assert (victim.read_text(), link.read_text(), link.is_symlink()) == ("mine", "a run's", False)
    (tmp_path / "folder").mkdir()
    replace_text(tmp_path / "folder", "a run's")
    assert (tmp_path / "folder").read_text() == "a run's"


@pytest.mark.parametrize(("name", "run"), list(CASES.values()))
def test_it_survives_as_the_table_says(bench: Bench, capsys: pytest.CaptureFixture[str], name: str, run: Case) -> None:
    found = " ".join(run(bench, capsys).split())
    for line in dict(TABLE)[name]:
        assert line in found

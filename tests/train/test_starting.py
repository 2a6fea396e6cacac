"""A run begins, begins again, goes on, or is refused, by what its folder has; two never write to one folder."""

import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch import MegabatchError
from megabatch.train.checkpoints import run_folder as starting
from megabatch.train.checkpoints.paths import path_of, recipe_of
from megabatch.train.cli.recipe_command import read_config
from megabatch.train.config import Config
from megabatch.train.config.recipe import load_config
from megabatch.train.records.metrics import MetricsFile
from megabatch.train.runtime import files, oom_limit
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from tests.train.contexts import ALONE
from tests.train.on_ranks import on_ranks
from tests.train.processes import CONTEXT
from tests.unit.failures.table import line_of


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints", "config.toml"])
@pytest.mark.parametrize("resume", [False, True])
def test_files_that_no_run_here_has_written_are_left_alone(
    recipe: Path, tmp_path: Path, left: str, resume: bool
) -> None:
    (tmp_path / left).mkdir()
    assert line_of(check, tmp_path, load_config(recipe, [f"--run.resume={str(resume).lower()}"])) == (
        f"{tmp_path} has {left} of a run that environment.json does not know; choose another run.folder, or delete it"
    )


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_has_made_no_update_begins(recipe: Path, tmp_path: Path, resume: bool) -> None:
    """It has been evaluated, and something was left of a checkpoint."""
    config = load_config(recipe, [f"--run.resume={str(resume).lower()}"])
    check(tmp_path / "run", config)
    for number in range(2):
        begin(tmp_path / "run", config)
        (tmp_path / "run" / "checkpoints" / f"step-{number}.tmp").mkdir(parents=True)
        (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "set": "held-out"}\n')
        check(tmp_path / "run", config)
    said = [line.partition("  ")[2] for line in (tmp_path / "run" / "log.txt").read_text().splitlines()]
    assert said == ["nothing was saved yet: the run begins at update 0"] * (1 + resume)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("name", ["environment.json", "config.toml"])
def test_damaged_records_do_not_keep_a_run_from_beginning_again(
    recipe: Path, tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    run, config = tmp_path / "run", load_config(recipe, ["--run.resume=true"])
    begin(run, config)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    damage(run / name)
    begin(run, config)
    assert (run / "log.txt").read_text().rstrip().endswith("and makes 1 update again")


def test_a_run_that_has_made_updates_begins_again_if_it_is_told_to(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin(run, load_config(recipe, []))
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "set": "held-out"}\n')
    assert line_of(check, run, load_config(recipe, [])) == (
        f"{run} holds a run that has made 2 updates and saved none; begin it again with --run.resume=true, or choose "
        "another run.folder"
    )
    console = Console(enabled=True, loss_digits=4)
    begin(run, load_config(recipe, ["--run.resume=true", "--run.save_every=1", "--parallel.wrapper=ddp"]), console)
    said = (run / "log.txt").read_text().splitlines()[-1]
    assert said.endswith("  nothing was saved yet: the run begins at update 0, and makes 2 updates again")
    others = (("optim.lr", 0.001, 0.1), ("run.seed", 0, 1), ("data.pack_tokens", None, 16))
    for key, there, now in (*others, ("update.global_batch_size", 64, 32)):
        assert line_of(check, run, load_config(recipe, ["--run.resume=true", f"--{key}={now}"])) == (
            f"{run} holds a run of another recipe, which has made 2 updates and saved none: {key} is {there} there and "
            f"{now} here; begin that again with `megabatch train {run}`, or choose another run.folder"
        )


def begin_apart(ranks: Ranks, tmp_path: Path, recipe: Path) -> str:
    """Begin in a folder that each rank has on a disk of its own, but for the first two; what is raised."""
    here = tmp_path / ("shared" if ranks.rank < 2 else "other")
    here.mkdir(exist_ok=True)
    os.chdir(here)
    try:
        starting.open_run_folder(
            Path("run"), load_config(recipe, []), ranks, Console(enabled=False, loss_digits=4), is_new=True
        )
    except MegabatchError as error:
        return str(error)
    return ""


def test_a_folder_that_a_rank_does_not_see_is_refused(recipe: Path, tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, begin_apart, tmp_path, recipe) == ["", ""]
    assert (tmp_path / "shared/run/environment.json").exists()
    assert not list((tmp_path / "shared/run").glob(".seen*"))
    shutil.rmtree(tmp_path / "shared/run")
    line = (
        f"run.folder is run, where rank 2 on {socket.gethostname()} does not see what rank 0 writes, and a checkpoint "
        "has files of every rank; name a folder on a disk that all hosts share"
    )
    assert on_ranks(3, tmp_path, begin_apart, tmp_path, recipe) == [line] * 3
    assert not list((tmp_path / "shared/run").iterdir())


def wait_apart(ranks: Ranks, tmp_path: Path, recipe: Path, seconds: float) -> str:
    """Wait for what rank 0 has learned, which rank 1 sees so many seconds later; what is raised."""
    oom_limit.SECONDS_TO_SEE = 1 if seconds > 1 else 60
    here = tmp_path / f"{seconds}" / f"{ranks.rank}"
    (here / "run").mkdir(parents=True)
    os.chdir(here)
    learned = Path("run/microbatch.json").absolute()
    text = '{"samples": 1, "tokens": 20}'
    if ranks.rank:
        threading.Timer(seconds, learned.write_text, [text]).start()
    else:
        learned.write_text(text)
    config = load_config(recipe, ["--run.folder=run"])
    try:
        oom_limit.wait_for_oom_limit(config.run, ranks)
    except MegabatchError as error:
        return str(error)
    return str(oom_limit.load_oom_limit(config.run))


def test_ranks_wait_for_what_one_of_them_has_learned(recipe: Path, tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, wait_apart, tmp_path, recipe, 0.5) == ["MicrobatchLimit(samples=1, tokens=20)"] * 2
    line = "ranks read different things in run/microbatch.json; name a run.folder on a disk that all hosts share"
    assert on_ranks(2, tmp_path, wait_apart, tmp_path, recipe, 30.0) == [line] * 2


def test_trackers_forget_a_run_that_begins_again_by_another_recipe(recipe: Path, tmp_path: Path) -> None:
    kept = tmp_path / "run" / "tracking.json"
    begin(tmp_path / "run", load_config(recipe, []))
    kept.write_text("{}")
    begin(tmp_path / "run", load_config(recipe, []))
    assert kept.exists()
    begin(tmp_path / "run", load_config(recipe, ["--optim.lr=0.5"]))
    assert not kept.exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_has_lost_its_checkpoints_never_begins_again(recipe: Path, tmp_path: Path, resume: bool) -> None:
    console = Console(enabled=True, loss_digits=4)
    begin(tmp_path, load_config(recipe, []), console)
    for step in (3, 12):
        console.say(f"saved {path_of(tmp_path, step)}")
    console.say("resumed from something")
    assert line_of(check, tmp_path, load_config(recipe, [f"--run.resume={str(resume).lower()}"])) == (
        f"{tmp_path} has no checkpoint any more, and its run has saved step-12; put {tmp_path}/checkpoints back, or "
        "choose another run.folder"
    )


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_has_learned_of_its_memory_begins_again(recipe: Path, tmp_path: Path, resume: bool) -> None:
    run = tmp_path / "run"
    begin(run, load_config(recipe, []))
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / "microbatch.json").write_text('{"samples": 2, "tokens": 16}')
    config = load_config(recipe, [f"--run.resume={str(resume).lower()}"])
    check(run, config)
    begin(run, config)
    point_to_checkpoint(run)
    assert line_of(check, run, load_config(recipe, [])).startswith(f"{run} already holds a run; ")


def test_a_run_with_a_checkpoint_is_gone_on_with(recipe: Path, tmp_path: Path) -> None:
    point_to_checkpoint(tmp_path)
    fresh, resumed = load_config(recipe, []), load_config(recipe, ["--run.resume=true"])
    line = f"{tmp_path} already holds a run; resume it with --run.resume=true, or choose another run.folder"
    assert line_of(check, tmp_path, fresh) == line
    check(tmp_path, resumed)
    new = line_of(
        starting.open_run_folder, tmp_path, resumed, ALONE, Console(enabled=False, loss_digits=4), is_new=True
    )
    assert new == line, "another process came first, and saved"


@pytest.mark.parametrize("text", ["[", "", '{"starts": [1]}', "{}"])
def test_a_damaged_list_of_starts_is_kept_aside(recipe: Path, tmp_path: Path, text: str) -> None:
    config = load_config(recipe, [])
    begin(tmp_path / "run", config)
    (tmp_path / "run" / "environment.json").write_text(text)
    begin(tmp_path / "run", config)
    assert len(files.read_starts(tmp_path / "run")) == 1
    assert (tmp_path / "run" / "environment.json.damaged-1").read_text() == text


@pytest.mark.parametrize("line", [b'{"x": 1}', b"\xff", b'{"step": 2, "lo', b"[1]", b"[" * 100_000])
def test_broken_metrics_keep_their_other_rows(recipe: Path, tmp_path: Path, line: bytes) -> None:
    content = b'{"step": 1}\n' + line + b'\n{"step": 3}\n{"step": 3, "loss": 1}\n'
    (tmp_path / "metrics.jsonl").write_bytes(content)
    warnings = MetricsFile(tmp_path, enabled=True, eval_every=None).cut(3)
    assert warnings == [
        f"{tmp_path}/metrics.jsonl lacks 1 updates, first 2 and has more than one row of 1 updates, first 3",
        f"{tmp_path}/metrics.jsonl is damaged (line 2 is no row with a step); it is kept as metrics.jsonl.damaged-1, "
        "its other rows stay",
    ]
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 3, "loss": 1}\n'
    assert (tmp_path / "metrics.jsonl.damaged-1").read_bytes() == content


def hold(path: Path, recipe: Path, overrides: list[str], held: Any) -> None:
    """A process that begins a run, says so, and lives on with a worker of its own."""
    begin(path, load_config(recipe, overrides), Console(enabled=False, loss_digits=4))
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    worker.start()
    held.send(worker.pid)
    time.sleep(100)


@pytest.mark.slow
def test_two_processes_never_write_to_one_run_and_a_killed_one_blocks_nobody(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    quick = "--run.answer_within_seconds=0.3"
    fresh, resumed = load_config(recipe, [quick]), load_config(recipe, [quick, "--run.resume=true"])
    held, holder = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=hold, args=(run, recipe, [], holder))
    check(run, fresh)  # the other one is quicker from here on
    process.start()
    worker = held.recv()
    try:
        before = {path: path.read_bytes() for path in run.rglob("*")}
        line = f"another process is writing to the run in {run}; wait for it, or choose another run.folder"
        for config in (fresh, resumed):
            assert line_of(begin, run, config) == line
            assert line_of(check, run, config) == line
        assert {path: path.read_bytes() for path in run.rglob("*")} == before
        point_to_checkpoint(run)
        threading.Timer(0.5, process.kill).start()
        check(run, load_config(recipe, ["--run.answer_within_seconds=60", "--run.resume=true"]))  # it waits
        process.join()
        assert line_of(begin, run, fresh).startswith(f"{run} already holds a run; ")
        check(run, resumed)
        begin(run, resumed)
        assert len(files.read_starts(run)) == 2
    finally:
        process.kill()
        os.kill(worker, signal.SIGKILL)


RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = """
[model.config]
model_type = "llama"
rope_parameters = {rope_theta = 5e5, rope_type = "default"}
[data.mixture."my code"]
path = ["a.jsonl", "b/*.jsonl"]
weight = 2.0
[eval.sets.x]
path = "héld \\"out\\".txt"
[update]
global_batch_size = 64
max_microbatch_tokens = 8192
[optim.options]
momentum = 0.9
"""


def begin(path: Path, config: Config, console: Console | None = None) -> None:
    is_new = not (path / "checkpoints" / "latest").exists()
    starting.open_run_folder(path, config, ALONE, console or Console(enabled=True, loss_digits=4), is_new=is_new)


def point_to_checkpoint(path: Path) -> None:
    step = path / "checkpoints" / "step-1"
    step.mkdir(parents=True)
    (step / "meta.json").write_text("{}")
    (path / "checkpoints" / "latest").write_text("step-1")


def check(path: Path, config: Config) -> None:
    starting.check_run_folder(path, config, ALONE)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["--run.resume=true", "--run.seed=3"],
        ["--optim.lr=1e-300", "--run.profile_steps=2,3", "--optim.betas=0.8,0.99"],
        ["--update.max_norm=none", "--eval.every=none"],
        ["--update.micro_batch_size=3", "--model.name=gpt2", "--model.freeze=*.wte.*,a"],
    ],
)
def test_the_recipe_that_is_written_is_the_recipe_that_was_run(
    recipe: Path, tmp_path: Path, overrides: list[str]
) -> None:
    config = load_config(recipe, overrides)
    if config.run.resume:
        point_to_checkpoint(tmp_path / "run")
    begin(tmp_path / "run", config)
    again = load_config(recipe_of(tmp_path / "run"), [])
    assert again.run.resume is False  # the same run from its beginning
    assert again == config.model_copy(update={"run": config.run.model_copy(update={"resume": False})})


def test_the_environment_says_what_ran_where_and_a_second_start_is_added(recipe: Path, tmp_path: Path) -> None:
    begin(tmp_path / "run", load_config(recipe, []))
    point_to_checkpoint(tmp_path / "run")
    begin(tmp_path / "run", load_config(recipe, ["--run.resume=true"]))
    starts = json.loads((tmp_path / "run" / "environment.json").read_text())["starts"]
    assert len(starts) == 2
    assert starts[0]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert starts[0]["num_ranks"] == 1
    assert list(starts[0]["devices"].values()) == [1]
    assert starts[0]["time_utc"].endswith("Z")
    assert starts[0]["command"]
    assert os.uname().nodename not in json.dumps({**starts[0], "command": [], "working_folder": ""})


def test_the_commit_is_that_of_the_working_folder_and_no_hook_runs(tmp_path: Path) -> None:
    assert starting.git_commit(tmp_path) is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", f"core.hooksPath={tmp_path}/none"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    for hook in (tmp_path / ".git" / "hooks" / name for name in ("post-checkout", "fsmonitor", "pre-commit")):
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        hook.chmod(0o755)
    subprocess.run(["git", "config", "core.fsmonitor", ".git/hooks/fsmonitor"], cwd=tmp_path, check=True)
    head = (tmp_path / ".git" / (tmp_path / ".git" / "HEAD").read_text().split()[1]).read_text().strip()
    assert starting.git_commit(tmp_path) == head
    assert not (tmp_path / "ran").exists()


def test_the_plan_and_all_that_was_said_stand_in_the_folder(recipe: Path, tmp_path: Path) -> None:
    console = Console(enabled=True, loss_digits=4)
    console.say("before the folder\nwas there")
    begin(tmp_path / "run", load_config(recipe, []), console)
    console.warn("of something")
    starting.write_plan(tmp_path / "run", "plan  a\nplan  b", ALONE, console)
    assert (tmp_path / "run" / "plan.txt").read_text() == "plan  a\nplan  b\n"
    said = (tmp_path / "run" / "log.txt").read_text().splitlines()
    assert [line.partition("  ")[2] for line in said] == ["before the folder", "was there", "warning: of something"]


def test_a_folder_that_cannot_be_is_refused_and_one_that_can_is_not_made_yet(recipe: Path, tmp_path: Path) -> None:
    config = load_config(recipe, [])
    check(tmp_path / "a" / "b", config)
    assert list(tmp_path.iterdir()) == [recipe]
    (tmp_path / "file").write_text("")
    for path, nearest in ((tmp_path / "file" / "run", tmp_path / "file"), (Path("/proc/run"), Path("/proc"))):
        assert line_of(check, path, config) == (
            f"run.folder is {path} and {nearest} is no folder to write to; choose another run.folder"
        )


def test_a_folder_that_is_lost_before_the_run_begins_gets_one_line(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    line = line_of(begin, tmp_path / "run", load_config(recipe, []))
    assert line == f"cannot write {tmp_path}/run (File exists); make room, allow it, or choose another run.folder"


def test_a_name_that_is_no_text_is_refused_before_anything_is_written(recipe: Path, tmp_path: Path) -> None:
    config = load_config(recipe, ["--data.mixture.my code.path=caf\udce9é.jsonl"])
    line = line_of(begin, tmp_path / "run", config)
    assert line.startswith("config.toml cannot hold")
    assert "caf\\udce9é.jsonl" in line
    assert not (tmp_path / "run").exists()


def test_what_torchrun_starts_may_be_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch is imported no process knows its job; the check after it does."""
    point_to_checkpoint(tmp_path)
    arguments = [str(RECIPES / "stdlib.toml"), f"--run.folder={tmp_path}"]
    assert line_of(read_config, "train", arguments).startswith(f"{tmp_path} already holds a run; ")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert not read_config("train", arguments).run.resume

"""A run's folder: what it says of the run, that its recipe runs again, and what is refused."""

import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch import MegabatchError
from megabatch.train.checkpoints import run_folder as folder
from megabatch.train.checkpoints import run_lock as starting
from megabatch.train.config import Config
from megabatch.train.config.recipe import load_config
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"))
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


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


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


def line_of(call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(MegabatchError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
    again = load_config(folder.recipe_of(tmp_path / "run"), [])
    assert again.run.resume is False  # the same run from its beginning
    assert again == config.model_copy(update={"run": config.run.model_copy(update={"resume": False})})


def test_it_has_every_key_with_a_value_and_nothing_else(recipe: Path, tmp_path: Path) -> None:
    begin(tmp_path / "run", load_config(recipe, []))
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert list(written) == list(Config.model_fields)
    assert written["optim"]["weight_decay"] == 0.1  # a default
    assert "max_steps" not in written["run"]
    assert "none" not in (tmp_path / "run" / "config.toml").read_text()


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
    assert folder.git_commit(tmp_path) is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", f"core.hooksPath={tmp_path}/none"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    for hook in (tmp_path / ".git" / "hooks" / name for name in ("post-checkout", "fsmonitor", "pre-commit")):
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        hook.chmod(0o755)
    subprocess.run(["git", "config", "core.fsmonitor", ".git/hooks/fsmonitor"], cwd=tmp_path, check=True)
    head = (tmp_path / ".git" / (tmp_path / ".git" / "HEAD").read_text().split()[1]).read_text().strip()
    assert folder.git_commit(tmp_path) == head
    assert not (tmp_path / "ran").exists()


def test_the_plan_and_all_that_was_said_stand_in_the_folder(recipe: Path, tmp_path: Path) -> None:
    console = Console(enabled=True, loss_digits=4)
    console.say("before the folder\nwas there")
    begin(tmp_path / "run", load_config(recipe, []), console)
    console.warn("of something")
    folder.write_plan(tmp_path / "run", "plan  a\nplan  b", ALONE, console)
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


def test_a_folder_without_a_run_is_no_recipe(tmp_path: Path) -> None:
    assert line_of(folder.recipe_of, tmp_path) == (
        f"{tmp_path} is a folder without config.toml, so no run to resume; give the path of a TOML file"
    )

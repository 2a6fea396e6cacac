"""The command line: `megabatch train | plan | verify | export | report | watch | doctor`, and what front.py answers.

Everything wrong with what the user gave ends as one line on stderr and status 2.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

from megabatch.errors import MegabatchError
from megabatch.train.callbacks.tracking import holds_the_end
from megabatch.train.checkpoints.run_folder import recipe_of
from megabatch.train.checkpoints.run_lock import resume_if_restarted
from megabatch.train.cli.doctor.command import examine
from megabatch.train.cli.front import answer
from megabatch.train.cli.usage import ALONE, COMMANDS, USAGE, WITH_RECIPE, parted
from megabatch.train.cli.verification import plain_config, verify_recipe
from megabatch.train.config import Config
from megabatch.train.config.recipe import load_config
from megabatch.train.loop import Trainer
from megabatch.train.model.export import export
from megabatch.train.plan.table import plan_recipe
from megabatch.train.report import command as page
from megabatch.train.report.server import watch
from megabatch.train.runtime.exit import CRASHED, FAILED, FailedError, drop_output, exit_together, fail
from megabatch.train.runtime.heartbeat import Heartbeat
from megabatch.train.runtime.oom_limit import saving_oom_limit
from megabatch.train.runtime.ranks import init_ranks
from megabatch.train.runtime.rendezvous import Rendezvous
from megabatch.train.runtime.signals import StopSignal
from megabatch.train.training_course import Course

MERGED = "--merged"  # of export


def main() -> NoReturn:
    """Run the command line of this process and exit with its status."""
    status = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError:  # nobody reads what was printed last, or a full disk does not take it
        drop_output()
    sys.stderr.flush()
    if "RANK" in os.environ or holds_the_end():  # gloo's threads can abort an interpreter that closes, all work done
        os._exit(status)
    sys.exit(status)


def run(arguments: list[str]) -> int:
    """Do what the arguments say; the exit status."""
    try:
        with exit_together() as met:
            command(arguments, met)
    except FailedError as failed:
        return failed.status
    return 0


def command(arguments: list[str], met: Rendezvous) -> None:
    """One of the commands, or help."""
    if not arguments:
        fail(met, f"megabatch: no command; {USAGE}", FAILED)
    elif arguments[0] in ALONE and met.size > 1:
        name = arguments[0]
        raise MegabatchError(f"{name} runs in one process and was started in {met.size}; start it without torchrun")
    elif answer(arguments):
        return
    elif arguments[0] in WITH_RECIPE:
        with_recipe(arguments[0], arguments[1:], met)
    elif arguments[0] == "export":
        export_run(arguments[1:])
    elif arguments[0] == "report":
        report(arguments[1:])
    elif arguments[0] == "watch":
        watch(*page.read_watch(arguments[1:]))
    elif arguments[0] == "doctor":
        examine(arguments[1:], met)
    else:
        raise MegabatchError(
            f"unknown command {arguments[0]!r}; the commands are {', '.join(COMMANDS)}: see megabatch --help"
        )


def with_recipe(name: str, arguments: list[str], met: Rendezvous) -> None:
    """Read the recipe, and train with it, plan it or verify it."""
    recipe = Path(arguments[0]) if arguments and not arguments[0].startswith("-") else None
    if recipe is None:
        raise MegabatchError(f"no recipe; give the path of a TOML file first: megabatch {name} recipes/stdlib.toml")
    if name == "plan":
        plan(recipe, arguments[1:], met)
    elif name == "verify":
        verify(load_config(recipe_of(recipe) if recipe.is_dir() else recipe, arguments[1:]), met)
    else:
        train(config_of(recipe, arguments[1:]), met)


def train(config: Config, met: Rendezvous) -> None:
    """Train to the end, or until a signal stops the run between two updates; then with the status asked for."""
    stop, pulse = StopSignal(speaks=met.rank == 0), Heartbeat(met, config.run.answer_within_seconds)
    with stop.handling():
        ranks = init_ranks(met, config)
        with saving_oom_limit(config.run, ranks), pulse.running():
            Trainer(resume_if_restarted(config, ranks), ranks, Course(stop, pulse, ranks)).fit()
    if stop.agreed is not None and config.run.stopped_status:
        raise FailedError(config.run.stopped_status)


def config_of(recipe: Path, overrides: list[str]) -> Config:
    """The recipe's config; a run's folder stands for its own recipe, resumed."""
    if not recipe.is_dir():
        return load_config(recipe, overrides)
    here = [f"--run.folder={recipe}", "--run.resume=true"]  # the folder may have been moved
    return load_config(recipe_of(recipe), [*here, *overrides])


def plan(recipe: Path, arguments: list[str], met: Rendezvous) -> None:
    """Print what fits and what it costs; on any machine, alone."""
    if met.size > 1:
        raise MegabatchError(f"plan runs in one process and was started in {met.size}; say --world {met.size} instead")
    plan_recipe(recipe_of(recipe) if recipe.is_dir() else recipe, arguments)


def verify(config: Config, met: Rendezvous) -> None:
    """Print the verification of a recipe; status 1 where the gradient depends on the cut."""
    plain = plain_config(config)
    verification = verify_recipe(plain, init_ranks(met, plain))
    if not verification.ok:
        raise FailedError(CRASHED)


def report(arguments: list[str]) -> None:
    """Write a run's page; of two print how they differ, with status 1 where they are not of the same samples, weights
    and learning rates."""
    comparison = page.report(arguments)
    if comparison is not None and not comparison.is_same:
        raise FailedError(CRASHED)


def export_run(arguments: list[str]) -> None:
    """Read export's arguments and do it."""
    run_folder, to, step = read_export(arguments)
    print(export(run_folder, to, step=step, merged=MERGED in arguments))


def read_export(arguments: list[str]) -> tuple[Path, Path, int | str | None]:
    """The run, the folder to write, and the checkpoint: None for the best where one is kept, else the latest."""
    usage = "write: megabatch export RUN --to DIR [--step N|best|latest] [--merged]"
    words = parted(argument for argument in arguments if argument != MERGED)
    given = dict(zip(words[1::2], words[2::2], strict=False))
    if words and not words[0].startswith("-") and "--to" not in given:
        raise MegabatchError(f"--to is missing; {usage}")
    if len(words) % 2 == 0 or words[0].startswith("-") or "--to" not in given or given.keys() - {"--to", "--step"}:
        raise MegabatchError(f"cannot read the arguments {' '.join(arguments)!r}; {usage}")
    step = given.get("--step")
    if step is not None and not step.isdecimal() and step not in ("best", "latest"):
        raise MegabatchError(f"--step is {step!r}; it must be the number of a checkpoint, best or latest: {usage}")
    return Path(words[0]), Path(given["--to"]), int(step) if step is not None and step.isdecimal() else step

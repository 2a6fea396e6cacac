"""The command line: `megabatch train | plan | verify | show | chat | export | audit`, and front.py's.

Everything wrong with what the user gave ends as one line on stderr and status 2. A command imports what it needs when
it runs: the modules of the others take seconds.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megabatch.errors import MegabatchError
from megabatch.train.checkpoints.paths import recipe_named
from megabatch.train.checkpoints.run_folder import resume_if_restarted
from megabatch.train.cli.arguments import (
    ALONE,
    COMMANDS,
    WITH_RECIPE,
    Audit,
    Chat,
    Export,
    Plan,
    options_of,
    overview,
    read_arguments,
)  # fmt: skip
from megabatch.train.cli.front import answer
from megabatch.train.cli.recipe_command import device_path, read_config
from megabatch.train.config import Config
from megabatch.train.config.keys import nearest
from megabatch.train.config.recipe import split_options
from megabatch.train.records.loggers import holds_the_end
from megabatch.train.runtime.console import CRASHED, FAILED, drop_output, print_line
from megabatch.train.runtime.exit import FailedError, exit_together, fail
from megabatch.train.runtime.heartbeat import Heartbeat
from megabatch.train.runtime.oom_limit import saving_oom_limit
from megabatch.train.runtime.ranks import init_ranks
from megabatch.train.runtime.rendezvous import Rendezvous
from megabatch.train.runtime.signals import StopSignal


def main() -> NoReturn:
    """Run the command line of this process and exit with its status."""
    status = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError:
        # Nobody reads what was printed last, or a full disk does not take it.
        drop_output()
    sys.stderr.flush()
    # gloo's threads can abort an interpreter that closes, when all work is done.
    if "RANK" in os.environ or holds_the_end():
        os._exit(status)
    sys.exit(status)


def run(arguments: list[str]) -> int:
    """Do what the arguments say; return the exit status."""
    try:
        with exit_together() as rendezvous:
            run_command(arguments, rendezvous)
    except FailedError as failed:
        return failed.status
    except KeyboardInterrupt as interruption:
        return 128 + getattr(interruption, "number", signal.SIGINT)
    return 0


def run_command(arguments: Sequence[str], rendezvous: Rendezvous) -> None:
    if not arguments:
        fail(rendezvous, f"megabatch: no command; {overview()}", FAILED)
    name, *command_arguments = arguments
    if name in ALONE and rendezvous.size > 1:
        raise MegabatchError(
            f"{name} runs in one process and was started in {rendezvous.size}; start it without torchrun"
        )
    if answer(arguments):
        return
    if name not in COMMANDS:
        close = nearest(name, COMMANDS)
        words = f" ({close} comes nearest)" if close else ""
        raise MegabatchError(
            f"unknown command {name!r}{words}; the commands are {', '.join(COMMANDS)}: see megabatch --help"
        )
    if name in WITH_RECIPE:
        run_recipe(name, command_arguments, rendezvous)
    else:
        run_other(name, command_arguments, rendezvous)


def run_recipe(name: str, arguments: Sequence[str], rendezvous: Rendezvous) -> None:
    """Read the recipe, and train with it, plan it or verify it."""
    if (path := device_path(name, arguments)) is not None:
        from megabatch.train.cli.measure import measure

        measure(rendezvous, path)
        return
    if name == "plan" and rendezvous.size > 1:
        raise MegabatchError(
            f"plan runs in one process and was started in {rendezvous.size}; say --world {rendezvous.size} instead"
        )
    config = read_config(name, arguments)
    if name == "train":
        train(config, rendezvous)
    elif name == "verify":
        verify(config, rendezvous)
    elif name == "show":
        from megabatch.train.preview.show import show_recipe

        show_recipe(config)
    else:
        from megabatch.train.plan.request import read_request
        from megabatch.train.plan.table import plan_recipe

        request = read_request(*split_options(arguments[1:], *options_of(Plan)))
        plan_recipe(recipe_named(Path(arguments[0])), request)


def train(config: Config, rendezvous: Rendezvous) -> None:
    """Train to the end, or until a signal stops the run between two updates; then with the status asked for."""
    run, stop = config.run, StopSignal(speaks=rendezvous.rank == 0, folder=config.run.folder)
    heartbeat = Heartbeat(rendezvous, run.answer_within_seconds, run.stuck_after, Path(run.folder))
    with stop.handling():
        # This import takes seconds, in which a signal may come.
        from megabatch.train import loop

        ranks = init_ranks(rendezvous, config)
        with saving_oom_limit(run, ranks), heartbeat.running():
            loop.train(loop.prepare_run(resume_if_restarted(config, ranks), ranks, stop, heartbeat))
    if stop.agreed is not None and config.run.stopped_status:
        raise FailedError(config.run.stopped_status)


def verify(config: Config, rendezvous: Rendezvous) -> None:
    """Print the verification of a recipe; status 1 where the gradient depends on the cut."""
    from megabatch.train.cli.verification import plain_config, verify_recipe

    plain = plain_config(config, rendezvous.size)
    if not verify_recipe(plain, init_ranks(rendezvous, plain)).ok:
        raise FailedError(CRASHED)


def run_other(name: str, arguments: Sequence[str], rendezvous: Rendezvous) -> None:
    if name == "export":
        from megabatch.train.checkpoints.export import export

        options = read_arguments(Export, arguments)
        print_line(export(options.run, options.to, step=options.step, merged=options.merged, is_trusted=options.trust))
    elif name == "chat":
        from megabatch.train.preview.chat import Sampling, chat

        options = read_arguments(Chat, arguments)
        sampling = Sampling(options.tokens, options.temperature, options.seed)
        chat(options.run, options.prompt, sampling, step=options.step, mode=options.mode, is_trusted=options.trust)
    else:
        from megabatch.train.cli.audited_command import run_audited

        if status := run_audited(read_arguments(Audit, arguments)):
            raise FailedError(status)

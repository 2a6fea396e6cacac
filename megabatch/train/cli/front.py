"""Commands without torch: help, `init`, `report`, `runs`, and the check of a recipe.

A module is imported here when its command is asked for: torch and transformers take seconds.
"""

import os
import sys
from collections.abc import Sequence

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.cli.arguments import (
    COMMANDS,
    REMOVED_COMMANDS,
    WITH_RECIPE,
    Init,
    Report,
    Runs,
    overview,
    read_arguments,
)
from megabatch.train.runtime.console import (
    FAILED,
    INTERRUPTED,
    UNREAD,
    FailedError,
    drop_output,
    failure_text,
    print_line,
)


def run(arguments: Sequence[str]) -> int | None:
    """Answer what needs no torch, or refuse a wrong recipe; return the exit status, None where there is more to do.

    Under torchrun there is: ranks must meet, so that one of them speaks.
    """
    if "RANK" in os.environ:
        return None
    try:
        is_all = answer(arguments)
        if not is_all and arguments and arguments[0] in WITH_RECIPE:
            return check_command(arguments[0], arguments[1:])
        sys.stdout.flush()
    except FailedError as failed:
        return failed.status
    except MegabatchError as error:
        print_line(failure_text(error), sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        drop_output()
        return UNREAD
    except OSError as error:
        drop_output()
        print_line(f"megabatch: {in_one_line(error)}; give another name, or look at the disk", sys.stderr)
        return FAILED
    return 0 if is_all else None


def answer(arguments: Sequence[str]) -> bool:
    """Print the help that is asked for, or run a command that needs no torch; return False for any other."""
    if not arguments:
        return False
    name, *words = arguments
    if name in REMOVED_COMMANDS:
        raise MegabatchError(f"{name} is removed; {REMOVED_COMMANDS[name]}")
    if name in ("-h", "--help"):
        print(overview())
    elif name in COMMANDS and {"-h", "--help"} & {*words}:
        from megabatch.train.cli.help import print_help

        print_help(name, words)
    elif name == "init":
        from megabatch.train.init.recipe_text import write_recipe

        write_recipe(**vars(read_arguments(Init, words)))
    elif name == "report":
        from megabatch.train.report.page import report

        options = read_arguments(Report, words)
        report(options.runs, options.to, is_comparison=options.compare)
    elif name == "runs":
        from megabatch.train.report.runs import print_runs

        options = read_arguments(Runs, words)
        print_runs(options.folder, as_json=options.json)
    else:
        return False
    return True


def check_command(name: str, arguments: Sequence[str]) -> int | None:
    """Check the recipe of a command; run a sweep of `train` and return its status. None: there is more to do."""
    from megabatch.train.cli.recipe_command import device_path, read_config
    from megabatch.train.config.recipe import split_options

    sweeps, words = split_options(arguments, ("sweep",)) if name == "train" else ([], [])
    if not sweeps:
        if device_path(name, arguments) is None:
            read_config(name, arguments)
        return None
    from megabatch.train.cli.sweep import run_sweep

    return run_sweep(words, [values for _, values in sweeps])

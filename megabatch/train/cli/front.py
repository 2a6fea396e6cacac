"""Front: the commands that need no torch: help, `init` and `completion`.

A module is imported here when its command is asked for: torch and transformers take seconds.
"""

import os
import sys
from pathlib import Path

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.cli.usage import COMMANDS, USAGE, WITH_RECIPE
from megabatch.train.runtime.exit import FAILED, INTERRUPTED, UNREAD, drop_output


def run(arguments: list[str]) -> int | None:
    """Answer what needs no torch; the exit status, or None where there is more to do.

    Under torchrun there is: ranks must meet, so that one of them speaks.
    """
    if "RANK" in os.environ:
        return None
    try:
        is_all = answer(arguments)
        sys.stdout.flush()
    except MegabatchError as error:
        print(f"megabatch: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        drop_output()
        return UNREAD
    except OSError as error:  # of a name that cannot be one, or a full disk that does not take what is printed
        drop_output()
        print(f"megabatch: {in_one_line(error)}; give another name, or look at the disk", file=sys.stderr)
        return FAILED
    return 0 if is_all else None


def answer(arguments: list[str]) -> bool:
    """Print the help that is asked for, or do what needs no torch; whether that was all."""
    if not arguments:
        return False
    name, *rest = arguments
    if name in ("-h", "--help"):
        print(USAGE)
    elif name in COMMANDS and {"-h", "--help"} & {*rest}:
        print(help_on_keys(name, rest) if name in WITH_RECIPE else USAGE)
    elif name == "init":
        init(rest)
    elif name == "completion":
        complete(rest)
    else:
        return False
    return True


def help_on_keys(name: str, arguments: list[str]) -> str:
    """Every key of a recipe, with the values that the recipe named first has, if any."""
    from megabatch.train.cli.help import EXAMPLE, help_text, plan_help_text
    from megabatch.train.config.recipe import load_config

    has_recipe = not arguments[0].startswith("-")
    config = load_config(Path(arguments[0]), []) if has_recipe else EXAMPLE
    return plan_help_text(config) if name == "plan" else help_text(config)


def init(arguments: list[str]) -> None:
    """Write a recipe."""
    from megabatch.train.cli.init.command import write_recipe

    write_recipe(arguments)


def complete(arguments: list[str]) -> None:
    """Print a shell's script."""
    from megabatch.train.cli.shells import script_for

    print(script_for(arguments))

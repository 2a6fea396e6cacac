"""Command: what `megabatch report` and `megabatch watch` are asked for, and how it is done."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megabatch.errors import MegabatchError
from megabatch.train.cli.usage import parted
from megabatch.train.report.comparison import Comparison, compare
from megabatch.train.report.data import read_run
from megabatch.train.report.html import FILE_NAME, write_html
from megabatch.train.runtime.console import Console

REPORT = "write: megabatch report --compare RUN RUN [--to FILE.html], or megabatch report RUN [--to FILE.html]"
WATCH = "write: megabatch watch RUN [--port N]"


@dataclass(frozen=True)
class Asked:
    """What a report is to be of, and where it goes."""

    runs: tuple[Path, ...]  # one, or two to be compared
    to: Path | None  # None: into the run's folder; of two, no page


def report(arguments: Sequence[str]) -> Comparison | None:
    """Write the page, and print where it is; of two runs print how they differ, and return it.

    Raises `MegabatchError`, with nothing written, where that cannot be done.
    """
    asked = read_report(arguments)
    comparison = compare(*asked.runs) if len(asked.runs) == 2 else None
    to = asked.runs[0] / FILE_NAME if asked.to is None and comparison is None else asked.to
    if to is not None:
        text = {} if comparison is None else {"comparison": comparison.text}
        write_html(to, {"runs": [read_run(each) for each in asked.runs], **text})
    if comparison is not None:
        print(comparison.text)
    if to is not None:
        print(f"a page to look at: {to}")
    return comparison


def write_page(folder: Path, console: Console) -> None:
    """Write a run's page at its end, which a full disk does not spoil, nor a file that somebody has damaged."""
    try:
        write_html(folder / FILE_NAME, {"runs": [read_run(folder)]})
    except MegabatchError as error:
        console.warn(f"{FILE_NAME} is not written: {error}")
    else:
        console.say(f"a page to look at: {folder / FILE_NAME}")


def read_report(arguments: Sequence[str]) -> Asked:
    """What is asked for. Raises `MegabatchError` where that cannot be told."""
    words, to = without_option(arguments, "--to", REPORT)
    is_compared, runs = words[:1] == ["--compare"], [word for word in words if word != "--compare"]
    if len(runs) != (2 if is_compared else 1) or any(word.startswith("-") for word in runs):
        raise MegabatchError(f"cannot read the arguments {' '.join(arguments)!r}; {REPORT}")
    return Asked(tuple(map(Path, runs)), None if to is None else Path(to))


def read_watch(arguments: Sequence[str]) -> tuple[Path, int]:
    """The run, and the port, 0 for one that is free. Raises `MegabatchError` where that cannot be told."""
    words, port = without_option(arguments, "--port", WATCH)
    if len(words) != 1 or words[0].startswith("-"):
        raise MegabatchError(f"cannot read the arguments {' '.join(arguments)!r}; {WATCH}")
    if port is not None and not (port.isascii() and port.isdecimal() and int(port) < 2**16):
        raise MegabatchError(f"--port is {port!r}; it must be a number from 0 to 65535: {WATCH}")
    return Path(words[0]), int(port or 0)


def without_option(arguments: Sequence[str], option: str, usage: str) -> tuple[list[str], str | None]:
    """The arguments without the option, and its value, given as ``--to FILE`` or ``--to=FILE``, once."""
    words = parted(arguments)
    if option not in words:
        return words, None
    place = words.index(option)
    if place + 1 == len(words) or not words[place + 1] or option in words[place + 1 :]:
        raise MegabatchError(f"cannot read the arguments {' '.join(arguments)!r}; {usage}")
    return words[:place] + words[place + 2 :], words[place + 1]

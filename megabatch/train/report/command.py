"""`megabatch report`, and the page that a run writes at its end."""

from pathlib import Path

from megabatch.errors import MegabatchError
from megabatch.train.cli.arguments import Report
from megabatch.train.report.comparison import Comparison, compare
from megabatch.train.report.data import read_run
from megabatch.train.report.html import FILE_NAME, write_html
from megabatch.train.runtime.console import Console


def report(asked: Report) -> Comparison | None:
    """Write the page and print where it is; of two runs print how they differ, and return it.

    Raises `MegabatchError`, with nothing written, where that cannot be done.
    """
    if len(asked.runs) != (2 if asked.compare else 1):
        raise MegabatchError("write: megabatch report RUN [--to FILE.html], or report --compare RUN RUN")
    comparison = compare(*asked.runs) if asked.compare else None
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
    """Write a run's page at its end; a full disk and a damaged file are warnings."""
    try:
        write_html(folder / FILE_NAME, {"runs": [read_run(folder)]})
    except MegabatchError as error:
        console.warn(f"{FILE_NAME} is not written: {error}")
    else:
        console.say(f"a page to look at: {folder / FILE_NAME}")

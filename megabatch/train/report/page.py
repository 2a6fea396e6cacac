"""`megabatch report`, and the page that a run writes at its end."""

from collections.abc import Sequence
from pathlib import Path

from megabatch.errors import MegabatchError
from megabatch.train.report.comparison import WITHIN, Comparison, compare
from megabatch.train.report.data import read_run
from megabatch.train.report.html import FILE_NAME, write_html
from megabatch.train.runtime.console import Console


def report(runs: Sequence[Path], to: Path | None, *, is_comparison: bool, within: float = WITHIN) -> Comparison | None:
    """Write the page of a run and print where it is; of two runs print how they differ, and return it.

    Args:
        runs: The folder of a run, or of two to compare.
        is_comparison: Compare two runs.
        within: Most relative difference of losses and norms of runs that count as the same.
        to: The file to write. None: report.html in the run's folder; of two runs, no page.

    Raises:
        MegabatchError: There is no such run. Nothing is written.
    """
    if len(runs) != (2 if is_comparison else 1):
        raise MegabatchError("write: megabatch report RUN [--to FILE.html], or report --compare RUN RUN")
    comparison = compare(*runs, within) if is_comparison else None
    to = runs[0] / FILE_NAME if to is None and comparison is None else to
    if to is not None:
        text = {} if comparison is None else {"comparison": comparison.text}
        write_html(to, {"runs": [read_run(each) for each in runs], **text})
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

"""`megabatch report`, and the page that a run writes while it goes on and at its end."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megabatch.errors import MegabatchError
from megabatch.train.report.data import Story, names_of, read_curves, read_run
from megabatch.train.report.encode import MOST_UPDATES
from megabatch.train.report.html import FILE_NAME, write_html
from megabatch.train.report.runs import comparison_of, find_runs, runs_text, summarize
from megabatch.train.runtime.console import Console, print_line

COMPARISON = "comparison.html"
RUNNING = "running"
# Updates that are drawn while a run goes on.
MOST_LIVE_UPDATES = 4_000
# Least seconds between pages of a run that goes on.
SECONDS_BETWEEN_PAGES = 10.0
USAGE = "write: megabatch report RUN [--to FILE.html], or report --compare RUN RUN ..."


def report(runs: Sequence[Path], to: Path | None, *, is_comparison: bool) -> None:
    """Write the page of a run, or of several beside each other, and print where it is.

    Args:
        runs: The folder of a run; to compare, folders of runs, or folders in which runs are.
        to: The file to write. None: report.html in the run's folder; of several runs, comparison.html beside them.
        is_comparison: Compare the runs.

    Raises:
        MegabatchError: There is no such run. Nothing is written.
    """
    if not runs or (len(runs) > 1 and not is_comparison):
        raise MegabatchError(USAGE)
    if not is_comparison:
        story = read_run(runs[0])
        # Only the page in the run's own folder is written again.
        data = page_of(story) if to is None else {"runs": [story]}
        to = runs[0] / FILE_NAME if to is None else to
        write_html(to, data)
        print_line(f"a page to look at: {to}")
        return
    folders = list(dict.fromkeys(folder for run in runs for folder in find_runs(run)))
    if len(folders) < 2:
        raise MegabatchError(f"{folders[0]} is the only run; name two or more to compare, or their folder")
    are_together = len({folder.absolute().parent for folder in folders}) == 1
    to = (folders[0].parent if are_together else Path()) / COMPARISON if to is None else to
    summaries = [summarize(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]
    most_updates = MOST_UPDATES // len(folders)
    pairs = zip(folders, summaries, strict=True)
    curves = [read_curves(folder, summary.name, most_updates) for folder, summary in pairs]
    write_html(to, {"runs": curves, "comparison": comparison_of(summaries)})
    print_line(f"{runs_text(summaries)}\na page to look at: {to}")


def write_page(folder: Path, console: Console, state: str) -> bool:
    """Write a run's page while it runs or at its end. A full disk and a damaged file are warnings.

    Args:
        folder: The run's folder.
        console: Gets the warning.
        state: As for `read_run`. The page of a run that is "running" reloads itself.

    Returns:
        False where the page is not written.
    """
    most_updates = MOST_LIVE_UPDATES if state == RUNNING else MOST_UPDATES
    try:
        write_html(folder / FILE_NAME, page_of(read_run(folder, state=state, most_updates=most_updates)))
    except MegabatchError as error:
        console.warn(f"{FILE_NAME} is not written: {error}")
        return False
    return True


def page_of(story: Story) -> dict[str, Any]:
    """Return the data of a page of one run; that of a running one says when it was written and when to reload."""
    if story["state"] != RUNNING:
        return {"runs": [story]}
    return {"runs": [story], "written": time.time(), "reload_seconds": SECONDS_BETWEEN_PAGES}

"""How long a page of many updates takes: to be written, to be opened in Chromium, to show another update.

    python -m benchmarks.page                         # half a minute; writes benchmarks/results/page_*.json
    python -m benchmarks.page --quick                 # small, to see that it works; writes nothing

Opening is from the navigation's start until everything is drawn, in a browser without a GPU, at a phone's width and a
desk's.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

from benchmarks import result
from megabatch.train.report.data import read_run
from megabatch.train.report.html import write_html
from tests.page.browsers import CHROMIUM, NO_CHROMIUM, READY, a_browser
from tests.page.made_runs import whole_run

CLAIM = "a page of 10,000 updates opens in less than two seconds"
RUNS = ((100, 1, 4), (10_000, 1, 4), (10_000, 8, 8))  # updates, ranks, microbatches of each
WIDTHS = (1280, 390)
REPEATS = 5
DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() / 1000))))"
ANOTHER = """() => {
  const slider = document.querySelector("input[type=range]"), start = performance.now();
  for (let at = 0; at < 20; at += 1) { slider.value = at; slider.dispatchEvent(new Event("input")); }
  return (performance.now() - start) / 20 / 1000;
}"""
Row = dict[str, Any]


def measured(browser: Browser, folder: Path, updates: int, ranks: int, microbatches: int) -> Row:
    """One run's page."""
    run = whole_run(folder / f"{updates}-{ranks}", updates, ranks=ranks, microbatches=microbatches)
    start = time.perf_counter()
    write_html(run / "report.html", {"runs": [read_run(run)]})
    written = time.perf_counter() - start
    opened, another = zip(*(opening(browser, run / "report.html", width) for width in WIDTHS * REPEATS), strict=True)
    return {
        "updates": updates, "ranks": ranks, "microbatches_of_a_rank": microbatches,
        "bytes": (run / "report.html").stat().st_size, "write_seconds": round(written, 3),
        "open_seconds": round(statistics.median(opened), 3), "slowest_open_seconds": round(max(opened), 3),
        "another_update_seconds": round(statistics.median(another), 5),
    }  # fmt: skip


def opening(browser: Browser, path: Path, width: int) -> tuple[float, float]:
    """Seconds until it is drawn, and to draw the bars of another update."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(path.as_uri(), wait_until="commit")
    page.wait_for_selector(READY, state="attached")
    seconds = page.evaluate(DRAWN)
    another = page.evaluate(ANOTHER)
    page.close()
    return seconds, another


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    if CHROMIUM is None:
        raise SystemExit(f"benchmarks.page: {NO_CHROMIUM}")
    made_with = result.made_with(["playwright"])
    with tempfile.TemporaryDirectory() as folder, a_browser() as browser:
        made_with["versions"]["chromium"] = browser.version
        rows = [measured(browser, Path(folder), *each) for each in (RUNS[:1] if asked.quick else RUNS)]
    for row in rows:
        print("  ".join(f"{key} {value:,}" for key, value in row.items()))
    if not asked.quick:
        print(result.write(result.dated("page"), {"claim": CLAIM, **made_with, "repeats": REPEATS, "pages": rows}))


if __name__ == "__main__":
    main()

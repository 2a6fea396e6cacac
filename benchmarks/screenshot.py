"""Screenshots of a run's page, light and dark, for the README: `python -m benchmarks.screenshot RUN`.

Needs Chromium and playwright, as the tests of the page do.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.figures import ASSETS, THEMES
from tests.page.browsers import a_browser, opened

SIZE = {"width": 1180, "height": 866}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.screenshot")
    parser.add_argument("run", type=Path, help="a run's folder")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, a_browser() as browser:
        page = Path(folder) / "report.html"
        report = [sys.executable, "-m", "megabatch", "report", str(asked.run), "--to", str(page)]
        subprocess.run(report, check=True)
        for scheme in THEMES:
            with opened(browser, page, width=SIZE["width"], scheme=scheme) as seen:
                path = ASSETS / f"report-{scheme}.png"
                seen.page.screenshot(path=path, clip={"x": 0, "y": 0, **SIZE}, full_page=True)
                print(path)


if __name__ == "__main__":
    main()

"""The page of a run that goes on: written now and then, reloaded by itself, and still once the run is over."""

import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch import GradientAccumulator, Learner, losses
from megabatch.train.cli import commands as cli
from megabatch.train.report import page
from megabatch.train.report.data import read_run
from megabatch.train.report.html import FILE_NAME, write_html
from megabatch.train.report.live import LivePage
from megabatch.train.report.page import RUNNING, page_of, write_page
from tests.page.browsers import a_browser, needs_chromium, opened
from tests.page.made_runs import cut, lines, update, whole_run
from tests.page.test_story import data_of
from tests.train.conftest import Bench
from tests.train.conftest import bench as bench
from tests.train.contexts import SILENT, config_of, context_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return whole_run(tmp_path / "run", 12)


def add(run: Path, *steps: int) -> None:
    """Write the rows of the next updates, as a run does."""
    for name, rows in (
        ("metrics.jsonl", [update(step) for step in steps]), ("cuts.jsonl", [cut(step) for step in steps]),
    ):  # fmt: skip
        with (run / name).open("a") as file:
            file.write(lines(rows))


def test_only_the_page_of_a_running_run_reloads(run: Path) -> None:
    assert write_page(run, SILENT, RUNNING)
    data = data_of(run / FILE_NAME)
    assert (data["reload_seconds"], data["runs"][0]["state"]) == (10.0, "running")
    assert abs(data["written"] - time.time()) < 60
    for state in ("ended", "stopped at update 12"):
        assert write_page(run, SILENT, state)
        assert data_of(run / FILE_NAME).keys() == {"runs"}
        assert data_of(run / FILE_NAME)["runs"][0]["state"] == state


def test_a_page_that_cannot_be_written_is_a_warning(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / FILE_NAME).mkdir()
    assert not write_page(run, SILENT, RUNNING)
    assert capsys.readouterr().out == ""


def live_page(run: Path, seconds: float) -> tuple[LivePage, Any]:
    """The callback, and a context of the run."""
    model = torch.nn.Linear(1, 1)
    learner = Learner(model, torch.optim.SGD(model.parameters()), GradientAccumulator(model, micro_batch_size=1))
    return LivePage(seconds), context_of(learner, losses.mse, config=config_of(run))


def test_it_is_written_after_an_update_where_it_is_time_to(run: Path) -> None:
    callback, context = live_page(run, 0.0)
    callback.after_update(context)
    assert data_of(run / FILE_NAME)["runs"][0]["num_updates"] == 12
    add(run, 13)
    time.sleep(100 * 0.1)  # a page of twelve updates takes less than a tenth of a second
    callback.after_update(context)
    assert data_of(run / FILE_NAME)["runs"][0]["num_updates"] == 13
    later, context = live_page(run, math.inf)
    add(run, 14)
    later.after_update(context)
    assert data_of(run / FILE_NAME)["runs"][0]["num_updates"] == 13


def test_one_that_failed_is_not_tried_again(run: Path) -> None:
    callback, context = live_page(run, 0.0)
    (run / FILE_NAME).mkdir()
    callback.after_update(context)
    (run / FILE_NAME).rmdir()
    callback.after_update(context)
    assert not (run / FILE_NAME).exists()


@pytest.mark.full
def test_a_run_writes_its_page_while_it_goes_on_and_when_it_is_stopped(bench: Bench) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "megabatch", "train", str(bench.recipe), "--run.max_epochs=10000"]
    with subprocess.Popen([*command, f"--run.folder={bench.folder}"], env=environment, cwd=bench.path) as process:
        try:
            deadline = time.monotonic() + 120
            while not (bench.folder / FILE_NAME).exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.2)
            assert data_of(bench.folder / FILE_NAME)["runs"][0]["state"] == "running"
            assert cli.run(["report", str(bench.folder)]) == 0
            assert data_of(bench.folder / FILE_NAME)["reload_seconds"] == 10.0, "another process says the same"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    data = data_of(bench.folder / FILE_NAME)
    assert data.keys() == {"runs"}
    assert data["runs"][0]["state"].startswith("stopped at update ")


@pytest.mark.slow
@needs_chromium
def test_a_browser_follows_the_run_until_it_is_over(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from playwright.sync_api import expect  # the browser's own library, where there is a browser

    monkeypatch.setattr(page, "SECONDS_BETWEEN_PAGES", 0.5)
    write_page(run, SILENT, RUNNING)
    with a_browser() as browser, opened(browser, run / FILE_NAME) as seen:
        points = seen.page.locator(".plot").nth(1)
        expect(points).to_have_attribute("data-points", "12")
        expect(seen.page.locator("#status")).to_have_class(re.compile("live"))
        add(run, 13, 14)
        write_page(run, SILENT, RUNNING)
        expect(points).to_have_attribute("data-points", "14", timeout=20_000)

        slider = seen.page.get_by_role("slider")
        slider.focus()  # it waits for a person who uses a control
        add(run, 15)
        write_page(run, SILENT, RUNNING)
        time.sleep(1.5)
        expect(points).to_have_attribute("data-points", "14")
        slider.blur()
        expect(points).to_have_attribute("data-points", "15", timeout=20_000)

        write_page(run, SILENT, "ended")
        expect(seen.page.locator("#status")).not_to_have_class(re.compile("live"), timeout=20_000)
        add(run, 16)
        write_page(run, SILENT, "ended")
        time.sleep(1.5)
        expect(points).to_have_attribute("data-points", "15")
        assert (seen.problems, set(seen.requests)) == ([], {seen.address})


@pytest.mark.slow
@needs_chromium
def test_the_page_of_a_run_that_died_stops_reloading(run: Path) -> None:
    from playwright.sync_api import expect

    data = page_of(read_run(run, state=RUNNING))
    write_html(run / FILE_NAME, data | {"written": time.time() - 3600, "reload_seconds": 0.2})
    with a_browser() as browser, opened(browser, run / FILE_NAME) as seen:
        expect(seen.page.locator("#status")).to_contain_text("this page was last written")
        write_page(run, SILENT, "ended")
        time.sleep(1.5)
        expect(seen.page.locator("#status")).to_contain_text("this page was last written")

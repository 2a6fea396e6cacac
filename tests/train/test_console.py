"""The console: a bar on a terminal, lines elsewhere; the log; only the main rank speaks."""

import contextlib
import os
import pty
import re
import select
import threading
import time
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from megabatch.train.runtime import console as console_module
from megabatch.train.runtime.console import Console
from tests.train.processes import CONTEXT

UPDATE = {
    "step": 3, "loss": 1.25, "grad_norm": 0.5, "lr": 1e-3, "num_samples": 8, "num_microbatches": 2, "padding": 0.125,
    "tokens_per_second": 1234.5,
}  # fmt: skip
EVALUATION = {
    "step": 3, "set": "held-out", "eval_loss": 1.5, "eval_perplexity": 4.4817, "eval_accuracy": 0.25, "eval_own": 7,
    "num_target_tokens": 1234,
}  # fmt: skip


def work(console: Console, what: str) -> None:
    with console.progress(what, 10, "rows") as advance:
        for _ in range(10):
            time.sleep(0.08)
            advance(1)


def run_in_small(shown: str, log: Path, environment: dict[str, str]) -> None:
    """A process: loading that lasts, then updates with an evaluation that lasts among them."""
    for descriptor in (1, 2):
        os.dup2(os.open(shown, os.O_RDWR | os.O_CREAT | os.O_NOCTTY), descriptor)
    os.environ |= environment
    console_module.SECONDS_TO_SHOW, console_module.SECONDS_BETWEEN_LINES = 0.2, 0.3
    console = Console(enabled=True, loss_digits=4)
    work(console, "tokenizing data")
    with console.progress("something quick", None, "rows") as advance:
        advance(1)
    console.log_to(log)
    with console.bar(0, 2, lambda step: 8 * step):
        for step in (1, 2):
            console.update(UPDATE | {"step": step})
            work(console, "evaluating held-out")
            console.evaluation(step, EVALUATION)
    console.warn("[bold]the end[/bold]")


def on_terminal(log: Path, width: int) -> str:
    """The bytes that a terminal is shown, escape sequences and all."""
    terminal, end = pty.openpty()
    environment = {"COLUMNS": str(width), "TERM": "xterm"}
    process = CONTEXT.Process(target=run_in_small, args=(os.ttyname(end), log, environment))
    with os.fdopen(terminal, "rb", closefd=True) as shown:
        process.start()
        text = read_until_closed(shown.fileno(), process, end)
    assert process.exitcode == 0, text
    return text


def read_until_closed(terminal: int, process: BaseProcess, end: int) -> str:
    """All that the process writes; our own end stays open until it has opened its own."""
    text = b""
    while not text and process.is_alive():
        text += os.read(terminal, 65536) if select.select([terminal], [], [], 0.1)[0] else b""
    os.close(end)
    with contextlib.suppress(OSError):  # what reading a terminal ends with, when nobody writes to it any more
        while piece := os.read(terminal, 65536):
            text += piece
    process.join()
    return text.decode()


def plain(text: str) -> list[str]:
    """The lines without what moves the cursor or colors them."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))]


@pytest.mark.slow
@pytest.mark.parametrize("width", [160, 60])
def test_on_a_terminal_the_bar_of_the_updates_and_what_lasts_within_it_stand_together(
    tmp_path: Path, width: int
) -> None:
    lines = plain(on_terminal(tmp_path / "log.txt", width))
    bars = [line for line in lines if line.startswith(("update", "tokenizing", "evaluating")) and "━" in line]
    assert max(map(len, bars)) <= width
    assert any(line.startswith("tokenizing data") and "/10" in line for line in bars)
    assert any(line.startswith("update") and "2/2" in line and "loss 1." in line for line in bars)
    assert not any("grad norm" in line for line in lines)  # a line for each update is the log's
    assert any(line.startswith("evaluating held-out") and "/10" in line for line in bars)
    for before, after in pairwise(bars):  # the nested one stands below, in the same display
        assert not after.startswith("evaluating") or before.startswith("update")
    assert not any("something quick" in line for line in lines)
    assert lines.count("warning: [bold]the end[/bold]") == 1
    assert len([line for line in lines if line.startswith("update    2  held-out loss 1.5000")]) == 1
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 5


@pytest.mark.slow
def test_elsewhere_there_are_lines_and_few_of_them(tmp_path: Path) -> None:
    arguments = (str(tmp_path / "shown"), tmp_path / "log.txt", {"FORCE_COLOR": "1"})
    process = CONTEXT.Process(target=run_in_small, args=arguments)
    process.start()
    process.join()
    shown = (tmp_path / "shown").read_text()
    assert "\x1b" not in shown
    lines = shown.splitlines()
    tokenizing = [line for line in lines if line.startswith("tokenizing data: ")]
    assert 2 <= len(tokenizing) <= 5
    assert re.fullmatch(r"tokenizing data: \d+ of 10 rows, \d s", tokenizing[0])
    assert re.fullmatch(r"tokenizing data: 10 of 10 rows, \d s", tokenizing[-1])
    assert not any("something quick" in line for line in lines)
    said = [line for line in lines if not line.startswith(("tokenizing", "evaluating"))]
    assert said == [
        "update    1  loss 1.2500  grad norm 0.500  lr 1.00e-03  8 samples in 2 microbatches  padding 12.5%  "
        "1,234 real tokens/s",
        "update    1  held-out loss 1.5000  perplexity 4.482  accuracy 25.0%  own 7  over 1,234 target tokens",
        *[line.replace("update    1", "update    2") for line in said[:2]],
        "warning: [bold]the end[/bold]",
    ]
    logged = (tmp_path / "log.txt").read_text().splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  ", "", line) for line in logged] == said


def speak(console: Console) -> None:
    console.say("said")
    console.warn("warned")
    console.update(UPDATE)
    console.evaluation(3, EVALUATION)
    with console.bar(0, None), console.progress("what", None, "rows") as advance:
        advance(1)


def test_other_ranks_are_silent(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    console = Console(enabled=False, loss_digits=4)
    speak(console)
    console.log_to(tmp_path / "log.txt")
    speak(console)
    with pytest.raises(ZeroDivisionError), console.logged_failure():
        raise ZeroDivisionError
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_what_was_said_before_the_log_is_kept_for_it_and_a_log_is_gone_on_with(tmp_path: Path) -> None:
    for _ in range(2):
        console = Console(enabled=True, loss_digits=4)
        console.say("before")
        console.log_to(tmp_path / "log.txt")
        console.say("after")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split("  ")[1] for line in lines] == ["before", "after"] * 2


def test_the_log_says_how_a_run_ended(tmp_path: Path) -> None:
    console = Console(enabled=True, loss_digits=4)
    console.log_to(tmp_path / "log.txt")
    with pytest.raises(KeyboardInterrupt), console.logged_failure():
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="of\nit"), console.logged_failure():
        raise ValueError("the end\nof\nit")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split("  ")[1] for line in lines] == [
        "stopped by KeyboardInterrupt", "stopped by ValueError: the end", "of", "it",
    ]  # fmt: skip


def test_progress_goes_on_saying_so_where_nothing_is_counted_and_ends_with_its_block(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_module, "SECONDS_TO_SHOW", 0.01)
    monkeypatch.setattr(console_module, "SECONDS_BETWEEN_LINES", 0.01)

    console, lines = Console(enabled=True, loss_digits=4), list[str]()
    threads, deadline = threading.active_count(), time.monotonic() + 60

    def save() -> None:
        while len(lines) < 4 and time.monotonic() < deadline:
            lines.extend(capsys.readouterr().out.splitlines())
            time.sleep(0.01)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), console.progress("saving", None, "files"):
        save()
    assert len(lines) > 3
    assert all(re.fullmatch(r"saving: \d+ s", line) for line in lines)
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    ("total", "made", "most", "least"),
    [(7, 7, 7, 7), (100, 100, 100, 100), (101, 101, 52, 51), (100_000, 100_000, 102, 99), (None, 99, 99, 99),
     (None, 1000, 190, 180)],
)  # fmt: skip
def test_a_run_of_any_length_has_some_lines_of_updates(
    total: int | None, made: int, most: int, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(enabled=True, loss_digits=4)
    with console.bar(0, total):
        for step in range(1, made + 1):
            console.update(UPDATE | {"step": step})
    lines = capsys.readouterr().out.splitlines()
    assert least <= len(lines) <= most
    assert lines[0].startswith("update    1  ")
    assert lines[-1].startswith(f"update {made:>4}  ")


def test_an_update_that_was_not_stepped_is_always_said_and_verbose_says_all(capsys: pytest.CaptureFixture[str]) -> None:
    for is_verbose, expected in ((False, [1, 2, 333, 1000]), (True, [1, 2, 3, 333, 999, 1000])):
        console = Console(enabled=True, loss_digits=4, is_verbose=is_verbose)
        with console.bar(0, 1000):
            for step in (1, 2, 3, 333, 999, 1000):
                console.update(UPDATE | {"step": step, "loss": None if step in (2, 333) else 1.0})
        said = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
        assert said == expected


def test_what_is_shown_in_place_of_a_text_is_not_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for is_verbose, shown in ((False, "short\n"), (True, "whole\ntext\n")):
        console = Console(enabled=True, loss_digits=4, is_verbose=is_verbose)
        console.log_to(tmp_path / f"{is_verbose}.txt")
        console.say("whole\ntext", "short")
        assert capsys.readouterr().out == shown
        logged = (tmp_path / f"{is_verbose}.txt").read_text().splitlines()
        assert [line.split("  ")[1] for line in logged] == ["whole", "text"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (UPDATE | {"loss": None}, "update    3  nothing to learn in its samples: not stepped"),
        (
            {key: UPDATE[key] for key in UPDATE if key not in ("padding", "tokens_per_second")}
            | {"grad_norm": None, "samples_per_second": 98.76},
            "update    3  loss 1.2500  lr 1.00e-03  8 samples in 2 microbatches  98.8 samples/s",
        ),
    ],
)
def test_what_an_update_was(row: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Console(enabled=True, loss_digits=4).update(row)
    assert capsys.readouterr().out == f"{words}\n"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"set": "a", "eval_loss": None, "eval_accuracy": None}, "update    5  a has nothing to predict: no loss"),
        ({"set": "own", "eval_words": 0.123456789}, "update    5  own words 0.123457"),
        ({"set": "b", "eval_loss": float("inf"), "eval_x": None}, "update    5  b loss inf"),
    ],
)
def test_what_an_evaluation_found(row: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Console(enabled=True, loss_digits=4).evaluation(5, row)
    assert capsys.readouterr().out == f"{words}\n"

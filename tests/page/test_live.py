"""A run that is watched: its page for this machine alone, what is new without a reload, and an end at Ctrl-C."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from megabatch.errors import MegabatchError
from megabatch.train.cli import commands as cli
from megabatch.train.cli.arguments import Watch, read_arguments
from megabatch.train.report.data import AddedRows
from megabatch.train.report.server import HOST, Handler, Server, is_here
from megabatch.train.runtime.files import replace_text
from tests.page.browsers import a_browser, needs_chromium, opened
from tests.page.made_runs import cut, evaluations, lines, update, whole_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return whole_run(tmp_path / "run", 12)


@pytest.fixture
def server(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("megabatch.train.report.server.SHARE", 0)  # a slow look may not answer the next one
    with Server(run, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection(HOST, server.server_address[1], timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer, answer.read()


def add(run: Path, *steps: int) -> None:
    """Write the rows of the next updates, as a run does."""
    for name, rows in (
        ("metrics.jsonl", [update(step) for step in steps]), ("cuts.jsonl", [cut(step) for step in steps]),
    ):  # fmt: skip
        with (run / name).open("a") as file:
            file.write(lines(rows))


def test_there_is_a_page_and_its_data_and_nothing_else(server: Server) -> None:
    page, text = get(server, "/")
    assert (page.status, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"<!doctype html>" in text
    data, text = get(server, "/data")
    assert (data.status, data.headers["Cache-Control"], data.headers["Server"]) == (200, "no-store", "megabatch")
    assert json.loads(text)["runs"][0]["num_updates"] == 12
    for path in ("/metrics.jsonl", "/..", "/../run/log.txt", "/data/", "/.", "/favicon.ico", "/index.html"):
        assert get(server, path)[0].status == 404, path
    assert get(server, "/", "POST")[0].status == 501


def test_it_listens_to_this_machine_alone(server: Server) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert get(server, "/", Host="localhost:1")[0].status == 200
    assert get(server, "/data", Host="elsewhere.example")[0].status == 404  # a name of elsewhere that leads here
    names = ("127.0.0.1", "127.0.0.1:80", "localhost", "", "127.0.0.1.evil.example:80", "[::1]:80")
    assert [is_here(name) for name in names] == [True, True, True, False, False, False]


def test_data_that_were_seen_are_not_sent_again(server: Server, run: Path) -> None:
    mark = json.loads(get(server, "/data")[1])["mark"]
    assert get(server, f"/data?seen={mark}")[0].status == 204
    add(run, 13)
    news = json.loads(get(server, f"/data?seen={mark}")[1])
    assert news["runs"][0]["updates"]["step"][-1] == 13
    assert news["mark"] != mark
    (run / "cuts.jsonl").write_text('{"step": 1}\n')
    answer, text = get(server, "/data")
    assert (answer.status, b"cuts.jsonl is damaged" in text) == (503, True)


def num_bytes_read() -> int:
    """Bytes that this process has read of files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_look_reads_what_was_added(server: Server, run: Path) -> None:
    add(run, *range(13, 3000))
    before = num_bytes_read()
    assert server.data()["runs"][0]["num_updates"] == 2999
    assert num_bytes_read() - before > (run / "metrics.jsonl").stat().st_size
    add(run, 3000)
    before = num_bytes_read()
    assert server.data()["runs"][0]["updates"]["step"][-1] == 3000
    assert num_bytes_read() - before < 20_000


def test_a_file_that_was_replaced_or_cut_is_read_anew(tmp_path: Path) -> None:
    path, rows = tmp_path / "metrics.jsonl", AddedRows()
    assert rows(path) == []
    path.write_text(lines([update(1), update(2), update(3)])[:-2])
    assert [row["step"] for row in rows(path)] == [1, 2]  # the third is still being written
    path.write_text(lines([update(1), update(2), update(3)]))
    assert [row["step"] for row in rows(path)] == [1, 2, 3]
    replace_text(path, lines([update(1), update(4), update(5), update(6)]))  # as a run that resumes from update 1
    assert [row["step"] for row in rows(path)] == [1, 4, 5, 6]
    path.write_text(lines([update(7)]))
    assert [row["step"] for row in rows(path)] == [7]
    path.write_text(lines([update(7)]) + "no row\n" + lines([update(8)]))
    for _ in range(2):
        with pytest.raises(MegabatchError, match=r"metrics\.jsonl is damaged \(line 2 is no row\)"):
            rows(path)


def test_a_long_run_is_looked_at_now_and_then(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megabatch.train.report.server.SECONDS_AT_ONCE", 0.0)
    monkeypatch.setattr("megabatch.train.report.server.SHARE", 1e9)
    with Server(run, 0) as server:
        mark = server.data()["mark"]
        add(run, 13)
        assert server.data()["mark"] == mark


def test_a_connection_that_asks_for_nothing_is_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "timeout", 0.1)
    with socket.create_connection(server.server_address, timeout=10) as connection:
        connection.sendall(b"GET / HT")
        assert connection.recv(1) == b""
    assert get(server, "/")[0].status == 200


def test_what_cannot_be_watched_is_one_line(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "damaged").mkdir()
    (run / "damaged" / "metrics.jsonl").write_text("{\n{\n")
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = [
            ((run, "--port", port), f"cannot serve on port {port} (Address already in use); choose another --port"),
            ((tmp_path,), "has no metrics.jsonl; give the folder of a run that has begun"),
            ((tmp_path / "none",), "is no folder"),
            ((run / "damaged",), "metrics.jsonl is damaged"),
            ((), "see megabatch watch --help"),
            ((run, run), "see megabatch watch --help"),
            ((run, "--port", "x"), "see megabatch watch --help"),
            ((run, "--port", "65536"), "--port is 65536; it must be a number from 0 to 65535"),
            ((run, "--port"), "see megabatch watch --help"),
        ]
        for arguments, line in cases:
            assert cli.run(["watch", *map(str, arguments)]) == 2
            caught = capsys.readouterr()
            assert line in caught.err
            assert len((caught.out + caught.err).splitlines()) == 1
    assert read_arguments(Watch, ["run", "--port=8000"]) == Watch(Path("run"), 8000)


@pytest.mark.slow
def test_ctrl_c_ends_it_and_is_no_failure(run: Path) -> None:
    """Also while a browser holds a connection open."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "megabatch", "watch", str(run)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"{run} at http://127.0.0.1:")
        port = int(line.partition("127.0.0.1:")[2].partition("/")[0])
        with socket.create_connection((HOST, port)):
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest.strip(), errors) == (0, "", "")


@pytest.mark.slow
@needs_chromium
def test_what_is_new_comes_without_a_reload(server: Server, run: Path) -> None:
    """New updates, a set that was not there before, and the end; what a person chose stays."""
    from playwright.sync_api import expect  # the browser's own library, where there is a browser

    with a_browser() as browser, opened(browser, server.address) as seen:
        page = seen.page
        points = page.locator(".plot").nth(1)
        expect(points).to_have_attribute("data-points", "12")
        page.get_by_role("spinbutton").fill("5")
        page.keyboard.press("Enter")
        add(run, 13, 14)
        expect(points).to_have_attribute("data-points", "14", timeout=20_000)
        expect(page.locator("#cuts .words")).to_contain_text("update 5:")
        expect(page.get_by_role("slider")).to_have_attribute("max", "13")
        assert page.evaluate("performance.getEntriesByType('navigation').length") == 1
        with (run / "metrics.jsonl").open("a") as file:
            file.write(lines([update(15), *evaluations(15, "late")]))
        expect(page.locator("figcaption").first).to_contain_text("late 3", timeout=20_000)
        page.get_by_role("slider").focus()
        page.keyboard.press("End")
        add(run, 16)
        expect(page.locator("#cuts .words")).to_contain_text("update 16:", timeout=20_000)  # it follows the last
        assert (seen.problems, {request.partition("?")[0] for request in seen.requests}) == (
            [], {server.address, f"{server.address}data"},
        )  # fmt: skip


@pytest.mark.slow
@needs_chromium
def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    from playwright.sync_api import expect

    (tmp_path / "config.toml").write_text("")
    with Server(tmp_path, 0) as server, a_browser() as browser:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        with opened(browser, server.address) as seen:
            expect(seen.page.locator("#status")).to_contain_text("no update yet")
            add(tmp_path, 1)
            expect(seen.page.locator("figcaption").first).to_contain_text("update 5.985", timeout=20_000)
            server.shutdown()
            server.server_close()
            expect(seen.page.locator("#status")).to_contain_text("nobody serves this page any more", timeout=20_000)
        thread.join()

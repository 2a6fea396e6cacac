"""`megabatch watch`: a run's page while the run lasts, served to this machine alone.

There are two addresses, the page and its data; whoever asks for anything else, or by another name than this machine's,
is told that there is nothing.
"""

import hashlib
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from megabatch.errors import MegabatchError
from megabatch.train.report.data import AddedRows, is_running, read_run
from megabatch.train.report.html import html_of, json_of
from megabatch.train.runtime.console import print_line
from megabatch.train.runtime.files import CUTS, METRICS, SKIPPED, TIMELINE

HOST = "127.0.0.1"
NAMES = {HOST, "localhost"}  # by which a browser may ask: a page of elsewhere, whose name leads here, may not
PAGE, DATA = "/", "/data"
SECONDS_TO_ASK = 10.0
SECONDS_AT_ONCE, SHARE = 0.2, 20  # data that take longer are made once in so many times that time
MOST_LIVE_UPDATES = 4_000
READ = (METRICS, SKIPPED, CUTS, TIMELINE, "log.txt", "plan.txt", "environment.json")


class Server(ThreadingTCPServer):
    """Server of one run's page. Raises `MegabatchError` where it cannot serve."""

    daemon_threads = True  # a browser that keeps its connection open keeps nobody from leaving
    allow_reuse_address = True  # of a server that has just ended; one that lives keeps its port

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self._rows, self._reading = AddedRows(), threading.Lock()
        self._known, self._known_until = dict[str, Any](), 0.0
        self.data()
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            reason = error.strerror or str(error)
            raise MegabatchError(f"cannot serve on port {port} ({reason}); choose another --port") from None

    @property
    def address(self) -> str:
        """The address that a browser opens."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def data(self) -> dict[str, Any]:
        """Return the page's data, with a mark that changes when they do.

        They are those of now, or of seconds ago where a run is long: `watch` takes a twentieth of a core at most, for
        all who look.
        """
        with self._reading:
            started, mark = time.monotonic(), mark_of(self.folder)  # before it is read: what comes meanwhile is news
            if mark != self._known.get("mark") and started >= self._known_until:
                story = read_run(self.folder, may_be_empty=True, read=self._rows, most_updates=MOST_LIVE_UPDATES)
                self._known, seconds = {"runs": [story], "is_live": True, "mark": mark}, time.monotonic() - started
                self._known_until = started + (SHARE * seconds if seconds > SECONDS_AT_ONCE else 0.0)
            return self._known

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that leaves before it has its answer."""


class Handler(BaseHTTPRequestHandler):
    """Handler of requests for the page and for its data."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = SECONDS_TO_ASK  # of a connection that asks for nothing

    def version_string(self) -> str:
        """Return the server's name, without versions."""
        return "megabatch"

    def do_GET(self) -> None:
        """Send the page or its data."""
        asked = urlsplit(self.path)
        if not is_here(self.headers.get("Host", "")) or asked.path not in (PAGE, DATA):
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is a page at / and nothing else\n")
        try:
            data = self.server.data()
        except MegabatchError as error:
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n")
        if asked.path == DATA and parse_qs(asked.query).get("seen") == [data["mark"]]:
            return self._send(HTTPStatus.NO_CONTENT, "application/json", "")
        if asked.path == DATA:
            return self._send(HTTPStatus.OK, "application/json", json_of(data))
        return self._send(HTTPStatus.OK, "text/html", html_of(data))

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: there is a request every second."""

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)


def watch(folder: Path, port: int) -> None:
    """Serve the run's page until Ctrl-C, which is its end and no failure."""
    if not 0 <= port < 2**16:
        raise MegabatchError(f"--port is {port}; it must be a number from 0 to 65535")
    with Server(folder, port) as server:
        try:
            print_line(f"{folder} at {server.address} (Ctrl-C ends it)")
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def is_here(host: str) -> bool:
    """Return True for a name of this machine."""
    return host.rsplit(":", 1)[0] in NAMES


def mark_of(folder: Path) -> str:
    """Return a mark that changes with any of the page's files."""
    seen = [(path.stat().st_size, path.stat().st_mtime_ns) for path in map(folder.joinpath, READ) if path.exists()]
    return hashlib.sha256(repr((seen, is_running(folder))).encode()).hexdigest()[:16]

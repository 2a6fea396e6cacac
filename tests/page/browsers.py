"""A browser without a window, and a page in it of which everything that goes wrong is noted."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
NO_CHROMIUM = "no Chromium is found; apt-get install chromium"
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
READY = "html[data-ready]"  # a selector: the page's own policy forbids what waiting for a script's answer would take


@dataclass
class Seen:
    """A page, what it said to the console, and what it asked for that is not itself."""

    page: Page
    address: str
    problems: list[str] = field(default_factory=list[str])
    requests: list[str] = field(default_factory=list[str])


@contextmanager
def a_browser() -> Generator[Browser, None, None]:
    """Chromium, in a folder of its own."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser, place: Path | str, *, width: int = 1280, scheme: Any = "light"
) -> Generator[Seen, None, None]:
    """The page of a file or an address, drawn."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    seen = Seen(page, place if isinstance(place, str) else place.as_uri())
    page.on("console", lambda message: seen.problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: seen.problems.append(str(error)))
    page.on("request", lambda request: seen.requests.append(request.url))
    page.goto(seen.address)
    page.wait_for_selector(READY, state="attached")
    yield seen
    context.close()

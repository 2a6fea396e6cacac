"""The page as one file, with its scripts, styles and data; its policy forbids all requests."""

import html
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from megabatch.errors import MegabatchError
from megabatch.train.runtime.files import replace_text

FILE_NAME = "report.html"
STYLES = ("uplot/uPlot.min.css", "page.css")
SCRIPTS = ("words.js", "charts.js", "bars.js", "timeline.js", "tables.js", "page.js")


def write_html(path: Path, data: Mapping[str, Any]) -> None:
    """Write the page, whole or not at all. Raises `MegabatchError` where it cannot be written."""
    text = html_of(data)
    if not path.parent.is_dir():
        raise MegabatchError(f"{path.parent} is no folder; make it, or choose another --to")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise MegabatchError(f"{path} is no file that can be put in place of another; choose another --to")
    if path.is_dir():
        raise MegabatchError(f"{path} is a folder; --to names a file, as report.html")
    try:
        replace_text(path, text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise MegabatchError(f"cannot write {path} ({reason}); make room, allow it, or choose another --to") from None


def html_of(data: Mapping[str, Any]) -> str:
    """Return the page of one run, or of several and their ``comparison``; ``reload_seconds``: it reloads itself."""
    title = ", ".join(str(run["name"]) for run in data["runs"])
    parts = {
        "TITLE": html.escape(title),
        "STYLES": "\n".join(map(asset, STYLES)),
        "LIBRARY": asset("uplot/uPlot.iife.min.js"),
        "SCRIPTS": "\n".join(map(asset, SCRIPTS)),
        # "<" would end the element of the data.
        "DATA": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    first, *pieces = asset("page.html").split("{{")
    return first + "".join(parts[name] + tail for name, _, tail in (piece.partition("}}") for piece in pieces))


@cache
def asset(name: str) -> str:
    """Read a file of this package."""
    return files("megabatch.train.report").joinpath("assets", *name.split("/")).read_text(encoding="utf-8")

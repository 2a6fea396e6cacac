"""Places: the folder of runs, and the hub."""

import shutil
import threading
import urllib.request
from pathlib import Path

from huggingface_hub import constants

from megabatch.errors import in_one_line
from megabatch.train.cli.doctor.finding import Finding
from megabatch.train.config.byte_sizes import GIB, gib_text
from megabatch.train.runtime.files import is_writable

SCARCE_BYTES = 5 * GIB  # of a disk: less than that is soon full of checkpoints
SECONDS_TO_ANSWER = 2.0


def folder_finding(folder: Path) -> Finding:
    """Room for checkpoints where runs are written."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        return Finding("fail", "folder", f"{in_one_line(error)}; choose another run.folder")
    if not there.is_dir() or not is_writable(there):
        return Finding("fail", "folder", f"{there} is no folder to write to; allow it, or choose another run.folder")
    free = shutil.disk_usage(there).free
    text = f"{gib_text(free)} free for {folder}"
    if free < SCARCE_BYTES:
        return Finding("warn", "folder", f"{text}; make room, or keep fewer checkpoints with run.keep_last")
    return Finding("ok", "folder", text)


def hub_finding() -> Finding:
    """Whether names of the hub can be read."""
    cache = f"what is in {constants.HF_HUB_CACHE} can be named"
    if constants.HF_HUB_OFFLINE:
        return Finding("ok", "hub", f"offline, by HF_HUB_OFFLINE; {cache}")
    problem = unreachable(constants.ENDPOINT)
    if problem is None:
        return Finding("ok", "hub", constants.ENDPOINT)
    return Finding("warn", "hub", f"{constants.ENDPOINT} does not answer ({problem}); {cache}: set HF_HUB_OFFLINE=1")


def unreachable(address: str) -> str | None:
    """Why there is no answer from there; None where there is one. Beside this thread: a resolver has no timeout."""
    problem = [f"nothing within {SECONDS_TO_ANSWER:g} s"]

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=SECONDS_TO_ANSWER).close()
            problem.clear()
        except (OSError, ValueError) as error:
            problem[0] = " ".join(str(error).split())[:100]

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SECONDS_TO_ANSWER + 0.5)
    return problem[0] if problem else None

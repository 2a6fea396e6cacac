"""Bytes and bytes per second, read from text and written as text."""

import re

from megabatch.errors import MegabatchError

GIB, GB = 2**30, 10**9
FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": GB, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": GIB, "ti": 2**40}
SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+) *([kmgt]i?|)b", re.IGNORECASE)
RATE = re.compile(r"(\d+(?:\.\d*)?|\.\d+) *([kmgt]i?|)(b|bit|bits)(?:/s|ps)", re.IGNORECASE)


def read_bytes(name: str, text: str) -> int:
    """Read the bytes of "80GiB", "80 GB" or "512MiB". Raises `MegabatchError` for other text and for 0 bytes."""
    match = SIZE.fullmatch(text.strip())
    size = 0 if match is None else int(float(match[1]) * FACTORS[match[2].lower()])
    if size < 1:
        raise MegabatchError(f"{name} is {text!r}; write a size with its unit, 80GiB say")
    return size


def read_rate(name: str, text: str) -> float:
    """Read the bytes per second of "235GB/s", "900 GiB/s" or "400Gbit/s". Raises `MegabatchError` for other text."""
    match = RATE.fullmatch(text.strip())
    rate = 0.0 if match is None else float(match[1]) * FACTORS[match[2].lower()]
    if match is None or rate <= 0:
        raise MegabatchError(f"{name} is {text!r}; write bytes or bits per second with their unit, 235GB/s say")
    return rate if match[3].lower() == "b" else rate / 8


def gib_text(size: float) -> str:
    """Return memory in GiB, or in MiB below a tenth of a GiB."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"


def gb_text(size: float) -> str:
    """Return traffic in GB or MB, the units of links."""
    if size == 0:
        return "0"
    return f"{size / GB:,.1f} GB" if size >= GB / 10 else f"{size / 10**6:,.1f} MB"

"""Sizes: bytes and bytes per second, as a command line writes them and as a person reads them."""

import re

from megabatch.errors import MegabatchError

GIB, GB = 2**30, 10**9
FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": GB, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": GIB, "ti": 2**40}
SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+) *([kmgt]i?|)b", re.IGNORECASE)
RATE = re.compile(r"(\d+(?:\.\d*)?|\.\d+) *([kmgt]i?|)(b|bit|bits)(?:/s|ps)", re.IGNORECASE)


def read_bytes(name: str, text: str) -> int:
    """Bytes of "80GiB", "80 GB" or "512MiB". Raises `MegabatchError` for any other text, and for no bytes at all."""
    found = SIZE.fullmatch(text.strip())
    size = 0 if found is None else int(float(found[1]) * FACTORS[found[2].lower()])
    if size < 1:
        raise MegabatchError(f"{name} is {text!r}; write a size with its unit, 80GiB say")
    return size


def read_rate(name: str, text: str) -> float:
    """Bytes per second of "235GB/s", "900 GiB/s" or "400Gbit/s". Raises `MegabatchError` for any other text."""
    found = RATE.fullmatch(text.strip())
    rate = 0.0 if found is None else float(found[1]) * FACTORS[found[2].lower()]
    if found is None or rate <= 0:
        raise MegabatchError(f"{name} is {text!r}; write bytes or bits per second with their unit, 235GB/s say")
    return rate if found[3].lower() == "b" else rate / 8


def gib_text(size: float) -> str:
    """Memory, to a tenth of a GiB; less than that as MiB."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"


def gb_text(size: float) -> str:
    """Traffic, in the units of links."""
    if size == 0:
        return "0"
    return f"{size / GB:,.1f} GB" if size >= GB / 10 else f"{size / 10**6:,.1f} MB"

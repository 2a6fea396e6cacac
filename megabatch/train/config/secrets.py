"""Secrets: tokens, keys and passwords of a recipe, which no file of a run and no tracker gets."""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from megabatch.errors import MegabatchError

MASK = "(masked)"
WORDS = {  # the last word of a secret's key
    "token", "key", "apikey", "secret", "password", "passwd", "pwd", "passphrase", "credential", "credentials", "auth",
    "authorization",
}  # fmt: skip
ADDRESS = re.compile(  # user:password@ of an address, token@, and ?token=
    r"(://[^/@\s:]*:)[^/\s]+(?=@)|(://)[^/@\s:]{16,}(?=@)"
    r"|([?&][\w.-]*(?:token|key|secret|password|credential|signature|sig)=)[^&#\s]+",
    re.IGNORECASE,
)
OVERRIDE = re.compile(r"--([\w.-]+)=(.*)", re.DOTALL)


def is_secret(key: str) -> bool:
    """Return True for a key such as hf_token, apiKey or password."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", key)
    return bool(words) and words[-1].lower() in WORDS


def mask(value: Any, key: str = "") -> Any:
    """Return a table, a list or a text with its secrets masked. Special tokens such as <pad> are none."""
    if isinstance(value, Mapping):
        inner = cast(Mapping[str, Any], value).items()
        return {name: mask(part, key if is_secret(key) else str(name)) for name, part in inner}
    if isinstance(value, list | tuple):
        return [mask(part, key) for part in cast(Sequence[Any], value)]
    if not isinstance(value, str) or not value:
        return value
    if is_secret(key) and not value.startswith(("<", "[")):
        return MASK
    return ADDRESS.sub(lambda found: f"{found[1] or found[2] or found[3]}{MASK}", value)


def mask_command(arguments: Sequence[str]) -> list[str]:
    """Return a command line with its secrets masked, written --key=value or --key value."""
    masked, before = list[str](), ""
    for argument in arguments:
        found = OVERRIDE.fullmatch(argument)
        masked.append(f"--{found[1]}={mask_text(found[2], found[1])}" if found else mask_text(argument, before))
        before = argument[2:] if argument.startswith("--") and found is None else ""
    return masked


def mask_text(text: str, key: str) -> str:
    """Return the text of a value with its secrets masked, also those of a table such as {token = "..."}."""
    with suppress(tomllib.TOMLDecodeError):
        value = tomllib.loads(f"value = {text}")["value"]
        return text if mask(value, key) == value else json.dumps(mask(value, key), default=str)
    return str(mask(text, key))


def check_unmasked(value: Any, place: str, key: str = "") -> None:
    """Raise for a secret of a run's recipe that was masked there, and was not given again."""
    if isinstance(value, Mapping):
        for name, part in cast(Mapping[str, Any], value).items():
            check_unmasked(part, place, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for part in cast(Sequence[Any], value):
            check_unmasked(part, place, key)
    elif isinstance(value, str) and MASK in value:
        raise MegabatchError(f"{key} is a secret that {place} does not hold; give it again with --{key}=VALUE")

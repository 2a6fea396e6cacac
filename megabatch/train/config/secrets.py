"""Secrets: tokens, keys and passwords of a recipe, which no file of a run and no tracker gets."""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from megabatch.errors import MegabatchError

MASK = "(masked)"
# Last words of a secret's key, or ends of it, as in authtoken.
WORDS = {
    "token", "apikey", "secret", "password", "passwd", "passphrase", "passcode", "credential", "bearer", "cookie",
}  # fmt: skip
# Words that end no other word.
SHORT_WORDS = {"key", "pwd", "pw", "auth", "authorization", "dsn", "jwt", "otp"}
# A number under the plural of these words is a count. Several numbers are ids.
COUNTED = {"token", "key"}
# Words before COUNTED whose numbers are secret in the plural, too.
OWNERS = {
    "api", "access", "auth", "hf", "hub", "secret", "private", "session", "refresh", "bearer", "service", "user",
}  # fmt: skip
# Words before "token" with which a number is its id.
SPECIAL = {"pad", "bos", "eos", "unk", "sep", "cls", "mask", "image", "audio", "video"}
# First words of keys with true or false.
FLAGS = {"use", "has", "is", "add"}
# First words of keys with a number of tokens or keys.
COUNTS = {"num", "max", "min", "n"}
# Last words behind that of a secret, as in secret_value.
HOLDERS = {"value", "string"}
# Texts that stand for the lack of a value.
NO_SECRETS = ("auto", "none")
# The part user:password@ of an address, token@, ?token=, and texts of a known form.
ADDRESS = re.compile(
    r"(://[^/@\s:]*:)[^/\s]+(?=@)|(://)[^/@\s:]{16,}(?=@)"
    r"|([?&;][\w.-]*(?:token|key|secret|password|pwd|credential|signature|sig)=)[^&#;\s]+"
    r"|(\bbearer\s+)[\w.~+/=-]{8,}"
    r"|\b(?:hf_|gh[opsu]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA)[\w-]{16,}",
    re.IGNORECASE,
)
OVERRIDE = re.compile(r"--([\w.-]+)=(.*)", re.DOTALL)


def words_of(key: str) -> list[str]:
    """Return the words of a key such as hf_token, apiKey or HFToken, in lower case."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", key)]
    return words[:-1] if len(words) > 1 and words[-1] in HOLDERS else words


def is_secret(key: str) -> bool:
    """Return True for a key such as hf_token, apiKeys or password."""
    last = ["", *words_of(key)][-1]
    endings = (last, last.removesuffix("s"))
    return any(word in SHORT_WORDS or word.endswith(tuple(WORDS)) for word in endings)


def is_number_of(key: str, value: Any) -> bool:
    """Return True for a number that its key tells to be a count, an id or a flag: max_tokens, pad_token, use_auth."""
    if not isinstance(value, int | float):
        return False
    *before, last = words_of(key)
    first, owner = (before[0], before[-1]) if before else ("", "")
    if isinstance(value, bool):
        return first in FLAGS
    if last.removesuffix("s") not in COUNTED:
        return False
    return owner in SPECIAL or first in COUNTS or (last.endswith("s") and owner not in OWNERS)


def mask(value: Any, key: str = "") -> Any:
    """Return a table, a list or a value with its secrets masked. Special tokens such as <pad> are none."""
    if isinstance(value, Mapping):
        inner = cast(Mapping[str, Any], value).items()
        return {name: mask(part, key if is_secret(key) else str(name)) for name, part in inner}
    if isinstance(value, list | tuple):
        return [mask(part, key) for part in cast(Sequence[Any], value)]
    if is_secret(key):
        is_shown = value is None or value in ("", *NO_SECRETS) or is_number_of(key, value)
        is_special = isinstance(value, str) and value.startswith(("<", "["))
        return value if is_shown or is_special else MASK
    if not isinstance(value, str):
        return value
    return ADDRESS.sub(lambda match: f"{match[1] or match[2] or match[3] or match[4] or ''}{MASK}", value)


def mask_command(arguments: Sequence[str]) -> list[str]:
    """Return a command line with its secrets masked, written --key=value or --key value."""
    masked, before = list[str](), ""
    for argument in arguments:
        match = OVERRIDE.fullmatch(argument)
        masked.append(f"--{match[1]}={mask_text(match[2], match[1])}" if match else mask_text(argument, before))
        before = argument[2:] if argument.startswith("--") and match is None else ""
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

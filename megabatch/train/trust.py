"""Trust: a function that a recipe names runs without a question only if nobody but you can have named and written it.

`check_trust` is the rule of every command. A run's recipe is sealed with a key that only you can read, so that a run's
folder from elsewhere is no recipe of yours.
"""

import grp
import hashlib
import hmac
import os
import pwd
import secrets
import stat
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from megabatch.errors import MegabatchError
from megabatch.train.config.keys import known_keys
from megabatch.train.config.recipe import Layer, read_overrides, read_recipe
from megabatch.train.config.sections import FUNCTION

# Functions of these modules take no command and no path to run.
OURS = ("megabatch.losses", "megabatch.train.classification")
# The last line of a run's recipe.
SEAL = "# sealed by megabatch: "


def check_trust(path: Path, arguments: Sequence[str] = (), *, is_run: bool) -> None:
    """Raise `MegabatchError` if a recipe names a function that somebody else may have named or written.

    Args:
        path: The recipe, or a run's config.toml.
        arguments: Overrides of the command line. You have typed these, so their functions need no trust.
        is_run: The recipe is that of a run's folder, which you have named instead of a recipe.
    """
    typed = dict(functions_of(read_overrides(list(arguments))))
    for key, name in functions_of(read_recipe(path)):
        if key not in typed and (reason := reason_to_ask(name.rpartition(":")[0], path, is_run=is_run)):
            raise MegabatchError(f"{path} names {name!r} as {key}, {reason}; read it, and add --trust to run it")


def functions_of(recipe: Layer) -> Iterator[tuple[str, str]]:
    """Yield the key and the name of each function of a recipe that is not megabatch's own."""
    for key, kind in known_keys().items():
        section, _, last = key.partition(".")
        value: Any = recipe.get(section, {}).get(last) if FUNCTION in str(kind) else None
        for name in value if isinstance(value, list) else [value] if value else []:
            if str(name).rpartition(":")[0] not in OURS:
                yield key, str(name)


def reason_to_ask(place: str, recipe: Path, *, is_run: bool) -> str:
    """Return why a module or a file that a recipe names may be somebody else's; "" if it is yours."""
    file = Path(place) if place.endswith(".py") else local_file(place)
    if is_run and not is_sealed(recipe.read_bytes()):
        return "and you have not started this run on this machine"
    folders = (Path.cwd().resolve(), recipe.parent.resolve())
    if not is_run and (file is None or not any(file.resolve().is_relative_to(folder) for folder in folders)):
        return "which is neither below the working folder nor below the recipe's"
    paths = [path for path in (recipe, file) if path is not None and path.exists()]
    return next((f"and {reason}" for path in paths if (reason := open_to_others(path))), "")


def local_file(module: str) -> Path | None:
    """Return the file of a module below the working folder; None for one that is installed."""
    top, folder = module.partition(".")[0], Path.cwd()
    elsewhere = [path for path in sys.path if Path(path or ".").resolve() != folder]
    if top in sys.stdlib_module_names or PathFinder.find_spec(top, elsewhere) is not None:
        return None
    path = folder.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def open_to_others(file: Path) -> str:
    """Return why somebody else may have written a file or what stands beside it; "" if nobody can."""
    for path in (file.resolve(), file.resolve().parent):
        status = path.stat()
        if status.st_uid not in (os.geteuid(), 0):
            return f"{path} belongs to another user"
        if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
            continue
        if status.st_mode & stat.S_IWOTH:
            return f"everybody may write to {path}"
        if status.st_mode & stat.S_IWGRP and not is_group_of_one(status.st_gid):
            return f"the group {status.st_gid} may write to {path} (chmod g-w takes that away)"
        if has_access_list(path):
            return f"{path} has an access list, by which others may write to it (setfacl -b takes it away)"
    return ""


def is_group_of_one(number: int) -> bool:
    """Return True for your primary group if nobody else is in it, as most systems make one for each user."""
    try:
        you, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    if number != you.pw_gid:
        return False
    members = {user.pw_name for user in pwd.getpwall() if user.pw_gid == number}
    return members | {*group.gr_mem} <= {you.pw_name}


def has_access_list(path: Path) -> bool:
    """Return True if named users or groups may write to a file, which its mode shows as rights of its group."""
    if not path.stat().st_mode & stat.S_IWGRP or not hasattr(os, "listxattr"):
        return False
    try:
        return "system.posix_acl_access" in os.listxattr(path)
    except OSError:
        return False


def sealed(text: str) -> str:
    """Return the text of a run's recipe, signed with your key if it names functions that are not megabatch's."""
    key = secret_key(create=True) if any(functions_of(tomllib.loads(text))) else None
    return text if key is None else f"{text}{SEAL}{hmac.new(key, text.encode(), hashlib.sha256).hexdigest()}\n"


def is_sealed(content: bytes) -> bool:
    """Return True if you, on this machine, have sealed it."""
    text, mark, seal = content.rpartition(SEAL.encode())
    key = secret_key(create=False)
    if not mark or key is None:
        return False
    return hmac.compare_digest(hmac.new(key, text, hashlib.sha256).hexdigest().encode(), seal.strip())


def secret_key(*, create: bool) -> bytes | None:
    """Return your key, ~/.local/state/megabatch/key; None where there is none and none can be made."""
    try:
        home = os.environ.get("XDG_STATE_HOME")
        path = (Path(home) if home else Path.home() / ".local" / "state") / "megabatch" / "key"
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            new = path.with_name(secrets.token_hex(8))
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
            with suppress(FileExistsError):
                # One process of several makes the file; it is whole or not there.
                os.link(new, path)
            new.unlink()
        return path.read_bytes() or None
    except (OSError, RuntimeError):
        return None

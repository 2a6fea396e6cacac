"""An environment that has a wheel, and of what is installed here only the packages that the wheel says it needs."""

import email
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def needed(requirements: list[str], extras: set[str], found: dict[str, Distribution]) -> dict[str, Distribution]:
    """The distributions that requirements name, and theirs, by their names."""
    for requirement in map(Requirement, requirements):
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            continue
        try:
            named = distribution(requirement.name)
        except PackageNotFoundError:  # what runs here without it runs there too
            continue
        assert requirement.specifier.contains(named.version, prereleases=True), requirement
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name not in found or requirement.extras:
            found[name] = named
            needed(named.requires or [], requirement.extras, found)
    return found


def places(named: Distribution) -> Iterator[Path]:
    """The names of a distribution at the top of site-packages."""
    folder = Path(str(named.locate_file(""))).resolve()
    tops = {file.parts[0] for file in named.files or () if file.parts[0] not in ("..", "__pycache__")}
    return (folder / top for top in sorted(tops) if (folder / top).exists())


def environment(folder: Path, wheel: Path, extras: set[str]) -> Path:
    """The interpreter of a new virtual environment with the wheel and what it needs with the extras."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        requirements = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or []
    for named in needed(requirements, extras, {}).values():
        for place in places(named):
            if not (site / place.name).exists():
                (site / place.name).symlink_to(place)
    return folder / "bin" / "python"

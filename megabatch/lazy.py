"""Import the public names of a package when they are first asked for (PEP 562).

An import of one module of a chapter runs the chapter's ``__init__``. If that imported every public name, each import
would pay for all of them: torch takes seconds.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def export_lazily(
    package: str, homes: Mapping[str, str], removed: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package.

    ``__getattr__`` also finds the modules of the package, so that ``megabatch.wrappers`` needs no import of its own. It
    raises `AttributeError` for any other name.

    Args:
        package: Name of the package. ``__dir__`` lists what its ``__all__`` does.
        homes: Module of each public name, relative to the package, or its full name.
        removed: What to use instead of each public name that the last version had: `PlanError` says it.
    """
    namespace = vars(sys.modules[package])

    def find_name(name: str) -> object:
        if removed is not None and name in removed:
            from megabatch.errors import PlanError  # a chapter below this one

            raise PlanError(f"{package}.{name} is removed; {removed[name]}")
        missing = AttributeError(f"module {package!r} has no attribute {name!r}")
        if name.startswith("_"):
            raise missing
        home = homes.get(name, name)
        module = home if home.startswith("megabatch.") else f"{package}.{home}"
        try:
            loaded = import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise missing from None
        namespace[name] = getattr(loaded, name) if name in homes else loaded  # the next access comes here no more
        return namespace[name]

    def list_names() -> list[str]:
        return sorted({*namespace["__all__"], *(name for name in namespace if name.startswith("__"))})

    return find_name, list_names

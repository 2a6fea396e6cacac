"""The limit that fits, the cost of a microbatch, and few shapes; loaded only for "auto", "measure" and ``shapes``."""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.autotune.memory import check_measurable as check_measurable
    from megabatch.autotune.memory import device_text as device_text
    from megabatch.autotune.memory import free_on as free_on
    from megabatch.autotune.snapshot import ModuleSnapshot as ModuleSnapshot
else:
    _HOME = {  # public name → its module
        "ModuleSnapshot": "snapshot",
        "check_measurable": "memory",
        "device_text": "memory",
        "free_on": "memory",
    }
    _REMOVED = {  # public name of the last version → what to use instead
        "PolicyMemory": "state sync=, or plan it with megabatch.simulate.simulate",
        "measure_policy": "state sync=, or plan it with megabatch.simulate.simulate",
    }
    __all__ = list(_HOME)
    __getattr__, __dir__ = export_lazily(__name__, _HOME, _REMOVED)

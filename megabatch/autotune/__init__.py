"""The limit that fits, the cost of a microbatch, and few shapes; loaded only for "auto", "measure" and ``shapes``."""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.autotune.memory import check_measurable as check_measurable
    from megabatch.autotune.memory import device_text as device_text
    from megabatch.autotune.memory import free_on as free_on
    from megabatch.autotune.snapshot import ModuleSnapshot as ModuleSnapshot
    from megabatch.autotune.tuner import PolicyMemory as PolicyMemory
    from megabatch.autotune.tuner import measure_policy as measure_policy
else:
    _HOME = {  # public name → its module
        "ModuleSnapshot": "snapshot",
        "PolicyMemory": "tuner",
        "check_measurable": "memory",
        "device_text": "memory",
        "free_on": "memory",
        "measure_policy": "tuner",
    }
    __all__ = list(_HOME)
    __getattr__, __dir__ = export_lazily(__name__, _HOME)

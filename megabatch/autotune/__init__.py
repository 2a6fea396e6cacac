"""Measures microbatches to choose a limit that fits in memory; loaded only when a limit is "auto"."""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.autotune.memory import check_measurable as check_measurable
    from megabatch.autotune.memory import device_text as device_text
    from megabatch.autotune.memory import free_on as free_on
    from megabatch.autotune.policy_memory import PolicyMemory as PolicyMemory
    from megabatch.autotune.policy_memory import measure_policy as measure_policy
    from megabatch.autotune.snapshot import ModuleSnapshot as ModuleSnapshot
else:
    _HOME = {  # public name → its module
        "ModuleSnapshot": "snapshot",
        "PolicyMemory": "policy_memory",
        "check_measurable": "memory",
        "device_text": "memory",
        "free_on": "memory",
        "measure_policy": "policy_memory",
    }
    __all__ = list(_HOME)
    __getattr__, __dir__ = export_lazily(__name__, _HOME)

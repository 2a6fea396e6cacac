"""Pipeline parallelism: a model in stages, whose microbatches one of torch's schedules runs together."""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.pipeline.order import count_held as count_held
    from megabatch.pipeline.order import estimate_bubble as estimate_bubble
    from megabatch.pipeline.run import evaluate as evaluate
    from megabatch.pipeline.schedule_steps import plan_steps as plan_steps
    from megabatch.pipeline.stages import SCHEDULES as SCHEDULES
    from megabatch.pipeline.stages import Pipeline as Pipeline
else:
    _HOME = {  # public name → its module
        "SCHEDULES": "stages",
        "Pipeline": "stages",
        "count_held": "order",
        "estimate_bubble": "order",
        "evaluate": "run",
        "plan_steps": "schedule_steps",
    }
    __all__ = list(_HOME)
    __getattr__, __dir__ = export_lazily(__name__, _HOME)

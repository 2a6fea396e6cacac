"""Config: every key of a recipe, its type, its default and what it does.

The docstring below a key is what `megabatch train --help` shows. What follows from other keys (gradient accumulation
steps, updates per epoch) is derived and printed, and has no key. A value "module:function" or "file.py:function" names
a function of the user's own; `own.py` says what each is called with.
"""

from megabatch.train.config.advice_section import AdviceConfig
from megabatch.train.config.data_section import DataConfig, SourceConfig
from megabatch.train.config.model_section import ModelConfig
from megabatch.train.config.parallel_section import ParallelConfig
from megabatch.train.config.run_section import HELD_OUT, CheckpointConfig, EvalConfig, RunConfig
from megabatch.train.config.section import Options, Section
from megabatch.train.config.tracking_section import TrackingConfig
from megabatch.train.config.update_section import LossConfig, OptimConfig, UpdateConfig

__all__ = [
    "HELD_OUT", "AdviceConfig", "CheckpointConfig", "Config", "DataConfig", "EvalConfig", "LossConfig", "ModelConfig",
    "OptimConfig", "Options", "ParallelConfig", "RunConfig", "Section", "SourceConfig", "TrackingConfig",
    "UpdateConfig",
]  # fmt: skip


class Config(Section):
    """A whole recipe."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    loss: LossConfig = LossConfig()
    update: UpdateConfig
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    run: RunConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    advice: AdviceConfig = AdviceConfig()
    tracking: TrackingConfig = TrackingConfig()

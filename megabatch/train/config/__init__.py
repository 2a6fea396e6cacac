"""A recipe: its keys, their values, and what follows from them."""

from megabatch.train.config.sections import (
    HELD_OUT,
    OWN,
    AdviceConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    ExpertsConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    Options,
    ParallelConfig,
    RunConfig,
    Section,
    SourceConfig,
    TrackingConfig,
    UpdateConfig,
)

__all__ = [
    "HELD_OUT", "OWN", "AdviceConfig", "CheckpointConfig", "Config", "DataConfig", "EvalConfig", "ExpertsConfig",
    "LossConfig", "ModelConfig", "OptimConfig", "Options", "ParallelConfig", "RunConfig", "Section", "SourceConfig",
    "TrackingConfig", "UpdateConfig",
]  # fmt: skip

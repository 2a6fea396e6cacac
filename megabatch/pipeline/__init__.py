"""Pipeline parallelism: a model in stages, whose microbatches one of torch's schedules runs together."""

from megabatch.pipeline.run import evaluate as evaluate
from megabatch.pipeline.stages import Pipeline as Pipeline

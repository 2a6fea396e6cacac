"""What is evaluated, how long a run lasts, and how it is saved."""

from typing import Annotated, Literal

from pydantic import Field

from megabatch.train.config.data_section import SourceConfig
from megabatch.train.config.section import Count, Function, Positive, Section, Step

HELD_OUT = "held-out"  # the name of the set that is taken off the training data


class EvalConfig(Section):
    """Losses on samples that are never trained on."""

    every: Count | None = 10
    """Updates between two evaluations; None: only at the start and at the end."""
    num_samples: Step = 64
    """Samples that are held out, at most a tenth of each source; of a stream its first ones. 0: none. The set's name is
    "held-out"."""
    sets: dict[str, SourceConfig] = {}
    """Further named sets: [eval.sets.code] path = ..."""
    watch: str | None = None
    """The set whose loss says which checkpoint is best and when to stop early; None: "held-out", or the first."""
    patience: Count | None = None
    """Stop after so many evaluations in which that loss has not fallen below its best; None: never."""
    metrics: Function | None = None
    """"module:function": (model, microbatch) -> {name: (total, weight)}, summed exactly over every set."""
    function: Function | None = None
    """"module:function": (event) -> {name: number}, a whole evaluation of one's own, run on every rank."""
    completion_tokens: Step | None = None
    """Tokens that the model writes after a held-out prompt at the end of a run, to be read. 0: it writes none. None:
    200, or 32 where a forward takes long."""


class RunConfig(Section):
    """Where a run is written, how long it lasts, how it goes on."""

    folder: Annotated[str, Field(min_length=1)]
    """Folder of everything that a run writes. Default: runs/ and the recipe's name."""
    max_steps: Count | None = None
    """Stop after this many updates; None: when the data has been seen max_epochs times."""
    max_epochs: Count = 1
    """Passes over the data."""
    save_every: Count | None = None
    """Updates between two checkpoints; None: one at the end."""
    keep_last: Count | None = None
    """Keep only the last so many checkpoints; None: all."""
    keep_best: bool | None = None
    """Write a checkpoint when the loss on eval.watch is the lowest so far, and keep it. None: with eval.patience."""
    resume: bool = False
    """Go on from the latest checkpoint in the folder, as if never stopped; begin where there is none. Processes that
    torchrun starts again do so without being told."""
    answer_within_seconds: Positive | None = 60.0
    """A rank whose process has not answered for so long has stopped: it is named, and all end. None: nobody looks."""
    stopped_status: Annotated[int, Field(ge=0, le=255)] = 0
    """Exit status of a run that a signal has stopped before its end, when it is saved. Not 0, 143 say, where only what
    has failed is started again, as Kubernetes does."""
    seed: Step = 0
    """Of weights, order of samples, held-out set and dropout."""
    device: Literal["cpu", "cuda"] | None = None
    """None: cuda if there is one."""
    tensorboard: bool = True
    """Write the metrics for TensorBoard too."""
    manifest: bool = False
    """Write manifest.jsonl, a line an update of what it was made of and came to; see `megabatch report --compare`."""
    profile_steps: list[Count] = []
    """Updates of which a profiler's trace is written."""
    callbacks: list[Function] = []
    """Each "module:name" of a megabatch.train.Callback, or of a function that returns one, called without arguments."""
    after_update: Function | None = None
    """"module:function": (event) -> None, called on every rank after each update."""
    after_evaluation: Function | None = None
    """"module:function": (event) -> None, called on every rank after each evaluation."""


class CheckpointConfig(Section):
    """How a run is saved."""

    background: bool | None = None
    """Go on training while a checkpoint is written; that takes a copy of the state in host memory. None: where the
    model is on a GPU; on the CPU the copy would take the memory that the model needs."""
    partial: bool = False
    """Let a signal stop a run inside an update, which is saved open and goes on there, exactly, on as many ranks. For
    updates of minutes: gradients are reduced every eight microbatches, and a signal is looked for."""

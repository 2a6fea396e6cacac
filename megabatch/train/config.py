"""Config: every key of a recipe, its type, its default and what it does.

The docstring below a key is what `megabatch train --help` shows. What follows from other keys (gradient accumulation
steps, updates per epoch) is derived and printed, and has no key.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, lt=2**63)]  # torch's and numpy's whole numbers end there
Step = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A table of the recipe; an unknown key, or a value of another type, is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    """A causal language model of transformers, built from its config with fresh weights."""

    config: dict[str, object]
    """What transformers' AutoConfig takes: model_type = "llama", hidden_size = 128, ..."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of the parameters."""


class DataConfig(Section):
    """Pairs of a prompt, which is not trained on, and a response, as byte tokens."""

    source: Literal["stdlib", "jsonl"] = "stdlib"
    """stdlib: the functions of Python's own standard library; jsonl: a file with one object a line."""
    path: str | None = None
    """The file of source = "jsonl"."""
    prompt_field: str = "prompt"
    """Field of a jsonl object that holds the prompt."""
    response_field: str = "response"
    """Field of a jsonl object that holds the response."""
    max_samples: Count | None = None
    """Read no more samples than this; None: all."""
    max_sample_tokens: Count | None = None
    """Leave out samples that are longer; None: a sample that does not fit into a microbatch is an error."""


class UpdateConfig(Section):
    """What one optimizer step consumes, and how much of it may go through the model at once."""

    global_batch_size: Count
    """Samples of an update, over all ranks. The dial: it alone decides what is learned from an update."""
    micro_batch_size: Count | None = None
    """Samples of one forward on one rank. Give this or max_microbatch_tokens."""
    max_microbatch_tokens: Count | None = None
    """Tokens of one forward on one rank, padding included. Give this or micro_batch_size."""
    sync: Literal["auto", "last", "every"] = "auto"
    """When ranks sum their gradients: with the last microbatch, with every one, or as the wrapper does it cheapest."""
    tail: Literal["step", "drop", "carry"] = "step"
    """A last short update of an epoch: step it exactly, drop its samples, or fill it up from the next epoch."""
    max_norm: Positive | None = 1.0
    """Clip the gradient to this norm; None: never."""


class OptimConfig(Section):
    """AdamW and its learning rate."""

    lr: Rate = 1e-3
    """Peak learning rate."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    weight_decay: Rate = 0.1
    """Weight decay of matrices; vectors (norms, biases) have none."""
    warmup_steps: Step = 0
    """Updates over which the learning rate rises from zero."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After the warmup: fall to a tenth along a cosine, or stay."""
    decay_steps: Count | None = None
    """Updates until the cosine is down; None: those of max_epochs. Not max_steps: a run that stops early and is
    resumed is the same run."""


class EvalConfig(Section):
    """Loss on held-out samples that are never trained on."""

    every: Count | None = 10
    """Updates between two evaluations; None: only at the start and at the end."""
    num_samples: Step = 64
    """Samples held out, at most a tenth of the data."""


class RunConfig(Section):
    """Where a run is written, how long it lasts, how it goes on."""

    folder: Annotated[str, Field(min_length=1)]
    """Folder of metrics.jsonl, checkpoints/ and report.png. Default: runs/ and the recipe's name."""
    max_steps: Count | None = None
    """Stop after this many updates; None: when the data has been seen max_epochs times."""
    max_epochs: Count = 1
    """Passes over the data."""
    save_every: Count | None = None
    """Updates between two checkpoints; None: one at the end."""
    resume: bool = False
    """Go on from the latest checkpoint in the folder, as if never stopped."""
    seed: Step = 0
    """Of weights, order of samples, held-out set and dropout."""
    device: Literal["cpu", "cuda"] | None = None
    """None: cuda if there is one."""


class ParallelConfig(Section):
    """How the model lies on several processes."""

    wrapper: Literal["ddp", "fsdp2"] | None = None
    """None: a plain model on one process; on several ddp below 1e9 parameters, else fsdp2."""


class Config(Section):
    """A whole recipe."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    update: UpdateConfig
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    run: RunConfig
    parallel: ParallelConfig = ParallelConfig()

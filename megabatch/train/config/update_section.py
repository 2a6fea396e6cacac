"""What is minimised, what an update is, and what steps it."""

from typing import Annotated, Literal

from pydantic import Field

from megabatch.train.config.section import Beta, Count, Function, Options, Positive, Rate, Section, Share, Step


class LossConfig(Section):
    """What is minimised."""

    function: Function = "megabatch.losses:next_token"
    """(model, microbatch) -> (total, weight), or several named ones; see megabatch.loss. Or a megabatch.JointLoss."""
    router_loss: Rate | Literal["auto", "off"] = "auto"
    """Coefficient of a router loss in a mixture of experts: the mean over sequences of what transformers adds for each.
    "auto": router_aux_loss_coef of the model's config where that has output_router_logits = true, else none. "off":
    none."""


class UpdateConfig(Section):
    """What one optimizer step consumes, and how much of it may go through the model at once."""

    global_batch_size: Count | list[list[int | str]]
    """Required. Samples of an update, over all ranks. The dial: it alone decides what is learned from an update. Or a
    schedule of it, [[0, 64], ["50M tokens", 256]]: a point and the samples of an update from there on. Points are
    updates, or "20k samples" or "1.5B tokens", handed out before the update."""
    micro_batch_size: Count | None = None
    """Samples of one forward on one rank. This or max_microbatch_tokens."""
    max_microbatch_tokens: Count | Literal["auto"] | None = None
    """Tokens of one forward on one rank, padding included. "auto", or neither: the most that fits, measured before the
    first update and kept with the checkpoint."""
    memory: str | None = None
    """What "auto" may use of each rank's device: "20GiB". None: nine tenths of what is free."""
    one_row: bool = False
    """Lay the samples of a microbatch in one row, one after another, so that nothing is padded: with model.attention =
    "flash_attention_2" or "flex_attention". Others compute the whole row against itself, which takes longer than
    padding does."""
    sync: Literal["auto", "last", "every", "replica_last"] = "auto"
    """When ranks sum their gradients: with the last microbatch, with every one, across replicas with the last one only
    (hsdp). "auto": of what fits in memory that which sends least, chosen before the first update and kept with the
    checkpoint."""
    accumulate_dtype: Literal["float32"] | None = None
    """Add gradients in it where model.dtype is "bfloat16", in which a sum of many microbatches stops growing. None: in
    model.dtype."""
    tail: Literal["step", "drop", "carry"] = "step"
    """A last short update of an epoch: step it exactly, drop its samples, or fill it up from the next epoch."""
    max_norm: Positive | None = 1.0
    """Clip the gradient to this norm; None: never."""
    on_nonfinite: Literal["raise", "skip_update", "skip_microbatch"] = "raise"
    """An update whose loss or gradient is not finite: end the run, skip the update, or make it without the samples at
    fault. What is left out is written to skipped.jsonl."""


class OptimConfig(Section):
    """The optimizer and its learning rate. Everything counts updates."""

    name: str = "AdamW"
    """An optimizer of torch.optim: "AdamW", "SGD", "Adafactor", ..."""
    function: Function | None = None
    """"module:function" that makes the optimizer in place of name; called with the parameter groups, lr and options."""
    options: Options = {}
    """Further keyword arguments of the optimizer: momentum = 0.9, fused = false, ..."""
    in_backward: bool = False
    """Step each parameter in an update's last backward, as soon as its gradient is complete, for less memory. For one
    process and FSDP2, with update.max_norm = "none"."""
    lr: Rate = 1e-3
    """Peak learning rate."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """Decay of the two moments, of an optimizer that has them."""
    weight_decay: Rate = 0.1
    """Weight decay of matrices; vectors (norms, biases) have none."""
    warmup_steps: Step = 0
    """Updates over which the learning rate rises from zero."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """After the warmup: fall along a cosine or a line, stay, or stay and fall at the end (wsd)."""
    decay_steps: Count | None = None
    """Updates until the learning rate is down; None: those of max_epochs. Not max_steps: a run that stops early and is
    resumed is the same run."""
    cooldown_steps: Count | None = None
    """Updates of wsd's fall; None: a tenth of decay_steps."""
    final_lr_share: Share = 0.1
    """Share of the peak learning rate at which a schedule ends."""
    lr_follows_batch: Literal["sqrt"] | None = None
    """With a schedule of update.global_batch_size: multiply the learning rate of each update by the square root of its
    size over the schedule's first size, for which optim.lr is then given. None: it stays."""
    ema_decay: Beta | None = None
    """Keep an average of the weights, after each update ema_decay * average + (1 - ema_decay) * weights; it is what is
    evaluated and exported. None: no average."""

"""Every key of a recipe: its type, its default, and the docstring that `megabatch train --help` shows.

A key that follows from others (gradient accumulation steps, updates per epoch) does not exist: it is derived, printed.
A value "module:function" or "file.py:function" names a function of yours; runtime/plugins.py calls it.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# torch's and numpy's whole numbers end there.
Count = Annotated[int, Field(ge=1, lt=2**63)]
Step = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
FUNCTION = r"^[^:]+:[^:]+$"
Function = Annotated[str, Field(pattern=FUNCTION)]
Options = dict[str, object]


class Section(BaseModel):
    """A table of the recipe; an unknown key, or a value of another type, is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    """The model: give one of name, config and function."""

    name: str | None = None
    """A causal language model of the Hugging Face hub, or a folder that save_pretrained has written: its weights."""
    config: Options | None = None
    """Arguments of transformers' AutoConfig: model_type = "llama", hidden_size = 128, ...: fresh weights."""
    function: Function | None = None
    """"module:function" that returns any torch module, or a list or mapping of several, which the loss gets in its
    place; called with model.options."""
    options: Options = {}
    """Keyword arguments of model.function."""
    tokenizer: str | None = None
    """A tokenizer of the hub or a folder; "bytes": a token a byte. None: that of model.name, else bytes."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of the parameters. How the optimizer steps bfloat16 ones: optim.master."""
    compute_dtype: Literal["bfloat16"] | None = None
    """Compute in it and keep the parameters in dtype: autocast for plain and ddp, its own policy for fsdp2."""
    attention: str | None = None
    """transformers' name of an attention backend: "sdpa", "eager", "flash_attention_2", "flex_attention", ...
    None: what transformers takes."""
    activation_checkpointing: bool | Literal["selective"] = False
    """Recompute each layer in backward: less memory, more time. "selective" keeps the outputs of attention and of every
    second matrix product: more memory than true, less time."""
    compile: bool = False
    """torch.compile, layer by layer."""
    freeze: list[str] = []
    """Parameters that stay as they are, by patterns as of file names: "*.embed_tokens.*", "model.layers.0.*"."""
    lora: Options | None = None
    """Train adapters on a frozen model, with what peft's LoraConfig takes: r = 8, lora_alpha = 16, target_modules =
    ["q_proj", "v_proj"], lora_dropout = 0.1, ... Checkpoints have the adapters alone. Needs megabatch[peft]."""
    quantize: Literal["nf4", "fp4"] | None = None
    """Keep the linear layers of the base of model.lora in four bits, by bitsandbytes. Needs megabatch[qlora]."""
    double_quantization: bool = True
    """With quantize: keep the scales of its blocks in eight bits, too."""
    keyed_dropout: bool = True
    """Dropout masks of nn.Dropout follow from run.seed, the update, the sample, the layer and the place, so that other
    ranks and another cut make the same updates. false: torch's generator draws them by rank, which is faster. Not with
    compile, update.one_row, update.long_samples, parallel.tp, cp and pp."""
    experts: Options | None = None
    """The balance of a mixture of experts: router_loss, scores ("softmax" or "sigmoid"), bias_rate, by which biases of
    routers move after each update, and bias_name. See docs/experts.md."""


class ExpertsConfig(Section):
    """The table model.experts: the balance of experts."""

    router_loss: Rate | Literal["auto", "off"] = "auto"
    """Coefficient of the router loss; see loss.router_loss."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Scores in the router loss; "sigmoid": divided by their sum, as in DeepSeek-V3."""
    bias_rate: Positive | None = None
    """Move the biases that choose experts by this much after each update, towards an even load. None: they stay."""
    bias_name: str = "e_score_correction_bias"
    """Name of the bias in a router."""


class SourceConfig(Section):
    """Rows of text: a file, files, a folder or a data set of the hub."""

    path: str | list[str] | None = None
    """A file, a glob ("data/*.jsonl"), a list of them, a folder that datasets' save_to_disk wrote, or a hub id."""
    source: Literal["stdlib", "jsonl", "csv", "parquet", "text", "documents", "saved", "hub"] | None = None
    """Kind of path; None: seen by its ending. text (.txt): a line a document; documents (.md, .rst, .py): a file a
    document; stdlib: the functions of Python's own standard library, without path."""
    subset: str | None = None
    """Configuration of a hub data set."""
    split: str = "train"
    """Split of a saved or hub data set."""
    text_field: str | None = None
    """Field of plain text, all of it learned."""
    prompt_field: str | list[str] | None = None
    """Field of a prompt, which is not learned; with response_field. A list of fields is joined by newlines, without
    those that are empty: ["instruction", "input"]."""
    response_field: str | None = None
    """Field of the response to it, which is learned."""
    messages_field: str | None = None
    """Field of a chat, [{role, content}, ...], of which the assistant's turns are learned. None of the four: the field
    messages, prompt and response, or text, whichever the first row has."""
    max_samples: Count | None = None
    """Read no more samples than this; None: all."""
    weight: Positive | None = None
    """In a mixture: its share of an epoch's samples, by weight over the sum of weights."""


class DataConfig(SourceConfig):
    """The training data: one source, or a mixture of them, or a function's samples."""

    mixture: dict[str, SourceConfig] = {}
    """Named sources, in place of path: [data.mixture.code] path = ... weight = 2. Without weights every sample is seen
    once an epoch; with them (all or none) an epoch ends when a source is used up, and the others go on in the next."""
    function: Function | None = None
    """"module:function" that returns samples, or {"train": samples, "a name": samples}; called with data.options."""
    options: Options = {}
    """Keyword arguments of data.function."""
    max_sample_tokens: Count | None = None
    """Leave out longer samples; None: a sample that does not fit into a microbatch is an error."""
    pack_tokens: Count | None = None
    """Pack samples into rows of so many tokens; longer ones are cut. None: a document a sample."""
    broken_rows: Literal["stop", "skip"] = "stop"
    """A row that cannot be read, or has no text in its fields: stop and name it, or skip and count it."""
    streaming: bool = False
    """Read while training, never whole: no cache, no number of updates known beforehand."""
    shuffle_window: Count = 10_000
    """Samples of a stream that are shuffled at a time."""
    num_workers: Step = 0
    """Processes that load samples while the model trains. 0: this one reads the next update while a GPU computes. After
    its first updates a run says if that takes more than 5 % of the time."""
    look_ahead: Step | None = None
    """Load an update's samples when their microbatch comes, so many microbatches ahead, for images and long text. All
    are read first, to be counted; 256 MiB of them are kept, and the others are read again. None: an update is in memory
    whole before it runs."""
    cache: str | None = None
    """Folder of tokenized data; None: megabatch's in the user's cache folder."""


class LossConfig(Section):
    """The loss."""

    function: Function = "megabatch.losses:next_token"
    """(model, microbatch) -> (total, weight), or several named ones; see megabatch.loss. Or a megabatch.JointLoss."""
    router_loss: Rate | Literal["auto", "off"] = "auto"
    """Coefficient of a router loss in a mixture of experts: the mean over sequences of what transformers adds for each.
    "auto": router_aux_loss_coef of the model's config where that has output_router_logits = true, else none. "off":
    none."""


class UpdateConfig(Section):
    """The samples of an optimizer step, and how many of them may go through the model at once."""

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
    """Memory of each rank's device that "auto" may use: "20GiB". None: nine tenths of what is free."""
    one_row: bool = False
    """Lay the samples of a microbatch in one row, one after another, so that nothing is padded: with model.attention =
    "flash_attention_2" or "flex_attention". Others compute the whole row against itself, which takes longer than
    padding does."""
    long_samples: Literal["cut"] | None = None
    """"cut": a sample longer than max_microbatch_tokens, a number, runs in chunks, exactly. The model is a causal one
    of transformers, and the loss sums over tokens (docs/long-samples.md). Held-out samples run whole. None: a longer
    sample is an error."""
    cost: Literal["measure"] | None = None
    """"measure": time the microbatches of updates and split samples by that, under a limit that is a number. The
    gradient is the same, but its last bits follow the clock. A resumed run starts from the checkpoint's cost. None:
    relative costs, and with a limit of "auto" the measured ones."""
    balance: Literal["off", "measured"] = "off"
    """"measured": deal a slow rank less work, by the speeds that the run measures under DistributedDataParallel. The
    samples of an update and its gradient stay the same, but its last bits follow the clock. A resumed run starts from
    the checkpoint's speeds. "off": ranks count as equally fast, and the run says once if "measured" would gain 10 %."""
    shapes: Count | None = None
    """Fill each microbatch up to one of at most so many shapes, samples x tokens, for which model.compile compiles as
    many graphs. They are chosen from the first update's samples and kept with the checkpoint. Padded samples compute
    more tokens. For transformers' models without experts. None: any shape, and a graph for all sizes."""
    sync: Literal["auto", "last", "every", "gather_once", "replica_last"] = "auto"
    """The moment at which ranks sum gradients: with the last microbatch, with every one, across replicas with the last
    one only (hsdp). "gather_once" (fsdp2, hsdp) gathers parameters once per update.
    "auto": the wrapper's own, which keeps least."""
    accumulate_dtype: Literal["float32"] | None = None
    """Add gradients in it where model.dtype is "bfloat16", in which a sum of many microbatches stops growing. None: in
    model.dtype."""
    same_bits: bool = False
    """Give weights, losses and metrics the same bits on any number of data ranks: each update is cut into microbatches
    before ranks share it, and gradients are added in float64."""
    tail: Literal["step", "drop", "carry"] = "carry"
    """The last samples of an epoch, too few for an update: fill it up from the next epoch, step it short, or drop them.
    Every update but those of "step" has global_batch_size samples."""
    max_norm: Positive | None = 1.0
    """Clip the gradient to this norm; None: never."""
    on_nonfinite: Literal["raise", "skip_update"] = "raise"
    """An update whose loss or gradient is not finite: end the run, or skip the update. What is left out is written to
    skipped.jsonl."""


class OptimConfig(Section):
    """The optimizer and its learning rate. Everything counts updates."""

    name: str = "AdamW"
    """An optimizer of torch.optim: "AdamW", "SGD", "Adafactor", ... "Muon" is for the matrices of hidden layers, with
    AdamW for embeddings, the head and vectors."""
    function: Function | None = None
    """"module:function" that makes the optimizer in place of name; called with the parameter groups, lr and options."""
    options: Options = {}
    """Further keyword arguments of the optimizer: momentum = 0.9, fused = false, ..."""
    master: Literal["low_bits", "auto"] | None = "auto"
    """"low_bits": step bfloat16 parameters as float32 ones, by 16 further bits of each weight, with states in float32;
    for an elementwise optimizer. None: weights are rounded after each step, and small steps are lost. "auto": low_bits
    where parameters are bfloat16 and optim.name can have them."""
    state_dtype: Literal["bfloat16"] | None = None
    """With low bits: keep the optimizer's states in it, for 4 bytes a weight less of AdamW's. None: float32."""
    lr: Rate = 1e-3
    """Peak learning rate."""
    adamw_lr: Rate | None = None
    """With Muon: peak learning rate of the parameters that AdamW steps. None: lr, since Muon's steps are scaled to the
    size of AdamW's, unless options.adjust_lr_fn = "original"."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """Decay of the two moments, of an optimizer that has them; with Muon: of its AdamW."""
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


# Name of the set that is taken off the training data.
HELD_OUT = "held-out"
# Name of the set that eval.function returns.
OWN = "own"


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


class RunConfig(Section):
    """Where a run is written, how long it lasts, how it is resumed."""

    folder: Annotated[str, Field(min_length=1)]
    """Folder of everything that a run writes. Default: runs/ and the recipe's name."""
    max_steps: Count | None = None
    """Stop after this many updates; None: when the data has been seen max_epochs times."""
    max_epochs: Count = 1
    """Passes over the data."""
    save_every: Count | None = None
    """Updates between two checkpoints, and one at the end; None: by save_every_minutes."""
    save_every_minutes: Positive | None = 30.0
    """Minutes between two checkpoints where save_every is not set. None: one at the end."""
    keep_last: Count | None = 2
    """Keep only the last so many checkpoints, and the best one of keep_best; None: all."""
    keep_best: bool | None = None
    """Write a checkpoint when the loss on eval.watch is the lowest so far, and keep it. None: with eval.patience."""
    resume: bool = False
    """Go on from the latest checkpoint in the folder, as if never stopped; begin where there is none. Processes that
    torchrun starts again do so without being told."""
    init_from: str | None = None
    """Folder of another run, with whose weights a new run begins: its best checkpoint, else its latest. Optimizer,
    schedule and data begin anew."""
    answer_within_seconds: Positive | None = 60.0
    """A rank whose process has not answered for so long has stopped: it is named, and all end. None: nobody looks."""
    collective_timeout: Positive | None = None
    """Seconds that ranks wait for each other in a message. None: as long as it takes, for answer_within_seconds finds
    who is gone; without that torch's half an hour."""
    stuck_after: Positive | None = None
    """A rank whose update takes so many times the median of the last ones, and no less than answer_within_seconds, in
    your own code or waiting for samples, is stuck: stuck/rank-N.txt has the stacks of its threads, it is named, and all
    end. Evaluations, checkpoints and compilations may take any time. 10, say. None: nobody looks."""
    check_hardware_every: Count | None = None
    """Make the gradient of every so many updates a second time, on other ranks and in another cut, and compare. A
    difference beyond rounding names the rank and ends the run with status 1, before the step. 100, say. None: never."""
    stopped_status: Annotated[int, Field(ge=0, le=255)] = 0
    """Exit status of a run that a signal has stopped before its end, when it is saved. Not 0, 143 say, where only what
    has failed is started again, as Kubernetes does."""
    seed: Step = 0
    """Seed of weights, order of samples, held-out set and dropout."""
    device: Literal["cpu", "cuda"] | None = None
    """None: cuda if there is one."""
    tensorboard: bool = True
    """Write the metrics for TensorBoard too."""
    verbose: bool = False
    """Print the whole plan and a line for each update. false: a short plan; a bar on a terminal, elsewhere up to 100
    lines of updates."""
    profile_steps: list[Count] = []
    """Updates of which a profiler's trace is written."""
    callbacks: list[Function] = []
    """Each "module:name" of a megabatch.train.Callback, or of a function that returns one, called without arguments."""
    after_update: Function | None = None
    """"module:function": (event) -> None, called on every rank after each update."""
    after_evaluation: Function | None = None
    """"module:function": (event) -> None, called on every rank after each evaluation."""


class CheckpointConfig(Section):
    """Checkpoints."""

    background: bool | None = None
    """Go on training while a checkpoint is written; that takes a copy of the state in host memory. None: where the
    model is on a GPU; in host memory the copy would take what the model needs."""


class ParallelConfig(Section):
    """The division of work over processes: there are dp_replicate * dp_shard * cp * tp * pp of them."""

    wrapper: Literal["ddp", "fsdp2", "replicate"] | None = None
    """ddp: a copy of the model on each data rank; fsdp2: shards of it; replicate: copies, which go with tp and cp.
    None: what the degrees ask for; where they leave it open, copies below 1e9 parameters, else shards."""
    dp_replicate: Count | None = None
    """Copies of the model, each with samples of its own. With dp_shard > 1 too: shards within each copy (HSDP). None:
    the processes that the other degrees leave, for a wrapper that copies."""
    dp_shard: Count | None = None
    """Ranks over which fsdp2 shards the model, each with samples of its own. None: the processes that the other degrees
    leave, for fsdp2."""
    reshard_after_forward: bool = True
    """With fsdp2: let go of gathered layers after each forward. false: keep them until their backward, for fewer
    messages and more memory."""
    cpu_offload: bool = False
    """With wrapper = "fsdp2": keep parameters, gradients and optimizer states in host memory, and step there. A layer's
    shard comes to the device when the layer is gathered."""
    cp: Count = 1
    """Ranks over which each sequence is cut (context parallelism); they are given the same samples."""
    tp: Count = 1
    """Ranks over which each matrix is cut (tensor parallelism); they are given the same samples."""
    pp: Count = 1
    """Ranks over which the layers are dealt out (pipeline parallelism); they are given the same samples."""
    ep: Count = 1
    """With fsdp2: ranks over which the experts of each layer are dealt out (expert parallelism), each with samples of
    its own. They are some of the ranks that shard the model, and add none: ep divides dp_shard."""
    replicas: Literal["torchft"] | None = None
    """"torchft": train on replicas that may be lost, stopped and added, each under a torchrun of its own. Updates keep
    their samples and gradients. Needs megabatch[elastic] and a Lighthouse (docs/elastic.md). None: one torchrun."""
    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """With pp: the order in which its ranks run microbatches. Each has one stage of the layers with GPipe and 1F1B, and
    two with any other, unless stages_per_rank is set."""
    stages_per_rank: Count | None = None
    """With Interleaved1F1B, LoopedBFS and InterleavedZeroBubble: stages of each rank. With more stages, ranks idle
    less and send more. None: two."""
    sequence_parallel: bool = False
    """With tp: each of its ranks keeps a stretch of the sequence between matrices, not all of it."""
    loss_parallel: bool = False
    """With tp: logits stay cut by the vocabulary; for losses that are a cross-entropy of them."""


class AdviceConfig(Section):
    """Measurements during the run, to choose the size of updates by."""

    every: Count | None = None
    """Measure the gradient's noise once in so many updates, which is then made in two calls: 20, say. The metrics have
    noise_scale_samples, up to how many samples an update's gradients agree, and the run's end says it. None: never."""


class TrackingConfig(Section):
    """Services that get a run's numbers. Their other settings are their own: WANDB_MODE, MLFLOW_TRACKING_URI, ..."""

    trackers: list[Literal["wandb", "mlflow", "trackio"]] = []
    """Weights & Biases, MLflow, trackio: they are told what TensorBoard is told. A resumed run goes on in its run
    there; a tracker that fails is left out, and the run continues."""
    project: str = "megabatch"
    """wandb's and trackio's project, mlflow's experiment."""
    name: str | None = None
    """The run's name there; None: that of run.folder."""


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

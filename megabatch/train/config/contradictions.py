"""Settings that contradict each other, found before anything is read."""

from collections.abc import Iterable, Iterator
from typing import Any

from megabatch.errors import MegabatchError
from megabatch.train.config import HELD_OUT, OWN, Config, SourceConfig

SOURCE_KEYS = [f"data.{key}" for key in SourceConfig.model_fields if key != "weight"]
TEXT_KEYS = [
    *SOURCE_KEYS,
    *(f"data.{key}" for key in ("mixture", "streaming", "pack_tokens", "max_sample_tokens", "broken_rows")),
]
# A key, the others that do not go with it, and the reason. key=value stands for that value alone.
EXCLUDING = (
    ("model.function", ["model.attention"], "which a model of your own chooses itself"),
    ("model.function", ["model.quantize"], "and a model of your own may read weights other than by its layers"),
    ("model.function", ["parallel.cp"], "and the attention of a model of your own is not cut over ranks"),
    ("model.function", ["parallel.pp"], "and a model of your own is not cut into stages"),
    ("model.lora", ["parallel.tp", "parallel.pp"], "whose sharding plans have no rules for adapters"),
    ("model.quantize", ["model.dtype=float64"], "in which bitsandbytes does not compute"),
    ("model.compute_dtype", ["model.dtype=float64"], "which autocast does not convert"),
    ("model.activation_checkpointing=selective", ["model.compile", "parallel.pp"], "which are not tested together"),
    ("model.compile", ["model.quantize", "parallel.tp", "parallel.pp"], "which are not tested together"),
    ("update.one_row", ["loss.function"], "which may look at samples one by one"),
    ("optim.name=Muon", ["parallel.tp", "parallel.wrapper=fsdp2"], "which cuts the matrices that Muon needs whole"),
    ("update.same_bits", ["parallel.tp", "parallel.cp", "parallel.pp"], "which cuts sums of the model over ranks"),
    ("update.same_bits", ["update.max_microbatch_tokens=auto"], "which depends on the machine's memory"),
    ("update.same_bits", ["update.one_row"], "whose rows depend on the ranks"),
    ("update.same_bits", ["update.accumulate_dtype"], "where gradients are added in float64"),
    ("update.same_bits", ["run.check_hardware_every"], "which makes gradients in another cut"),
    ("update.same_bits", ["advice.every"], "which makes an update in several calls"),
    ("update.same_bits", ["model.dtype=float64"], "whose sums float64 rounds"),
    ("update.same_bits", ["model.experts"], "which is not tested with it"),
    ("update.long_samples", ["update.one_row"], "whose samples lie in one row"),
    ("update.long_samples", ["update.same_bits", "update.shapes", "update.cost"], "which chunks do not go with"),
    ("update.long_samples", ["update.micro_batch_size"], "and chunks have max_microbatch_tokens"),
    ("update.long_samples", ["update.max_microbatch_tokens=auto"], "and the tokens of a chunk are a number"),
    ("update.long_samples", ["parallel.tp", "parallel.cp", "parallel.pp"], "whose ranks share samples"),
    ("update.long_samples", ["model.compile"], "which does not go with a cache of keys and values"),
    ("update.long_samples", ["model.activation_checkpointing"], "which keeps no keys and values"),
    ("update.long_samples", ["data.look_ahead"], "whose samples are not there to be cut"),
    ("update.long_samples", ["run.check_hardware_every"], "which makes gradients in another cut"),
    ("update.cost", ["update.same_bits"], "by which bits would follow the clock"),
    ("update.cost", ["update.max_microbatch_tokens=auto"], "which measures the cost itself"),
    ("update.cost", ["update.one_row"], "which packs samples by their tokens alone"),
    ("update.cost", ["parallel.tp", "parallel.cp", "parallel.pp"], "whose ranks must split their samples alike"),
    ("update.balance=measured", ["update.same_bits"], "by which bits would follow the clock"),
    ("update.balance=measured", ["update.one_row"], "whose rows are dealt one by one"),
    ("update.balance=measured", ["parallel.tp", "parallel.cp", "parallel.pp"], "where ranks wait within a microbatch"),
    ("update.shapes", ["update.same_bits"], "whose microbatches hold the same samples on any number of ranks"),
    ("update.shapes", ["parallel.tp", "parallel.cp", "parallel.pp"], "whose ranks must split their samples alike"),
    ("update.shapes", ["model.experts"], "which tokens that fill up would load"),
    ("update.shapes", ["run.check_hardware_every"], "which makes gradients in another cut"),
    ("update.shapes", ["advice.every"], "which makes an update in several calls"),
    ("eval.function", ["parallel.pp"], "where no rank has a whole model to give it"),
    ("advice.every", ["parallel.tp"], "whose ranks hold parts of one gradient"),
    ("advice.every", ["parallel.cp"], "whose ranks hold stretches of one sample"),
    ("advice.every", ["parallel.pp"], "whose stages have a gradient each"),
    ("advice.every", ["model.dtype=bfloat16"], "in which a norm has two digits"),
    ("parallel.cpu_offload", ["parallel.tp", "parallel.pp", "model.quantize"], "which are not tested together"),
    ("parallel.loss_parallel", ["parallel.pp"], "where logits that are cut do not leave their stage"),
    ("parallel.tp", ["parallel.wrapper=ddp"], 'which cannot have it and "replicate" and "fsdp2" can'),
    ("parallel.cp", ["parallel.wrapper=ddp"], 'which cannot have it and "replicate" and "fsdp2" can'),
    ("run.check_hardware_every", ["parallel.tp", "parallel.cp", "parallel.pp"], "whose ranks share one gradient"),
    ("parallel.ep", ["parallel.cp", "parallel.tp", "parallel.pp"], "whose ranks share samples"),
    ("parallel.ep", ["parallel.wrapper=ddp", "parallel.wrapper=replicate"], "and experts go with fsdp2"),
    ("parallel.ep", ["model.function"], "and the experts of a model of your own are not known"),
    ("parallel.ep", ["update.same_bits"], "where an expert adds the tokens of several ranks in one product"),
    ("parallel.ep", ["update.long_samples", "update.balance=measured"], "whose ranks wait within a microbatch"),
    ("parallel.ep", ["run.check_hardware_every", "advice.every"], "which are not tested together"),
    ("parallel.ep", ["model.lora", "model.compile", "parallel.cpu_offload"], "which are not tested together"),
    ("run.check_hardware_every", ["advice.every"], "which makes an update in several calls"),
    ("parallel.replicas", ["parallel.tp", "parallel.cp", "parallel.pp", "parallel.ep"], "whose ranks share samples"),
    ("parallel.replicas", ["parallel.wrapper=ddp", "parallel.wrapper=replicate"], "which sums over ranks by itself"),
    ("parallel.replicas", ["parallel.dp_replicate"], "and each copy of the model is a replica"),
    ("parallel.replicas", ["update.max_microbatch_tokens=auto"], "which each replica would measure for itself"),
    ("parallel.replicas", ["update.cost", "update.balance=measured"], "which is measured on one replica"),
    ("parallel.replicas", ["update.on_nonfinite=skip_update", "advice.every"], "which needs all samples of an update"),
    ("parallel.replicas", ["run.check_hardware_every", "run.stuck_after"], "which knows the ranks of one replica"),
    ("parallel.replicas", ["data.streaming"], "whose samples have no numbers"),
    ("parallel.replicas", ["data.num_workers", "data.look_ahead"], "which reads the samples of one replica ahead"),
    ("parallel.replicas", ["run.profile_steps", "tracking.trackers"], "and each replica would write there"),
    ("parallel.replicas", ["update.one_row", "update.long_samples", "update.shapes"], "which is not tested with it"),
    ("parallel.replicas", ["model.experts", "model.quantize", "model.compile"], "which is not tested with it"),
    ("parallel.replicas", ["parallel.cpu_offload"], "which is not tested with it"),
    ("data.function", TEXT_KEYS, "and what the function returns is taken as it is"),
    ("data.mixture", SOURCE_KEYS, "which each [data.mixture.NAME] has for itself"),
    ("data.look_ahead", ["data.streaming"], "whose samples are read to be counted"),
    ("data.look_ahead", ["data.num_workers"], "which load an update whole"),
)
LOSSES_IN_SHAPES = ("megabatch.losses:next_token", "megabatch.losses:classification")
# A key, and another without which it has no effect.
NEEDING = (
    ("model.options", "model.function"),
    ("model.quantize", "model.lora"),
    ("model.double_quantization", "model.quantize"),
    ("data.options", "data.function"),
    ("optim.adamw_lr", "optim.name=Muon"),
    ("update.accumulate_dtype", "model.dtype=bfloat16"),
    ("update.memory", "update.max_microbatch_tokens=auto"),
    ("update.shapes", "model.compile"),
    ("update.long_samples", "update.max_microbatch_tokens"),
    ("parallel.sequence_parallel", "parallel.tp"),
    ("parallel.loss_parallel", "parallel.tp"),
    ("parallel.schedule", "parallel.pp"),
    ("parallel.stages_per_rank", "parallel.pp"),
    ("parallel.cpu_offload", "parallel.wrapper=fsdp2"),
)


def check_config(config: Config) -> None:
    """Raise `MegabatchError` where settings would be ignored or cannot be together."""
    for problem in problems(config):
        raise MegabatchError(problem)


def problems(config: Config) -> Iterator[str]:
    """Yield every contradiction, in one line each."""
    for key, excluded, why in EXCLUDING:
        for excluded_key in given(config, excluded if is_given(config, key) else ()):
            yield f"{said(config, key)} and {excluded_key}, {why}; leave one of them out"
    for key, needed in NEEDING:
        if is_given(config, key) and not is_given(config, needed):
            wanted = needed.replace("=", " = ")
            yield f"{said(config, key)}, which has no effect without {wanted}; set that, or leave {key} out"
    if config.update.shapes is not None and config.loss.function not in LOSSES_IN_SHAPES:
        yield (
            f"{said(config, 'update.shapes')} and {said(config, 'loss.function')}, of which it is not known that it "
            f"leaves out labels of -100; set it to {' or '.join(LOSSES_IN_SHAPES)}, or leave update.shapes out"
        )
    yield from same_bits_problems(config)
    yield from data_problems(config)


def same_bits_problems(config: Config) -> Iterator[str]:
    if not config.update.same_bits:
        return
    if config.model.compute_dtype is not None and config.parallel.wrapper != "ddp":
        yield (
            f"{said(config, 'update.same_bits')} and {said(config, 'model.compute_dtype')}, to which FSDP2 casts at "
            'other places than DDP; set parallel.wrapper = "ddp", or leave one of them out'
        )
    if (config.run.device == "cpu" or config.parallel.cpu_offload) and config.optim.options.get("fused") is True:
        yield (
            f"{said(config, 'update.same_bits')} and optim.options.fused is true, whose bits depend on the size of a "
            "shard on a CPU; leave one of them out"
        )


def data_problems(config: Config) -> Iterator[str]:
    """Yield the contradictions of data and evaluation sets that are more than two keys."""
    data, mixture = config.data, config.data.mixture
    with_weight = [name for name, source in mixture.items() if source.weight is not None]
    without = [name for name in mixture if name not in with_weight]
    if with_weight and without:
        yield (
            f"data.mixture.{with_weight[0]} has a weight and data.mixture.{without[0]} has none; "
            "give weights to all sources or to none"
        )
    if data.weight is not None:
        yield "data.weight is set, and a weight is for a source of a mixture; set it in [data.mixture.NAME]"
    if data.function is not None and data.look_ahead:
        yield (
            f"data.look_ahead is {data.look_ahead} and samples of data.function may draw random numbers, which they "
            "must not beside the model; set it to 0"
        )
    if data.pack_tokens == 1:
        yield "data.pack_tokens is 1, and in a row of one token there is nothing to predict; set at least 2"
    for name, source in config.eval.sets.items():
        if source.weight is not None:
            yield f"eval.sets.{name}.weight is set, and a set is evaluated whole; remove it"
    if OWN in config.eval.sets and config.eval.function is not None:
        yield f'eval.sets has a set named "{OWN}", which is the name of what eval.function finds; rename it'
    if HELD_OUT in config.eval.sets and config.eval.num_samples:
        yield (
            f'eval.sets has a set named "{HELD_OUT}", which is the name of what eval.num_samples='
            f"{config.eval.num_samples} takes off the training data; rename it, or set eval.num_samples to 0"
        )


def given(config: Config, keys: Iterable[str]) -> Iterator[str]:
    """Yield "key is value" for each of the keys that `is_given`."""
    return (said(config, key) for key in keys if is_given(config, key))


def is_given(config: Config, key: str) -> bool:
    """Return True if a key has another value than its default, or that value where ``key`` is "key=value"."""
    name, _, value = key.partition("=")
    section, _, field = name.partition(".")
    default = type(getattr(config, section)).model_fields[field].get_default(call_default_factory=True)
    return value_of(config, key) == value if value else value_of(config, key) != default


def said(config: Config, key: str) -> str:
    """Return "key is value"; of a table, that it is set."""
    value = value_of(config, key)
    shown = str(value).lower() if isinstance(value, bool) else "set" if isinstance(value, dict) else repr(value)
    return f"{key.partition('=')[0]} is {shown}"


def value_of(config: Config, key: str) -> Any:
    section, _, field = key.partition("=")[0].partition(".")
    return getattr(getattr(config, section), field)

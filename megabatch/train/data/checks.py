"""Checks: settings of data that contradict each other, and samples that no microbatch can hold."""

from collections.abc import Iterator, Mapping
from typing import Any

from megabatch.errors import MegabatchError
from megabatch.train.config import HELD_OUT, Config, DataConfig, SourceConfig
from megabatch.train.model.architecture import too_long

OWN = "own"  # the set of what eval.function finds
SOURCE_KEYS = [key for key in SourceConfig.model_fields if key != "weight"]
TEXT_KEYS = [*SOURCE_KEYS, "mixture", "streaming", "pack_tokens", "max_sample_tokens", "broken_rows"]


def check_config(config: Config) -> None:
    """Raise `MegabatchError` where settings of data would be ignored or cannot be together."""
    problem = next(problems(config), None)
    if problem is not None:
        raise MegabatchError(problem)


def problems(config: Config) -> Iterator[str]:
    """Every contradiction, in one line each."""
    data = config.data
    if data.function is not None:
        for key in changed(data, TEXT_KEYS):
            yield f"data.function and data.{key} are both set; what the function returns is taken as it is: remove one"
    elif data.options:
        yield "data.options is set and data.function is not; name the function that takes them, or remove them"
    if data.mixture:
        for key in changed(data, SOURCE_KEYS):
            yield f"data.mixture and data.{key} are both set; set {key} in each [data.mixture.NAME] instead"
    yield from weight_problems(config)
    if data.look_ahead is not None:
        yield from look_ahead_problems(data)
    if data.pack_tokens == 1:
        yield "data.pack_tokens is 1, and in a row of one token there is nothing to predict; set at least 2"
    if OWN in config.eval.sets and config.eval.function is not None:
        yield f'eval.sets has a set named "{OWN}", which is the name of what eval.function finds; rename it'
    if HELD_OUT in config.eval.sets and config.eval.num_samples:
        yield (
            f'eval.sets has a set named "{HELD_OUT}", which is the name of what eval.num_samples='
            f"{config.eval.num_samples} takes off the training data; rename it, or set eval.num_samples to 0"
        )


def look_ahead_problems(data: DataConfig) -> Iterator[str]:
    if data.streaming:
        yield "data.look_ahead and data.streaming are both set; a stream's samples are read to be counted: remove one"
    if data.num_workers:
        yield "data.look_ahead and data.num_workers are both set; workers load an update whole: remove one"
    if data.function is not None and data.look_ahead:
        yield (
            f"data.look_ahead is {data.look_ahead} and samples of data.function may draw random numbers, which they "
            "must not beside the model; set it to 0"
        )


def weight_problems(config: Config) -> Iterator[str]:
    mixture = config.data.mixture
    with_weight = [name for name, source in mixture.items() if source.weight is not None]
    without = [name for name in mixture if name not in with_weight]
    if with_weight and without:
        yield (
            f"data.mixture.{with_weight[0]} has a weight and data.mixture.{without[0]} has none; "
            "give weights to all sources or to none"
        )
    if config.data.weight is not None:
        yield "data.weight is set, and a weight is for a source of a mixture; set it in [data.mixture.NAME]"
    for name, source in config.eval.sets.items():
        if source.weight is not None:
            yield f"eval.sets.{name}.weight is set, and a set is evaluated whole; remove it"


def changed(data: DataConfig, keys: list[str]) -> list[str]:
    """Those of the keys that the recipe has set to something else than their default."""
    return [
        key for key in keys if getattr(data, key) != DataConfig.model_fields[key].get_default(call_default_factory=True)
    ]


def check_fit(name: str, length_tokens: int, config: Config, positions: int | None = None) -> None:
    """Raise `MegabatchError` where a sample fits into no microbatch, or not into the model's ``positions``."""
    if positions is not None and length_tokens > positions:
        raise too_long(f"the sample {name}", length_tokens, positions)
    cap, row_tokens = config.update.max_microbatch_tokens, config.data.pack_tokens
    if isinstance(cap, int) and length_tokens > cap:
        other = "leave such samples out with data.max_sample_tokens" if row_tokens is None else "lower data.pack_tokens"
        raise MegabatchError(
            f"the sample {name} has {length_tokens} tokens, more than update.max_microbatch_tokens={cap}; "
            f"raise it to {length_tokens} or {other}"
        )


def check_fits(samples: Any, config: Config, positions: int | None = None) -> None:
    """Raise `MegabatchError` where the longest of measured samples fits into no microbatch or not into the model."""
    longest = int(samples.lengths.argmax())
    check_fit(samples.name(longest), int(samples.lengths[longest]), config, positions)


def check_new_sets(names: list[str], others: Mapping[str, Any], config: Config) -> None:
    """Raise `MegabatchError` where data.function returns a set whose name another has."""
    for name in names:
        if name == OWN and config.eval.function is not None:
            raise MegabatchError(
                f'data.function {config.data.function} returns a set named "{OWN}", which is the name of what '
                "eval.function finds; rename it"
            )
        if name in others or (name == HELD_OUT and config.eval.num_samples):
            change = "set eval.num_samples to 0" if name == HELD_OUT else "rename one"
            raise MegabatchError(
                f'data.function {config.data.function} returns a set named "{name}", and there is another of that name '
                f"({'held out of the training data' if name == HELD_OUT else 'in eval.sets'}); {change}"
            )

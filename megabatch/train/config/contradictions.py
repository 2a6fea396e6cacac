"""Settings that contradict each other, found before anything is read."""

from collections.abc import Iterator

from megabatch.errors import MegabatchError
from megabatch.train.config import HELD_OUT, OWN, Config, DataConfig, SourceConfig

SOURCE_KEYS = [key for key in SourceConfig.model_fields if key != "weight"]
TEXT_KEYS = [*SOURCE_KEYS, "mixture", "streaming", "pack_tokens", "max_sample_tokens", "broken_rows"]


def check_config(config: Config) -> None:
    """Raise `MegabatchError` where settings of data would be ignored or cannot be together."""
    problem = next(problems(config), None)
    if problem is not None:
        raise MegabatchError(problem)


def problems(config: Config) -> Iterator[str]:
    """Yield every contradiction, in one line each."""
    data, mixture = config.data, config.data.mixture
    if data.function is not None:
        for key in changed(data, TEXT_KEYS):
            yield f"data.function and data.{key} are both set; what the function returns is taken as it is: remove one"
    elif data.options:
        yield "data.options is set and data.function is not; name the function that takes them, or remove them"
    if mixture:
        for key in changed(data, SOURCE_KEYS):
            yield f"data.mixture and data.{key} are both set; set {key} in each [data.mixture.NAME] instead"
    with_weight = [name for name, source in mixture.items() if source.weight is not None]
    without = [name for name in mixture if name not in with_weight]
    if with_weight and without:
        yield (
            f"data.mixture.{with_weight[0]} has a weight and data.mixture.{without[0]} has none; "
            "give weights to all sources or to none"
        )
    if data.weight is not None:
        yield "data.weight is set, and a weight is for a source of a mixture; set it in [data.mixture.NAME]"
    if data.look_ahead is not None:
        yield from look_ahead_problems(data)
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


def changed(data: DataConfig, keys: list[str]) -> list[str]:
    """Return those of the keys that the recipe has set to something else than their default."""
    return [
        key for key in keys if getattr(data, key) != DataConfig.model_fields[key].get_default(call_default_factory=True)
    ]

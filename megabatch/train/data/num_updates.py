"""Counts: how many updates a run makes of its data, and what they must have for a schedule of their sizes."""

from dataclasses import dataclass, field

import numpy as np

from megabatch import UpdateSampler
from megabatch.errors import MegabatchError
from megabatch.train.config import Config
from megabatch.train.config.batch_size import sizes_of
from megabatch.train.data.load import Data


@dataclass(frozen=True)
class NumUpdates:
    """How many updates there are."""

    of_data: int | None  # that run.max_epochs passes over the data make; None: a stream does not know
    of_run: int | None  # that this run makes: fewer with run.max_steps; None: until the stream ends
    ends: np.ndarray | None = field(default=None, compare=False)  # [of_data] samples of it and all before; if scheduled

    def work(self, step: int) -> int:
        """What so many updates take, in samples where they have more and more of them."""
        return step if self.ends is None or not step else int(self.ends[min(step, len(self.ends)) - 1])


def count_updates(config: Config, num_samples: int | None, sampler: UpdateSampler | None = None) -> NumUpdates:
    """The updates of the whole run, from its first one on.

    Args:
        num_samples: Of an epoch; None: a stream.
        sampler: At its beginning; asked where updates have more and more samples.
    """
    size, epochs, max_steps = config.update.global_batch_size, config.run.max_epochs, config.run.max_steps
    if num_samples is None:
        return NumUpdates(None, max_steps)
    if not isinstance(size, int):
        assert sampler is not None  # it deals what can be counted
        ends = np.cumsum(np.fromiter(sampler.sizes(epochs), np.int64))
        return NumUpdates(len(ends), min(len(ends), max_steps or len(ends)), ends)
    match config.update.tail:
        case "step":
            of_data = epochs * -(-num_samples // size)
        case "drop":
            of_data = epochs * (num_samples // size)
        case "carry":
            of_data = epochs * num_samples // size
    return NumUpdates(of_data, min(of_data, max_steps or of_data))


def check_points(config: Config, data: Data) -> None:
    """Raise `MegabatchError` for a schedule of update.global_batch_size that this data cannot follow."""
    sizes = sizes_of(config.update)
    if sizes.unit == "tokens" and not data.counts_tokens:
        raise MegabatchError(
            "update.global_batch_size has points in tokens, and the samples of data.function have no input_ids; give "
            "its points in samples or updates"
        )
    if config.update.tail == "drop" and data.epoch_size is not None and sizes.largest > data.epoch_size:
        if len(sizes.sizes) == 1:
            raise MegabatchError(no_update(config))
        raise MegabatchError(
            f"update.global_batch_size goes to {sizes.largest} samples, an epoch has {data.epoch_size}, and "
            'update.tail="drop" would leave no update of them; make it smaller, or set update.tail="step"'
        )


def no_update(config: Config) -> str:
    """Why a run would be over before it began."""
    return (
        f"run.max_epochs={config.run.max_epochs} passes over the data make no update of update.global_batch_size="
        f'{config.update.global_batch_size} with update.tail="{config.update.tail}"; '
        'make it smaller, or set update.tail="step"'
    )

"""Delivery: an update's samples on their way from the process that has read them to the one that trains on them."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from megabatch.batching import Deferred
from megabatch.errors import MegabatchError
from megabatch.train.config import Config
from megabatch.train.runtime.exit import ignore_signals_in_worker

State = dict[str, Any]  # JSON
Share = tuple[list[int], State]  # sample ids of an update, and the state after it


@dataclass(frozen=True)
class Delivery:
    """This rank's samples of an update, as they travel from one process to another."""

    samples: Sequence[Any]
    state: State  # after the update
    problem: str | None = None  # in place of samples: an error that one process hands to another
    told: Sequence[int] | None = None  # lengths that the samples' maker says they have; None: they are measured
    ids: Sequence[int | str] = ()  # of the samples: their numbers in the data, or a stream's names


class Once(Sampler[Share]):
    """What a DataLoader asks for, from an iterator."""

    def __init__(self, shares: Iterator[Share]) -> None:
        self._shares = shares

    def __iter__(self) -> Iterator[Share]:
        return self._shares


def options(num_workers: int) -> dict[str, Any]:
    """Of a DataLoader whose items are whole updates; its generator keeps the process's own random numbers as they are.

    Memory is not pinned: samples are padded into new tensors before they go to a device.
    """
    return {
        "batch_size": None,
        "num_workers": num_workers,
        "collate_fn": sent,
        "generator": torch.Generator(),
        "worker_init_fn": begin_worker,
    }


def begin_worker(number: int) -> None:
    """Keep a forked tokenizer from warning that it starts no threads, and signals for the process that trains."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    ignore_signals_in_worker()


def from_workers(loader: "DataLoader[Delivery]", config: Config) -> Iterator[Delivery]:
    """What a loader's processes send. Raises `MegabatchError`, here and nowhere else, where one of them is lost."""
    before = signal.getsignal(signal.SIGCHLD)
    deliveries = iter(loader)
    if before is not None:
        signal.signal(signal.SIGCHLD, before)  # torch's own would raise in the midst of whatever the trainer is doing
    while True:
        try:
            delivery = next(deliveries, None)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise MegabatchError(
                f"a process that loads samples has ended ({str(error).splitlines()[0]}), perhaps for want of memory; "
                f"data.num_workers is {config.data.num_workers}: lower it, or set it to 0 to see why"
            ) from None
        if delivery is None:
            return
        yield delivery


def sent(delivery: Delivery) -> Delivery:
    """With arrays in place of tensors, which would take a file descriptor each on their way to another process."""
    return replace(delivery, samples=[with_values(sample, as_array) for sample in delivery.samples])


def received(delivery: Delivery) -> Delivery:
    """With tensors in place of arrays. Raises `MegabatchError` where there is a problem instead."""
    if delivery.problem is not None:
        raise MegabatchError(delivery.problem)
    if isinstance(delivery.samples, Deferred):
        return delivery
    samples = [with_tensors(sample) for sample in delivery.samples]
    if delivery.told is None:
        return replace(delivery, samples=samples)
    return replace(delivery, samples=Deferred(samples.__getitem__, delivery.told, look_ahead=0, measured=False))


def with_tensors(sample: Any) -> Any:
    """The sample with tensors in place of arrays."""
    return with_values(sample, as_tensor)


def with_values(sample: Any, change: Callable[[Any], Any]) -> Any:
    """The sample with each of its values changed, where it is a mapping."""
    return {key: change(value) for key, value in sample.items()} if isinstance(sample, Mapping) else sample


def as_array(value: Any) -> Any:
    """A tensor as an array where numpy has its type."""
    return value.detach().numpy() if isinstance(value, Tensor) and value.dtype != torch.bfloat16 else value


def as_tensor(value: Any) -> Any:
    """An array of numbers as a tensor, on its own memory where it may not be written to or runs backwards."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
        return value
    is_plain = value.flags.writeable and all(stride >= 0 for stride in value.strides)
    return torch.from_numpy(value if is_plain else value.copy())


def part_of(batch: Sequence[Any], places: Sequence[int]) -> Sequence[Any]:
    """Some samples of an update."""
    if not isinstance(batch, Deferred):
        return [batch[place] for place in places]
    lengths = [batch.lengths[place] for place in places]
    weights = None if batch.weights is None else [batch.weights[place] for place in places]
    return Deferred(
        lambda index: batch[places[index]], lengths, weights, look_ahead=batch.look_ahead, measured=batch.measured
    )

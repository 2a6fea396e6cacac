"""Hub: rows of a data set of the Hugging Face hub, streamed, never downloaded whole."""

from collections.abc import Iterator
from typing import Any, cast

from datasets import DatasetBuilder, load_dataset_builder

from megabatch.errors import MegabatchError


def hub_builder(name: str, subset: str | None, key: str) -> DatasetBuilder:
    """What reads a data set; its ``hash`` names the version. Without network, what datasets has in its own cache."""
    try:
        builder = load_dataset_builder(name, name=subset)
    except Exception as error:  # of datasets, of the hub's client, of whatever carries it
        raise MegabatchError(
            f"{key}.path is {name!r}, which is nothing here, and it cannot be had from the Hugging Face hub "
            f"({in_short(error)}); name a file, or see to the network, {key}.path and {key}.subset"
        ) from None
    if builder.repo_id is None:  # "json", "text", ...: to datasets they mean the files of the working folder
        raise MegabatchError(f"{key}.path is {name!r}, which is nothing here, and no data set of the hub; name a file")
    return builder


def hub_rows(name: str, subset: str | None, split: str, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a split, with their names. Raises at once where there is no such split."""
    builder = hub_builder(name, subset, key)
    try:
        rows = cast(Iterator[dict[str, Any]], iter(builder.as_streaming_dataset(split=split)))
    except Exception as error:  # as above
        raise MegabatchError(
            f"{key}.path is {name!r}, of which the split {split!r} cannot be read ({in_short(error)}); set {key}.split"
        ) from None
    return named_rows(name, rows)


def named_rows(name: str, rows: Iterator[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    while True:
        number += 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # as above
            raise MegabatchError(
                f"the row {number} of {name} cannot be had from the Hugging Face hub ({in_short(error)}); try again"
            ) from None
        yield f"{name}:{number}", row


def in_short(error: Exception) -> str:
    """An error's type and text in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__

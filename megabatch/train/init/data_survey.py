"""Survey of data for `megabatch init`: all rows are read, and the recipe is sized by their number and lengths."""

import sys
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

from megabatch.errors import MegabatchError
from megabatch.train.config import SourceConfig
from megabatch.train.data.sources import BrokenRowError, Row, SourceFiles, find_files, rows_of, standard_message

CHATS = ("messages", "conversation", "conversations", "chat")
PAIRS = (
    ("prompt", "response"), ("prompt", "completion"), ("question", "answer"), ("instruction", "output"),
    ("instruction", "response"), ("query", "response"), ("input", "output"),
)  # fmt: skip
TEXTS = ("text", "content", "document", "body", "sentence", "review", "comment", "message", "tweet")
LABELS = ("label", "labels", "class", "category", "target", "sentiment")

MAX_LABELS = 100
MAX_SAMPLE_TOKENS = 4096  # positions of the small model
FEW_FILES = 40  # of which a tenth is too little to evaluate on: their lines are the documents
ROWS_AT_ONCE = 1000  # between two signs of progress

MIN_UPDATES = 100  # below, nothing is learned that a page could show
MAX_UPDATES = 2000  # of a first run
MAX_CPU_TOKENS = 8_000_000  # of a first run on a CPU: about ten minutes of the small model
NUM_HELD_OUT = 64  # eval.num_samples; at most a tenth of the data


@dataclass
class Survey:
    """Findings in the data: fields, lengths and labels."""

    keys: dict[str, str]  # of [data]: path, its kind and the fields
    unread: list[str] = field(default_factory=list[str])  # other fields of the first row
    lengths: "array[int]" = field(default_factory=lambda: array("q"))  # bytes of each sample, with its end
    labels: Counter[str] = field(default_factory=Counter[str])  # empty: no classification
    max_labels: int = MAX_LABELS  # more are not counted
    num_broken: int = 0
    first_broken: str = ""


@dataclass(frozen=True)
class Size:
    """The keys of a recipe that follow from the survey."""

    global_batch_size: int = 32
    max_epochs: int = 1
    num_updates: int | None = None  # None: not known
    max_steps: int | None = None  # of a first look at more data
    pack_tokens: int | None = None
    num_long: int = 0  # samples beyond MAX_SAMPLE_TOKENS

    def share(self, part: int, least: int, most: int) -> int:
        """Return a part of the run's updates, between two bounds."""
        return 20 if self.num_updates is None else max(least, min(most, self.num_updates // part // 5 * 5))


def survey(path: str, task: str | None, advance: Callable[[int], None]) -> Survey:
    """Read all rows. Raises `MegabatchError` where there is none, or none of its fields is known.

    Args:
        path: A file, files or a folder.
        task: "language", "classification", or None: by the fields of the first row.
        advance: Called with a number of rows that were read.
    """
    files = find_files(SourceConfig(path=path), "data")
    rows = rows_of(SourceConfig.model_validate(source_keys(path, files)), "data")  # as the recipe will name it
    found, measure, num_broken, first_broken = None, None, 0, ""
    while chunk := list(islice(rows, ROWS_AT_ONCE)):
        advance(len(chunk))
        for row in chunk:
            if found is None and isinstance(row, Row):
                keys = field_keys(row, task)
                found = Survey({**source_keys(path, files), **keys})
                found.max_labels = MAX_LABELS if task is None else sys.maxsize
                found.unread = [name for name in row.fields if name not in keys.values()]
                measure = measure_of(keys)
            problem = str(row) if isinstance(row, BrokenRowError) else add_row(found, measure, row)
            if problem:
                num_broken, first_broken = num_broken + 1, first_broken or problem
    if found is None or not found.lengths:
        raise MegabatchError(
            f"{path} has no row that can be read{f' (first: {first_broken})' if first_broken else ''}; name data with "
            "at least one"
        )
    found.num_broken, found.first_broken = num_broken, first_broken
    are_classes = 2 <= len(found.labels) <= min(MAX_LABELS, len(found.lengths) // 5)  # of several rows on average
    if "label_field" in found.keys and task is None and not are_classes:
        found.unread.append(found.keys.pop("label_field"))
    return found


def source_keys(path: str, files: SourceFiles) -> dict[str, str]:
    """Return the path, and the kind where a line is a document though the ending says that a file is one, or inversely.

    A folder of many texts has a document a file. Of few no file could be held out, so that lines are the documents.
    """
    is_many = len(files.paths) >= FEW_FILES
    kind = {"text": "documents" if is_many else None, "documents": None if is_many else "text"}.get(files.kind)
    return {"path": path} if kind is None else {"path": path, "source": kind}


def field_keys(row: Row, task: str | None) -> dict[str, str]:
    """Return the keys that name the fields of a chat, a prompt and its response, or text and label; the first found."""
    fields = row.fields
    for name in CHATS if task is None or task == "language" else ():
        turns = fields.get(name)
        if isinstance(turns, list) and turns and all(isinstance(each, dict) for each in turns):
            return {"messages_field": name}
    for prompt, response in PAIRS if task is None or task == "language" else ():
        if isinstance(fields.get(prompt), str) and isinstance(fields.get(response), str):
            return {"prompt_field": prompt, "response_field": response}
    texts = [name for name, value in fields.items() if isinstance(value, str)]
    label = next((name for name in LABELS if isinstance(fields.get(name), str | int)), None)
    rest = [name for name in texts if name != label]
    text = next((name for name in TEXTS if name in rest), rest[0] if len(rest) == 1 else None)
    if text is not None and label is not None and task != "language":
        return {"text_field": text, "label_field": label}
    if text is not None and task != "classification":
        return {"text_field": text}
    names = ", ".join(map(repr, [*fields][:12])) or "none"
    wanted = "a text and its label" if task == "classification" else "text, a prompt and its response, or messages"
    raise MegabatchError(
        f"{row.name} has the fields {names}, of which none is known as {wanted}; rename them, or begin with "
        "recipes/gsm8k.toml, which names its fields"
    )


def measure_of(keys: Mapping[str, str]) -> Callable[[Mapping[str, Any]], int]:
    """Return a function of a row's fields: the bytes of the sample, 0 if nothing can be learned from it."""
    if "messages_field" in keys:
        return lambda fields: chat_bytes(fields.get(keys["messages_field"]))
    *given, learned = [value for key, value in keys.items() if key.endswith("_field") and key != "label_field"]

    def measure(fields: Mapping[str, Any]) -> int:
        texts = [fields.get(name) for name in (*given, learned)]
        if not texts[-1] or not all(isinstance(text, str) for text in texts):
            return 0
        return sum(len(str(text).encode("utf-8", "replace")) for text in texts) + 1

    return measure


def chat_bytes(messages: Any) -> int:
    """Return the bytes of a chat by the template for bytes, 0 if the assistant says nothing in it."""
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in cast(Any, messages)):
        return 0
    turns = [standard_message(message) for message in cast("list[dict[str, Any]]", messages)]
    if not any(turn.get("role") == "assistant" for turn in turns):
        return 0
    return sum(len(f"{turn.get('role')}: {turn.get('content')}\n".encode("utf-8", "replace")) + 1 for turn in turns)


def add_row(found: Survey | None, measure: Callable[[Mapping[str, Any]], int] | None, row: Row) -> str:
    """Count a row; return what is wrong with it."""
    if found is None or measure is None:
        return ""
    length = measure(row.fields)
    label = str(row.fields.get(found.keys.get("label_field", ""), "")).strip()
    if not length or ("label_field" in found.keys and not label):
        fields = [field for key, field in found.keys.items() if key.endswith("_field")]
        return f"{row.name} has nothing in one of the fields {', '.join(fields)}"
    found.lengths.append(length)
    if label and len(found.labels) <= found.max_labels:
        found.labels[label] += 1
    return ""


def size_of(found: Survey, *, on_cpu: bool, bytes_per_token: float = 1.0) -> Size:
    """Return the sizes of a first run: at least 100 updates, few epochs, minutes on a CPU."""
    lengths = [int(each / bytes_per_token) + 1 for each in found.lengths]  # [N] tokens
    is_text = "text_field" in found.keys and "label_field" not in found.keys
    num_held_out = min(NUM_HELD_OUT, len(lengths) // 10)
    train_share = 1 - num_held_out / len(lengths)
    num_tokens, num_units, pack_tokens = sum(lengths) * train_share, len(lengths) - num_held_out, None
    num_long = 0 if "label_field" in found.keys else sum(each > MAX_SAMPLE_TOKENS for each in lengths)
    if is_text and (num_long or num_tokens / 1024 >= 32 * MIN_UPDATES):
        pack_tokens = next((each for each in (1024, 512, 256) if num_tokens / each >= 8 * MIN_UPDATES), 256)
        num_units, num_long = max(1, int(num_tokens / pack_tokens)), 0
    batch = next((each for each in (32, 16, 8) if num_units * 4 // each >= MIN_UPDATES), 4)
    epochs = -(-MIN_UPDATES * batch // num_units)
    num_updates = num_units * epochs // batch
    most = MAX_UPDATES
    if on_cpu:
        most = max(MIN_UPDATES, min(most, int(MAX_CPU_TOKENS * num_units / num_tokens / batch)))
    max_steps = most if num_updates > most else None
    return Size(batch, epochs, max_steps or num_updates, max_steps, pack_tokens, num_long)

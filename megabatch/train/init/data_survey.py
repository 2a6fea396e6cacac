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
# Texts that follow the prompt of a pair, as in Alpaca and Dolly.
CONTEXTS = ("input", "context")
RESPONSES = tuple(dict.fromkeys(response for _, response in PAIRS))
TEXTS = ("text", "content", "document", "body", "sentence", "review", "comment", "message", "tweet")
LABELS = ("label", "labels", "class", "category", "target", "sentiment")

# Fields of a source that the user may state.
SOURCE_FIELDS = ("text_field", "label_field", "prompt_field", "response_field")
MAX_LABELS = 100
# Positions of the small model.
MAX_SAMPLE_TOKENS = 4096
# A tenth of so few files is too little to evaluate on: their lines are the documents.
FEW_FILES = 40
# Rows between two signs of progress.
ROWS_AT_ONCE = 1000
# Mean characters of a field that is guessed to be the text.
MIN_TEXT = 20

# In fewer updates nothing is learned that a page could show.
MIN_UPDATES = 100
# Updates of a first run.
MAX_UPDATES = 2000
# About ten minutes of the small model.
MAX_CPU_TOKENS = 8_000_000
# eval.num_samples. At most a tenth of the data is held out.
NUM_HELD_OUT = 64


@dataclass
class Survey:
    """Findings in the data: fields, lengths and labels."""

    keys: dict[str, Any]  # of [data]: path, its kind and the fields
    guesses: list[str] = field(default_factory=list[str])  # fields whose names say nothing, with the reason
    unread: list[str] = field(default_factory=list[str])  # other fields of the first row
    measure: Callable[[Mapping[str, Any]], int] = len  # bytes of a row's fields
    lengths: "array[int]" = field(default_factory=lambda: array("q"))  # bytes of each sample, with its end
    labels: Counter[str] = field(default_factory=Counter[str])  # empty: no classification
    max_labels: int = MAX_LABELS  # more are not counted
    num_broken: int = 0
    first_broken: str = ""

    def add(self, row: Row) -> str:
        """Count a row; return what is wrong with it."""
        length = self.measure(row.fields)
        label = str(row.fields.get(self.keys.get("label_field", ""), "")).strip()
        if not length or ("label_field" in self.keys and not label):
            return f"{row.name} has nothing in one of the fields {', '.join(fields_in(self.keys))}"
        self.lengths.append(length)
        if label and len(self.labels) <= self.max_labels:
            self.labels[label] += 1
        return ""


@dataclass(frozen=True)
class Size:
    """The keys of a recipe that follow from the survey."""

    global_batch_size: int = 32
    max_epochs: int = 1
    num_updates: int | None = None  # None: not known
    max_steps: int | None = None  # of a first look at more data
    pack_tokens: int | None = None
    num_long: int = 0  # samples beyond MAX_SAMPLE_TOKENS

    def share(self, part: int, minimum: int, maximum: int) -> int:
        """Return a part of the run's updates, between two bounds."""
        return 20 if self.num_updates is None else max(minimum, min(maximum, self.num_updates // part // 5 * 5))


def survey(
    path: str, task: str | None, advance: Callable[[int], None], stated: Mapping[str, str] | None = None
) -> Survey:
    """Read all rows. Raises `MegabatchError` where there is none, or none of its fields is known.

    Args:
        path: A file, files or a folder.
        task: "language", "classification", or None: by the fields of the first row.
        advance: Called with a number of rows that were read.
        stated: Fields that the user names, by the recipe's keys for them.
    """
    stated, files = stated or {}, find_files(SourceConfig(path=path), "data")
    rows = rows_of(SourceConfig.model_validate(source_keys(path, files)), "data")
    result: Survey | None = None
    num_broken, first_broken = 0, ""
    while chunk := list(islice(rows, ROWS_AT_ONCE)):
        advance(len(chunk))
        good = [row for row in chunk if isinstance(row, Row)]
        if result is None and good:
            guesses = list[str]()
            keys = stated_keys(good, stated, task) if stated else field_keys(good, task, guesses)
            read = fields_in(keys)
            unread = [name for name in good[0].fields if name not in read]
            result = Survey({**source_keys(path, files), **keys}, guesses, unread, measure_of(keys))
            if task or "label_field" in stated:
                result.max_labels = sys.maxsize
        for row in chunk:
            problem = str(row) if isinstance(row, BrokenRowError) else cast(Survey, result).add(row)
            if problem:
                num_broken, first_broken = num_broken + 1, first_broken or problem
    if result is None or not result.lengths:
        raise MegabatchError(
            f"{path} has no row that can be read{f' (first: {first_broken})' if first_broken else ''}; name data with "
            "at least one"
        )
    result.num_broken, result.first_broken = num_broken, first_broken
    # Several rows of each label on average.
    are_classes = 2 <= len(result.labels) <= min(MAX_LABELS, len(result.lengths) // 5)
    if "label_field" in result.keys and result.max_labels == MAX_LABELS and not are_classes:
        result.unread.append(result.keys.pop("label_field"))
    return result


def source_keys(path: str, files: SourceFiles) -> dict[str, str]:
    """Return the path, and the kind where a line is a document though the ending says that a file is one, or inversely.

    A folder of many texts has a document a file. Of few no file could be held out, so that lines are the documents.
    """
    is_many = len(files.paths) >= FEW_FILES
    kind = {"text": "documents" if is_many else None, "documents": None if is_many else "text"}.get(files.kind)
    return {"path": path} if kind is None else {"path": path, "source": kind}


def fields_in(keys: Mapping[str, Any]) -> list[str]:
    """Return the fields that the keys of a recipe name."""
    values = [value for key, value in keys.items() if key.endswith("_field")]
    return [name for value in values for name in ([value] if isinstance(value, str) else value)]


def stated_keys(rows: list[Row], stated: Mapping[str, str], task: str | None) -> dict[str, Any]:
    """Return the keys for the fields that the user names, and for the one that goes with them."""
    row, keys = rows[0], dict[str, Any](stated)
    kinds = {"prompt_field", "response_field"} & {*keys}, {"text_field", "label_field"} & {*keys}
    if all(kinds):
        raise MegabatchError(
            f"{' and '.join(map(option_of, keys))} are given, and rows are read as a prompt and its response, or as a "
            "text and its label; give the options of one"
        )
    if task == "classification" and kinds[0]:
        raise MegabatchError(
            f"{' and '.join(map(option_of, keys))} is given with --task classification; give --text-field and "
            "--label-field"
        )
    prompt = keys.get("prompt_field")
    if prompt is not None and prompt not in row.fields and "," in prompt:
        keys["prompt_field"] = [name.strip() for name in prompt.split(",")]
    for key in stated:
        for name in [keys[key]] if isinstance(keys[key], str) else keys[key]:
            if name not in row.fields:
                raise MegabatchError(
                    f"{option_of(key)} is {name!r}, and {row.name} has the fields {names_text(row)}; name one of them"
                )
    partners = {"prompt_field": ("response_field", RESPONSES), "label_field": ("text_field", TEXTS)}
    partners["response_field"] = ("prompt_field", tuple(prompt for prompt, _ in PAIRS))
    for key in stated:
        partner, usual = partners.get(key, (key, ()))
        if partner not in keys:
            keys[partner] = other_field(row, keys, usual, key, partner)
    return {key: keys[key] for key in SOURCE_FIELDS if key in keys}


def other_field(row: Row, keys: Mapping[str, Any], usual: tuple[str, ...], key: str, partner: str) -> str:
    """Return the field that goes with a stated one: one of the usual names, or the only other text."""
    texts = [name for name, value in row.fields.items() if isinstance(value, str) and name not in fields_in(keys)]
    partner_field = next((name for name in usual if name in texts), texts[0] if len(texts) == 1 else None)
    if partner_field is None:
        raise MegabatchError(
            f"{option_of(key)} is {keys[key]!r}, and the fields of {row.name} are {names_text(row)}; give "
            f"{option_of(partner)} too"
        )
    return partner_field


def option_of(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def names_text(row: Row) -> str:
    return ", ".join(map(repr, [*row.fields][:12])) or "none"


def field_keys(rows: list[Row], task: str | None, guesses: list[str]) -> dict[str, Any]:
    """Return the keys that name the fields of a chat, a prompt and its response, or text and label; the first found.

    Args:
        rows: The first rows. The names of the first one's fields decide, and where they say nothing, the values.
        task: As in `survey`.
        guesses: The reason of each guess by values is added to it.
    """
    row, fields = rows[0], rows[0].fields
    may_be_language = task != "classification"
    for name in CHATS if may_be_language else ():
        turns = fields.get(name)
        if isinstance(turns, list) and turns and all(isinstance(turn, dict) for turn in turns):
            return {"messages_field": name}
    for prompt, response in PAIRS if may_be_language else ():
        if isinstance(fields.get(prompt), str) and isinstance(fields.get(response), str):
            contexts = [name for name in CONTEXTS if isinstance(fields.get(name), str) and name != prompt]
            return {"prompt_field": [prompt, *contexts] if contexts else prompt, "response_field": response}
    texts = [name for name, value in fields.items() if isinstance(value, str)]
    label = next((name for name in LABELS if isinstance(fields.get(name), str | int)), None)
    names = [name for name in texts if name != label]
    text = next((name for name in TEXTS if name in names), names[0] if len(names) == 1 else None)
    if text is None and (text := guess_text(rows, names)) is not None:
        guesses.append(f"text_field = {text} is guessed: it has the longest texts")
    if label is None and task == "classification" and (label := guess_label(rows, text)) is not None:
        guesses.append(f"label_field = {label} is guessed: it has the fewest values")
    if text is not None and label is not None and task != "language":
        return {"text_field": text, "label_field": label}
    if text is not None and may_be_language:
        return {"text_field": text}
    wanted = "text, a prompt and its response, or messages" if may_be_language else "a text and its label"
    raise MegabatchError(
        f"{row.name} has the fields {names_text(row)}, of which none is known as {wanted}; name them: --text-field "
        "(and --label-field), or --prompt-field and --response-field"
    )


def guess_text(rows: list[Row], names: list[str]) -> str | None:
    """Return the field whose texts are the longest by far; None where there is none."""
    sizes = Counter({name: sum(len(str(row.fields.get(name, ""))) for row in rows) for name in names})
    (longest, size), (_, second_size) = [*sizes.most_common(2), ("", 0), ("", 0)][:2]
    return longest if size >= max(MIN_TEXT * len(rows), 2 * second_size) else None


def guess_label(rows: list[Row], text: str | None) -> str | None:
    """Return the field with the fewest values, of several rows each on average; None where there is none."""
    names = [name for name, value in rows[0].fields.items() if isinstance(value, str | int) and name != text]
    counts = {name: len({str(row.fields.get(name, "")) for row in rows}) for name in names}
    few = {name: count for name, count in counts.items() if 2 <= count <= min(MAX_LABELS, len(rows) // 5)}
    return min(few, key=few.__getitem__, default=None)


def measure_of(keys: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], int]:
    """Return a function of a row's fields: the bytes of the sample, 0 if nothing can be learned from it."""
    if "messages_field" in keys:
        return lambda fields: chat_bytes(fields.get(keys["messages_field"]))
    *inputs, learned = fields_in({key: value for key, value in keys.items() if key != "label_field"})

    def measure(fields: Mapping[str, Any]) -> int:
        contexts = [fields[name] for name in inputs[1:] if fields.get(name)]
        texts = [*(fields.get(name) for name in inputs[:1]), *contexts, fields.get(learned)]
        if not texts[-1] or not all(isinstance(text, str) for text in texts):
            return 0
        return sum(len(str(text).encode("utf-8", "replace")) for text in texts) + 1

    return measure


def chat_bytes(messages: Any) -> int:
    """Return the bytes of a chat by the template for bytes, 0 if the assistant says nothing in it."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in cast(Any, messages)):
        return 0
    turns = [standard_message(message) for message in cast("list[dict[str, Any]]", messages)]
    if not any(turn.get("role") == "assistant" for turn in turns):
        return 0
    return sum(len(f"{turn.get('role')}: {turn.get('content')}\n".encode("utf-8", "replace")) + 1 for turn in turns)


def size_of(findings: Survey, *, on_cpu: bool, bytes_per_token: float = 1.0) -> Size:
    """Return the sizes of a first run: at least 100 updates, few epochs, minutes on a CPU."""
    lengths = [int(length / bytes_per_token) + 1 for length in findings.lengths]  # [N] tokens
    is_text = "text_field" in findings.keys and "label_field" not in findings.keys
    num_held_out = min(NUM_HELD_OUT, len(lengths) // 10)
    train_share = 1 - num_held_out / len(lengths)
    num_tokens, num_units, pack_tokens = sum(lengths) * train_share, len(lengths) - num_held_out, None
    num_long = 0 if "label_field" in findings.keys else sum(length > MAX_SAMPLE_TOKENS for length in lengths)
    if is_text and (num_long or num_tokens / 1024 >= 32 * MIN_UPDATES):
        pack_tokens = next((size for size in (1024, 512, 256) if num_tokens / size >= 8 * MIN_UPDATES), 256)
        num_units, num_long = max(1, int(num_tokens / pack_tokens)), 0
    batch = next((size for size in (32, 16, 8) if num_units * 4 // size >= MIN_UPDATES), 4)
    epochs = -(-MIN_UPDATES * batch // num_units)
    num_updates = num_units * epochs // batch
    limit = MAX_UPDATES
    if on_cpu:
        limit = max(MIN_UPDATES, min(limit, int(MAX_CPU_TOKENS * num_units / num_tokens / batch)))
    max_steps = limit if num_updates > limit else None
    return Size(batch, epochs, max_steps or num_updates, max_steps, pack_tokens, num_long)

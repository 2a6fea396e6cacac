"""Encode: rows of plain text, of prompt and response, or of chats, as token ids and labels.

A kind of row is a class with the fields it reads, `read`, which takes them from one row, and `encode`, which makes
token ids and labels of many rows at once, as tokenizers are fast that way. A row that cannot be used is a
`BrokenRowError`, at which a run stops, or which it counts and leaves out.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice, pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import ByT5Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from megabatch.batching import IGNORED_LABEL
from megabatch.errors import MegabatchError
from megabatch.train.config import DataConfig, SourceConfig
from megabatch.train.data.sources import BrokenRowError, LongRowError, Row, Rows, rows_of, standard_message

# {"input_ids": [T], "labels": [T]}, int64. Labels are IGNORED_LABEL where nothing is learned.
Sample = dict[str, Tensor]
# A sample with the name of its row.
Named = tuple[str, Sample]
Ids = np.ndarray  # [T] int64
# Token ids and labels, [T] and [T].
Encoded = tuple[Ids, Ids]
Message = dict[str, Any]
# First and last character in a conversation's text.
Span = tuple[int, int]

# Fields of each kind of rows, by the recipe's keys. The first kind whose fields a row has is taken.
FIELDS = {
    "messages": ["messages_field"],
    "prompt": ["prompt_field", "response_field"],
    "text": ["text_field"],
}
NOTHING = np.zeros(0, dtype=np.int64)
# Rows that are tokenized together.
ROWS_AT_ONCE = 256
TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
# A template takes this day for today, so that data are the same on every day.
DAY = datetime(2025, 1, 1, tzinfo=UTC)
MARKS = re.compile(r"{%-?\s*generation\s*-?%}")


@dataclass
class Skipped:
    """Counts of what was left out so far."""

    broken: int = 0
    long: int = 0
    first: str | None = None  # the text of the first broken row

    def words(self, key: str) -> list[str]:
        """Return what was left out of the source that the recipe names by ``key``, in a line each."""
        broken = f"{key}: left out {self.broken:,} broken rows, first {self.first}"
        long = f"{key}: left out {self.long:,} samples longer than data.max_sample_tokens"
        return [*([broken] if self.broken else []), *([long] if self.long else [])]


def samples_of(source: SourceConfig, key: str, data: DataConfig, tokenizer: Any, skipped: Skipped) -> Iterator[Named]:
    """Yield the samples of a source in its order; what is left out is added to ``skipped``.

    Args:
        source: Where the rows are.
        key: The source's table in the recipe, for messages.
        data: Says which rows are refused (``broken_rows``), and which are too long (``max_sample_tokens``).
        tokenizer: Of transformers.
        skipped: Counts of this pass.

    Raises `MegabatchError` at once where the source is not there; at the first row where the recipe does not fit it;
    at a broken one with "stop"; and at the end where there was no sample at all.
    """
    if tokenizer is None:
        raise MegabatchError(f"{key} is text, and the recipe has no tokenizer; set model.tokenizer")
    rows, find_kind = rows_of(source, key), partial(kind_of_rows, source, key, Tokens(tokenizer))
    return encoded_rows(rows, find_kind, key, data, skipped)


def encoded_rows(
    rows: Rows, find_kind: "Callable[[Row], RowKind]", key: str, data: DataConfig, skipped: Skipped
) -> Iterator[Named]:
    kind, num_samples = None, 0
    while chunk := list(islice(rows, ROWS_AT_ONCE)):
        first = next((row for row in chunk if isinstance(row, Row)), None)
        if kind is None and first is not None:
            kind = find_kind(first)
        for name, encoded in encode_chunk(chunk, kind):
            if isinstance(encoded, LongRowError) and data.max_sample_tokens is not None:
                skipped.long += 1
            elif isinstance(encoded, BrokenRowError):
                if data.broken_rows == "stop":
                    raise MegabatchError(f'{encoded}; mend it, or leave such rows out with data.broken_rows = "skip"')
                skipped.broken += 1
                skipped.first = skipped.first or str(encoded)
            elif data.max_sample_tokens is not None and len(encoded[0]) > data.max_sample_tokens:
                skipped.long += 1
            else:
                num_samples += 1
                yield name, {"input_ids": torch.from_numpy(encoded[0]), "labels": torch.from_numpy(encoded[1])}
    if num_samples == 0:
        reasons = [f"{skipped.broken} rows are broken (first: {skipped.first})"] * bool(skipped.broken)
        reasons += [f"{skipped.long} are longer than data.max_sample_tokens"] * bool(skipped.long)
        if not reasons:
            raise MegabatchError(f"{key}.path names a source without rows; give at least one sample")
        change = f"set {key}.path, its fields, or data.max_sample_tokens"
        raise MegabatchError(f"no row of {key} can be used: {', '.join(reasons)}; {change}")


def encode_chunk(
    chunk: list[Row | BrokenRowError], kind: "RowKind | None"
) -> Iterator[tuple[str, Encoded | BrokenRowError]]:
    """Yield what became of each row, in their order; without a kind there is no good row."""
    read: list[Any] = []
    for row in chunk:
        try:
            read.append(row if isinstance(row, BrokenRowError) or kind is None else kind.read(row))
        except BrokenRowError as error:
            read.append(error)
    good = [content for content in read if not isinstance(content, BrokenRowError)]
    encoded = iter(kind.encode(good) if kind is not None and good else [])
    for row, content in zip(chunk, read, strict=True):
        name = row.name if isinstance(row, Row) else ""
        encoded_row = content if isinstance(content, BrokenRowError) else next(encoded)
        if (
            not isinstance(encoded_row, BrokenRowError) and (encoded_row[1][1:] == IGNORED_LABEL).all()
            # Nothing predicts the first token.
        ):
            encoded_row = BrokenRowError(f"{name} has no token to learn")
        yield name, encoded_row


def kind_of_rows(source: SourceConfig, key: str, tokens: "Tokens", first: Row) -> "RowKind":
    """Return the kind that the recipe names, else the one whose fields the first good row has."""
    named = {kind: [name for name in names if getattr(source, name) is not None] for kind, names in FIELDS.items()}
    named_kinds = [kind for kind, names in named.items() if names]
    default_kinds = [
        kind for kind, names in FIELDS.items() if {default_of(name) for name in names} <= first.fields.keys()
    ]
    if len(named_kinds) > 1:
        shown = " and ".join(f"{key}.{named[kind][0]}" for kind in named_kinds)
        raise MegabatchError(f"{shown} are set, and a row is one of text, prompt and response, and chat; keep one")
    if not named_kinds and not default_kinds:
        raise MegabatchError(
            f"{first.name} has the fields {fields_text(first)}; say which to learn: set {key}.prompt_field and "
            f"{key}.response_field, or {key}.messages_field, or {key}.text_field"
        )
    kind = (named_kinds or default_kinds)[0]
    fields = {name: getattr(source, name) or default_of(name) for name in FIELDS[kind]}
    kind_rows = ChatRows(fields, key, tokens) if kind == "messages" else TextRows(fields, tokens)
    for name, named_fields in kind_rows.fields.items():
        field = named_fields if isinstance(named_fields, str) else named_fields[0]
        if field not in first.fields:
            raise MegabatchError(
                f"{first.name} has no field {field!r}, only {fields_text(first)}; set {key}.{name} to the field to read"
            )
    return kind_rows


def default_of(name: str) -> str:
    """Return the field that is read where the recipe says nothing of it."""
    return name.removesuffix("_field")


class TextRows:
    """A prompt, which is not learned, if there is one; a text, which is learned, and its end."""

    def __init__(self, fields: Mapping[str, str | list[str]], tokens: "Tokens") -> None:
        self.fields = fields
        self._tokens, self._front, self._end = tokens, tokens.front, tokens.end

    def read(self, row: Row) -> tuple[str, str]:
        *prompt, text = (joined_text_of(row, field) for field in self.fields.values())
        if not text:
            field = [*self.fields.values()][-1]
            raise BrokenRowError(f"{row.name} has an empty text in the field {field!r}, so no token to learn")
        return "".join(prompt), text

    def encode(self, contents: Sequence[tuple[str, str]]) -> list[Encoded | BrokenRowError]:
        texts = self._tokens.ids_of([text for _, text in contents])
        prompts = (
            [NOTHING] * len(texts) if len(self.fields) == 1 else self._tokens.ids_of([prompt for prompt, _ in contents])
        )
        results: list[Encoded | BrokenRowError] = []
        for prompt, text in zip(prompts, texts, strict=True):
            context, learned = np.concatenate([self._front, prompt]), np.concatenate([text, self._end])
            labels = np.concatenate([np.full(len(context), IGNORED_LABEL), learned])  # [T]
            results.append((np.concatenate([context, learned]), labels))
        return results


class ChatRows:
    """Conversations: lists of messages, {role, content}, of which the assistant's are learned, with their ends.

    The template says which characters those are where it has {% generation %}; else a turn is what comes after the
    text before it with its generation prompt. A token is learned if it ends in them. The mask of
    `apply_chat_template` ends before a turn that begins with a space, where a tokenizer trims offsets.
    """

    def __init__(self, fields: Mapping[str, str | list[str]], key: str, tokens: "Tokens") -> None:
        self.fields = fields
        self._field, self._tokens, self._tokenizer = cast(str, fields["messages_field"]), tokens, tokens.tokenizer
        try:
            template = cast(str, tokens.tokenizer.get_chat_template())
        except ValueError:
            raise MegabatchError(
                f"{key} has chats and the tokenizer has no chat template; set model.tokenizer to one that has, or "
                f"{key}.prompt_field and {key}.response_field to fields of plain text"
            ) from None
        self._template = TODAY.sub(lambda match: repr(DAY.strftime(match[2])), template)
        self._spans = self._marked if MARKS.search(template) else self._prefixed

    def read(self, row: Row) -> tuple[str, list[Message]]:
        messages = row.fields.get(self._field)
        if not isinstance(messages, list) or not messages:
            raise BrokenRowError(f"{row.name} has no list of messages in the field {self._field!r}")
        checked = [message_of(message, f"{row.name}, message {n},") for n, message in enumerate(cast(Any, messages), 1)]
        if not any(message["role"] == "assistant" for message in checked):
            raise BrokenRowError(f'{row.name} has no message of the role "assistant", so no token to learn')
        return row.name, checked

    def encode(self, contents: Sequence[tuple[str, list[Message]]]) -> list[Encoded | BrokenRowError]:
        return [self._encode_one(name, messages) for name, messages in contents]

    def _encode_one(self, name: str, messages: list[Message]) -> Encoded | BrokenRowError:
        try:
            text, spans = self._spans(name, messages)
        except BrokenRowError as error:
            return error
        except MegabatchError:
            raise
        except Exception as error:
            return BrokenRowError(f"{name} is refused by the chat template ({' '.join(str(error).split())[:200]})")
        if not is_text(text):
            return BrokenRowError(f"{name} has half of a surrogate pair in its messages, which is no text")
        ids, is_learned = self._tokens.ids_in(text, spans)
        return ids, np.where(is_learned, ids, IGNORED_LABEL)

    def _marked(self, name: str, messages: list[Message]) -> tuple[str, list[Span]]:
        """Return the text and the spans between {% generation %} and {% endgeneration %}."""
        special = self._tokenizer.special_tokens_map
        texts, spans = render_jinja_template(
            conversations=[messages], chat_template=self._template, return_assistant_tokens_mask=True, **special
        )
        return texts[0], cast(list[list[Span]], spans)[0]

    def _prefixed(self, name: str, messages: list[Message]) -> tuple[str, list[Span]]:
        """Return the text and what each message of the assistant adds to the text before it."""
        if messages[0]["role"] == "assistant":
            raise BrokenRowError(f"{name} begins with the assistant, which has nothing to answer")
        conversation, spans = self._render(messages), list[Span]()
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                before, after = self._render(messages[:turn], prompt=True), self._render(messages[: turn + 1])
                if not conversation.startswith(after) or not after.startswith(before):
                    raise MegabatchError(
                        f"the chat template writes {name} otherwise up to its message {turn + 1} than as a whole, so "
                        "what the assistant said cannot be found; put {% generation %} and {% endgeneration %} around "
                        "it in the template of model.tokenizer"
                    )
                spans.append((len(before), len(after)))
        return conversation, spans

    def _render(self, messages: list[Message], *, prompt: bool = False) -> str:
        render = self._tokenizer.apply_chat_template
        return cast(str, render(messages, tokenize=False, add_generation_prompt=prompt, chat_template=self._template))


RowKind = TextRows | ChatRows


def message_of(message: Any, name: str) -> Message:
    """Return a message, checked, without fields that are None, as tables fill them in."""
    if isinstance(message, dict):
        message = dict(standard_message(cast(Message, message)))
    if not isinstance(message, dict) or not isinstance(cast(Message, message).get("role"), str):
        observed = sorted(cast(Message, message)) if isinstance(message, dict) else type(message).__name__
        raise BrokenRowError(f"{name} is {observed}, not an object with the fields role and content")
    values = {field: value for field, value in cast(Message, message).items() if value is not None}
    if not isinstance(values.get("content"), str | list) and "tool_calls" not in values:
        raise BrokenRowError(f"{name} has neither text in its field content nor tool_calls")
    return values


def joined_text_of(row: Row, field: str | list[str]) -> str:
    """Return the text of a field, or of several with a newline between them; only the first must be there."""
    first, *more_fields = [field] if isinstance(field, str) else field
    return "\n".join([text_of(row, first), *(text_of(row, name) for name in more_fields if row.fields.get(name))])


def text_of(row: Row, field: str) -> str:
    text = row.fields.get(field)
    if not isinstance(text, str):
        observed = (
            f"a value of type {type(text).__name__}" if field in row.fields else f"nothing, only {fields_text(row)},"
        )
        raise BrokenRowError(f"{row.name} has {observed} in the field {field!r}, where text is expected")
    if not is_text(text):
        raise BrokenRowError(f"{row.name} has half of a surrogate pair in the field {field!r}, which is no text")
    return text


def is_text(text: str) -> bool:
    """Return False for half of a surrogate pair, which JSON can write and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def fields_text(row: Row) -> str:
    names = [repr(name) for name in row.fields]
    return ", ".join(names[:12] + ["..."] * (len(names) > 12)) or "none"


class Tokens:
    """A tokenizer, and what a sample of it begins and ends with."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._special = re.compile("|".join(map(re.escape, sorted(tokenizer.get_added_vocab()))))

    @property
    def end(self) -> Ids:
        """The token after a text, by which a model learns to stop."""
        if self.tokenizer.eos_token_id is None:
            raise MegabatchError(
                "the tokenizer has no token for the end of a text; set eos_token in its tokenizer_config.json, or "
                "another model.tokenizer"
            )
        return np.array([self.tokenizer.eos_token_id])

    @property
    def front(self) -> Ids:
        """The token that the tokenizer itself puts before a text, or nothing."""
        plain, with_specials = (self.tokenizer("a", add_special_tokens=add)["input_ids"] for add in (False, True))
        starts = [
            at for at in range(len(with_specials) - len(plain) + 1) if with_specials[at : at + len(plain)] == plain
        ]
        return np.array(with_specials[: starts[0]] if starts else [], dtype=np.int64)

    def ids_of(self, texts: list[str]) -> list[Ids]:
        """Return the token ids of each text, without special ones before or after it."""
        if isinstance(self.tokenizer, ByT5Tokenizer):
            return [self._byte_ids(text) for text in texts]
        return [np.array(row, dtype=np.int64) for row in (self._encoding(texts)["input_ids"] if texts else [])]

    def ids_in(self, text: str, spans: list[Span]) -> tuple[Ids, np.ndarray]:
        """Return token ids, [T], and True for those that end in one of the spans, [T]."""
        # It does not say where its tokens are: each piece is tokenized by itself.
        if not self.tokenizer.is_fast:
            cuts = [0, *(cut for span in spans for cut in span), len(text)]
            pieces = self.ids_of([text[start:end] for start, end in pairwise(cuts)])
            inside = [np.full(len(ids), index % 2 == 1) for index, ids in enumerate(pieces)]
            return np.concatenate(pieces), np.concatenate(inside)
        encoding = self._encoding([text], return_offsets_mapping=True)
        ends = np.array([end for _, end in encoding["offset_mapping"][0]], dtype=np.int64)  # [T]
        is_inside = np.zeros(len(ends), dtype=bool)
        for start, end in spans:
            is_inside |= (start < ends) & (ends <= end)
        return np.array(encoding["input_ids"][0], dtype=np.int64), is_inside

    def _byte_ids(self, text: str) -> Ids:
        """Return what ByT5 makes of a text; without special tokens in it, the same a hundred times as fast."""
        if self._special.search(text):
            return np.array(self._encoding([text])["input_ids"][0], dtype=np.int64)
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) + self.tokenizer.offset

    def _encoding(self, texts: list[str], **options: Any) -> Any:
        """Call the tokenizer. verbose=False: a text longer than its model takes is no matter here."""
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False, **options)

    def fingerprint(self) -> str:
        """Return a name of everything that tokens depend on."""
        tokenizer = self.tokenizer
        # This comes first, since it undoes what others have set.
        front_and_end = [self.front.tolist(), tokenizer.eos_token_id]
        backend = getattr(tokenizer, "backend_tokenizer", None)
        body = json.dumps(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
        template = None if isinstance(tokenizer, ByT5Tokenizer) else tokenizer.chat_template
        special = json.dumps([tokenizer.special_tokens_map, template], default=str, sort_keys=True)
        return sha256_of(type(tokenizer).__qualname__, body, special, json.dumps(front_and_end))


def sha256_of(*texts: str) -> str:
    """Return one name for several texts, whatever is in them."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()

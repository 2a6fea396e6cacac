"""Encode: what a row is (plain text, a prompt and its response, or a chat) and which of its tokens are learned.

A kind of row is a class with the fields it reads, `read`, which takes them from one row, and `encode`, which makes
token ids and labels of many rows at once, as tokenizers are fast that way.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from megabatch.batching import IGNORED_LABEL
from megabatch.errors import MegabatchError
from megabatch.train.config import SourceConfig
from megabatch.train.data.chat import ChatRows
from megabatch.train.data.rows import BrokenRowError, Row
from megabatch.train.data.tokens import Ids, Tokens, is_text

Encoded = tuple[Ids, Ids]  # token ids and labels, [T] and [T]


class RowKind(Protocol):
    """How rows of one kind become tokens."""

    @property
    def fields(self) -> Mapping[str, str]:
        """The fields that every row must have, by the recipe's key for them."""
        ...

    def read(self, row: Row) -> Any:
        """What is encoded of a row; raises `BrokenRowError`."""
        ...

    def encode(self, contents: Sequence[Any]) -> list[Encoded | BrokenRowError]:
        """Token ids and labels of what `read` gave."""
        ...


class TextRows:
    """Plain text, all of it learned, and its end."""

    def __init__(self, field: str, tokens: Tokens) -> None:
        self.fields = {"text_field": field}
        self._field, self._tokens, self._front, self._end = field, tokens, tokens.front, tokens.end

    def read(self, row: Row) -> str:
        text = text_of(row, self._field)
        if not text:
            raise BrokenRowError(f"{row.name} has an empty text in the field {self._field!r}")
        return text

    def encode(self, contents: Sequence[str]) -> list[Encoded | BrokenRowError]:
        return [joined(self._front, np.concatenate([ids, self._end])) for ids in self._tokens.ids_of(list(contents))]


class PairRows:
    """A prompt, which is not learned, and the response to it, which is, and its end."""

    def __init__(self, prompt_field: str, response_field: str, tokens: Tokens) -> None:
        self.fields = {"prompt_field": prompt_field, "response_field": response_field}
        self._tokens, self._front, self._end = tokens, tokens.front, tokens.end

    def read(self, row: Row) -> tuple[str, str]:
        prompt, response = (text_of(row, field) for field in self.fields.values())
        if not response:
            raise BrokenRowError(
                f"{row.name} has an empty text in the field {self.fields['response_field']!r}, so no token to learn"
            )
        return prompt, response

    def encode(self, contents: Sequence[tuple[str, str]]) -> list[Encoded | BrokenRowError]:
        prompts = self._tokens.ids_of([prompt for prompt, _ in contents])
        responses = self._tokens.ids_of([response for _, response in contents])
        return [
            joined(np.concatenate([self._front, prompt]), np.concatenate([response, self._end]))
            for prompt, response in zip(prompts, responses, strict=True)
        ]


def joined(given: Ids, learned: Ids) -> Encoded:
    """Tokens that are given and tokens that are learned as one sample."""
    return np.concatenate([given, learned]), np.concatenate([np.full(len(given), IGNORED_LABEL), learned])


def text_of(row: Row, field: str) -> str:
    text = row.fields.get(field)
    if not isinstance(text, str):
        seen = f"a value of type {type(text).__name__}" if field in row.fields else f"nothing, only {fields_text(row)},"
        raise BrokenRowError(f"{row.name} has {seen} in the field {field!r}, where text is expected")
    if not is_text(text):
        raise BrokenRowError(f"{row.name} has half of a surrogate pair in the field {field!r}, which is no text")
    return text


def kind_of_rows(source: SourceConfig, key: str, first: Row, tokenizer: Any) -> RowKind:
    """What the rows of a source are: what the recipe says, else what the fields of the first good one say."""
    if tokenizer is None:
        raise MegabatchError(f"{key} is text, and the recipe has no tokenizer; set model.tokenizer")
    tokens, name = Tokens(tokenizer), named_kind(source, key) or seen_kind(first, key)
    kind: RowKind
    if name == "messages":
        kind = ChatRows(source.messages_field or "messages", key, tokens)
    elif name == "prompt":
        kind = PairRows(source.prompt_field or "prompt", source.response_field or "response", tokens)
    else:
        kind = TextRows(source.text_field or "text", tokens)
    check_fields(kind, first, key)
    return kind


def named_kind(source: SourceConfig, key: str) -> str | None:
    """The kind whose fields the recipe names, if any."""
    keys = {"text": ["text_field"], "prompt": ["prompt_field", "response_field"], "messages": ["messages_field"]}
    found = {kind: [name for name in names if getattr(source, name) is not None] for kind, names in keys.items()}
    named = {kind: names for kind, names in found.items() if names}
    if len(named) > 1:
        shown = " and ".join(f"{key}.{names[0]}" for names in named.values())
        raise MegabatchError(f"{shown} are set, and a row is one of text, prompt and response, and chat; keep one")
    return next(iter(named), None)


def seen_kind(row: Row, key: str) -> str:
    """The kind that a row's fields have by default."""
    if "messages" in row.fields:
        return "messages"
    if {"prompt", "response"} <= row.fields.keys():
        return "prompt"
    if "text" in row.fields:
        return "text"
    raise MegabatchError(
        f"{row.name} has the fields {fields_text(row)}; say which to learn: set {key}.prompt_field and "
        f"{key}.response_field, or {key}.messages_field, or {key}.text_field"
    )


def check_fields(kind: RowKind, first: Row, key: str) -> None:
    """Raise where the first row lacks a field: that is the recipe's mistake, not the row's."""
    for name, field in kind.fields.items():
        if field not in first.fields:
            raise MegabatchError(
                f"{first.name} has no field {field!r}, only {fields_text(first)}; set {key}.{name} to the field to read"
            )


def fields_text(row: Row) -> str:
    """The names of a row's fields, the first dozen of them."""
    names = [repr(name) for name in row.fields]
    return ", ".join(names[:12] + ["..."] * (len(names) > 12)) or "none"

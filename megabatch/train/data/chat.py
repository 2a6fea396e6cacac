"""Chat: conversations as the tokenizer's own template writes them; what the assistant says is learned."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, cast

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from megabatch.batching import IGNORED_LABEL
from megabatch.errors import MegabatchError
from megabatch.train.data.rows import BrokenRowError, Row
from megabatch.train.data.tokens import Ids, Tokens, is_text

Message = dict[str, Any]
Span = tuple[int, int]  # characters of a conversation's text
TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
DAY = datetime(2025, 1, 1, tzinfo=UTC)  # what a template takes for today, so that data are the same on every day
MARKS = re.compile(r"{%-?\s*generation\s*-?%}")


class ChatRows:
    """Conversations: lists of messages, {role, content}, of which the assistant's are learned, with their ends.

    The template says which characters those are where it has {% generation %}; else a turn is what comes after the
    text before it with its generation prompt. A token is learned if it ends in them.
    """

    def __init__(self, field: str, key: str, tokens: Tokens) -> None:
        self.fields = {"messages_field": field}
        self._field, self._key, self._tokens = field, key, tokens
        self._template = dated(template_of(tokens.tokenizer, key))
        self._is_marked = MARKS.search(self._template) is not None

    def read(self, row: Row) -> tuple[str, list[Message]]:
        messages = row.fields.get(self._field)
        if not isinstance(messages, list) or not messages:
            raise BrokenRowError(f"{row.name} has no list of messages in the field {self._field!r}")
        checked = [message_of(message, f"{row.name}, message {n},") for n, message in enumerate(cast(Any, messages), 1)]
        if not any(message["role"] == "assistant" for message in checked):
            raise BrokenRowError(f'{row.name} has no message of the role "assistant", so no token to learn')
        return row.name, checked

    def encode(self, contents: Sequence[tuple[str, list[Message]]]) -> list[Any]:
        return [self._encode_one(name, messages) for name, messages in contents]

    def _encode_one(self, name: str, messages: list[Message]) -> tuple[Ids, Ids] | BrokenRowError:
        try:
            text, spans = self._marked(messages) if self._is_marked else self._prefixed(name, messages)
        except BrokenRowError as error:
            return error
        except MegabatchError:
            raise
        except Exception as error:  # a template is a program, and raises what it likes
            return BrokenRowError(f"{name} is refused by the chat template ({' '.join(str(error).split())[:200]})")
        if not is_text(text):
            return BrokenRowError(f"{name} has half of a surrogate pair in its messages, which is no text")
        ids, is_learned = self._tokens_of(text, spans)
        return ids, np.where(is_learned, ids, IGNORED_LABEL)

    def _marked(self, messages: list[Message]) -> tuple[str, list[Span]]:
        special = self._tokens.tokenizer.special_tokens_map
        texts, spans = render_jinja_template(
            conversations=[messages], chat_template=self._template, return_assistant_tokens_mask=True, **special
        )
        return texts[0], cast(list[list[Span]], spans)[0]

    def _prefixed(self, name: str, messages: list[Message]) -> tuple[str, list[Span]]:
        if messages[0]["role"] == "assistant":
            raise BrokenRowError(f"{name} begins with the assistant, which has nothing to answer")
        whole, spans = self._render(messages), list[Span]()
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                before, after = self._render(messages[:turn], prompt=True), self._render(messages[: turn + 1])
                if not whole.startswith(after) or not after.startswith(before):
                    raise MegabatchError(self._no_prefix(name, turn))
                spans.append((len(before), len(after)))
        return whole, spans

    def _no_prefix(self, name: str, turn: int) -> str:
        return (
            f"the chat template writes {name} otherwise up to its message {turn + 1} than as a whole, so what the "
            "assistant said cannot be found; put {% generation %} and {% endgeneration %} around it in the template of "
            "model.tokenizer"
        )

    def _render(self, messages: list[Message], *, prompt: bool = False) -> str:
        render = self._tokens.tokenizer.apply_chat_template
        return cast(str, render(messages, tokenize=False, add_generation_prompt=prompt, chat_template=self._template))

    def _tokens_of(self, text: str, spans: list[Span]) -> tuple[Ids, np.ndarray]:
        """Token ids [T] and which of them are learned [T]."""
        if not self._tokens.tokenizer.is_fast:
            return self._tokens_of_pieces(text, spans)
        encoding = self._tokens.encoding([text], return_offsets_mapping=True)
        ends = np.array([end for _, end in encoding["offset_mapping"][0]], dtype=np.int64)  # [T]
        is_learned = np.zeros(len(ends), dtype=bool)
        for start, end in spans:
            is_learned |= (start < ends) & (ends <= end)
        return np.array(encoding["input_ids"][0], dtype=np.int64), is_learned

    def _tokens_of_pieces(self, text: str, spans: list[Span]) -> tuple[Ids, np.ndarray]:
        """The same of a tokenizer that does not say where its tokens are: each piece by itself."""
        cuts = [0, *(cut for span in spans for cut in span), len(text)]
        pieces = self._tokens.ids_of([text[start:end] for start, end in pairwise(cuts)])
        learned = [np.full(len(ids), index % 2 == 1) for index, ids in enumerate(pieces)]
        return np.concatenate(pieces), np.concatenate(learned)


def dated(template: str) -> str:
    """The template, for which today is `DAY`."""
    return TODAY.sub(lambda found: repr(DAY.strftime(found[2])), template)


def message_of(message: Any, name: str) -> Message:
    """A message, checked, without fields that are None, as tables fill them in."""
    if not isinstance(message, dict) or not isinstance(cast(Message, message).get("role"), str):
        seen = sorted(cast(Message, message)) if isinstance(message, dict) else type(message).__name__
        raise BrokenRowError(f"{name} is {seen}, not an object with the fields role and content")
    if not has_text(kept := {field: value for field, value in cast(Message, message).items() if value is not None}):
        raise BrokenRowError(f"{name} has neither text in its field content nor tool_calls")
    return kept


def has_text(message: Message) -> bool:
    """Whether there is something for a template to write: a text, parts of one, or calls of tools."""
    return isinstance(message.get("content"), str | list) or "tool_calls" in message


def template_of(tokenizer: Any, key: str) -> str:
    """The tokenizer's chat template."""
    try:
        return cast(str, tokenizer.get_chat_template())
    except ValueError:
        raise MegabatchError(
            f"{key} has chats and the tokenizer has no chat template; set model.tokenizer to one that has, or "
            f"{key}.prompt_field and {key}.response_field to fields of plain text"
        ) from None

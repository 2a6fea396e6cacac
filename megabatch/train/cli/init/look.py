"""Look: what data is, by its ending and its first good row, and which of its fields are learned."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from megabatch.errors import MegabatchError
from megabatch.train.config import SourceConfig
from megabatch.train.data.sources import place_of

STDLIB = "stdlib"
CHATS = ("messages", "conversation", "conversations", "chat")
PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("query", "response"),
    ("input", "output"),
)
TEXTS = ("text", "content", "document", "body")

Shape = Literal["text", "pairs", "chat"]


@dataclass(frozen=True)
class Looked:
    """A source as keys of [data], and what its rows are; None: on the hub, not looked at."""

    keys: Mapping[str, str]
    shape: Shape | None
    unread: tuple[str, ...] = ()  # fields of a row that are not learned from

    @property
    def name(self) -> str:
        """What a person calls it."""
        return self.keys.get("path", "the functions of Python's standard library")


def look(text: str) -> Looked:
    """ "stdlib", a file, a glob, a folder of save_to_disk or a name of the hub. Raises `MegabatchError` where it is
    none of them, or its rows have no field that is known."""
    name = text.strip()
    if name == STDLIB:
        return Looked({"source": STDLIB}, "pairs")
    source = SourceConfig(path=name)
    if place_of(source, "data").kind == "hub":
        return Looked({"path": name}, None)
    return looked(name, *first_row(source))


def first_row(source: SourceConfig) -> tuple[str, Mapping[str, Any]]:
    """Name and fields of the first row that can be read."""
    from megabatch.train.data.sources import Row, rows_of  # datasets takes a second

    for row in rows_of(source, "data"):
        if isinstance(row, Row):
            return row.name, row.fields
    raise MegabatchError(f"{source.path} has no row that can be read; name data with at least one")


def looked(path: str, row: str, fields: Mapping[str, Any]) -> Looked:
    """What a row of these fields is."""
    shape, keys = shape_of(row, fields)
    unread = tuple(name for name in fields if name not in keys.values())
    return Looked({"path": path, **keys}, shape, unread)


def shape_of(row: str, fields: Mapping[str, Any]) -> tuple[Shape, dict[str, str]]:
    """A chat, a prompt and its response, or text, whichever is found first; and the keys that name its fields."""
    for name in CHATS:
        if is_chat(fields.get(name)):
            return "chat", {"messages_field": name}
    for prompt, response in PAIRS:
        if isinstance(fields.get(prompt), str) and isinstance(fields.get(response), str):
            return "pairs", {"prompt_field": prompt, "response_field": response}
    for name in TEXTS:
        if isinstance(fields.get(name), str):
            return "text", {"text_field": name}
    names = ", ".join(map(repr, [*fields][:12])) or "none"
    raise MegabatchError(
        f"{row} has the fields {names}, of which none is known as text, a prompt and its response, or messages; "
        "rename them, or begin with recipes/gsm8k.toml, which names its fields"
    )


def is_chat(value: object) -> bool:
    """Whether it is a list of messages, {role, content}."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(each, dict) and {"role", "content"} <= {*cast(Any, each)} for each in cast(list[Any], value))

"""Tokenizer: the one that the recipe names, that of its model, or bytes."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, ByT5Tokenizer

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.config import ModelConfig
from megabatch.train.model.silence import quiet

BYTES, BYTES_CLASS = "bytes", "ByT5Tokenizer"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
)


def load_tokenizer(config: ModelConfig) -> Any:
    """The recipe's tokenizer; None for a model.function that names none. Raises `MegabatchError` in one line."""
    if config.tokenizer is None and config.function is not None:
        return None
    source = config.tokenizer or config.name or BYTES
    if source == BYTES:
        return ByT5Tokenizer()
    return read_tokenizer(source, "model.name" if config.tokenizer is None else "model.tokenizer")


def read_tokenizer(source: str, key: str) -> Any:
    """The tokenizer in a folder or of a hub id, which the recipe gives as ``key``."""
    if Path(source).is_dir() and not any((Path(source) / name).exists() for name in TOKENIZER_FILES):
        raise MegabatchError(
            f"{key} is {source!r}, a folder without tokenizer files (tokenizer.json, say); "
            'set model.tokenizer to a folder or hub id that has one, or to "bytes"'
        )
    try:
        with quiet():
            if is_bytes(Path(source)):  # of some families, AutoTokenizer insists on another class
                return ByT5Tokenizer.from_pretrained(source)
            return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # whatever its reader, or the way to the hub, raises
        raise MegabatchError(
            f"no tokenizer for {key} = {source!r} ({in_one_line(error)}); "
            'set model.tokenizer to a folder, to an id of the hub that can be reached from here, or to "bytes"'
        ) from None


def is_bytes(folder: Path) -> bool:
    """Whether a folder has the tokenizer of bytes."""
    described = folder / "tokenizer_config.json"
    if not described.is_file():
        return False
    return json.loads(described.read_text(encoding="utf-8")).get("tokenizer_class") == BYTES_CLASS

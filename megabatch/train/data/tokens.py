"""Tokens: texts as token ids, in batches, the same way whatever the tokenizer is."""

import hashlib
import json
import re
from typing import Any, cast

import numpy as np
from transformers import ByT5Tokenizer

from megabatch.errors import MegabatchError

Ids = np.ndarray  # [T] int64


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
        """What the tokenizer itself puts before a text: the token of the beginning, or nothing."""
        plain, whole = (self.tokenizer("a", add_special_tokens=add)["input_ids"] for add in (False, True))
        starts = [at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain]
        return np.array(whole[: starts[0]] if starts else [], dtype=np.int64)

    def ids_of(self, texts: list[str]) -> list[Ids]:
        """The token ids of each text, without special ones before or after it."""
        if isinstance(self.tokenizer, ByT5Tokenizer):
            return [self._byte_ids(text) for text in texts]
        rows = cast(list[list[int]], self.encoding(texts)["input_ids"]) if texts else []
        return [np.array(row, dtype=np.int64) for row in rows]

    def _byte_ids(self, text: str) -> Ids:
        """What ByT5 makes of a text; without special tokens in it, the same a hundred times as fast."""
        if self._special.search(text):
            return np.array(self.encoding([text])["input_ids"][0], dtype=np.int64)
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) + self.tokenizer.offset

    def encoding(self, texts: list[str], **options: Any) -> Any:
        """What the tokenizer makes of texts. verbose=False: a text longer than its model takes is no matter here."""
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False, **options)

    def fingerprint(self) -> str:
        """Names everything that tokens depend on."""
        tokenizer = self.tokenizer
        front_and_end = [self.front.tolist(), tokenizer.eos_token_id]  # first: it undoes what others have set
        backend = getattr(tokenizer, "backend_tokenizer", None)
        body = json.dumps(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
        special = json.dumps([tokenizer.special_tokens_map, tokenizer.chat_template], default=str, sort_keys=True)
        return sha256_of(type(tokenizer).__qualname__, body, special, json.dumps(front_and_end))


def is_text(text: str) -> bool:
    """Whether it is Unicode: half of a surrogate pair, which JSON can write, is none, and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def sha256_of(*texts: str) -> str:
    """One name for several texts, whatever is in them."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()

"""Classification of text without code: the model, the samples and the metric that a recipe of `megabatch init` names.

The loss is megabatch.losses:classification: a sum over samples, and their number.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, ModernBertConfig, ModernBertForSequenceClassification

from megabatch.errors import MegabatchError
from megabatch.train.config import ModelConfig, SourceConfig
from megabatch.train.data.sources import BrokenRowError, Row, rows_of
from megabatch.train.model.architecture import load_tokenizer, silence

# Bytes, and the few other tokens of ByT5.
BYTE_TOKENS = 384
KEY = "data.options"


def model(labels: Sequence[str], name: str | None = None, **sizes: Any) -> nn.Module:
    """Return a model with a head for ``labels``.

    Args:
        labels: The classes, in the order of their logits.
        name: A model of the hub or a folder, whose head is new; None: a ModernBERT on bytes with fresh weights.
        sizes: Keyword arguments of transformers' ModernBertConfig, without ``name``.
    """
    names = dict(enumerate(labels))
    classes: dict[str, Any] = {"id2label": names, "label2id": {label: number for number, label in names.items()}}
    if name is None:
        ends = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
        config = ModernBertConfig(
            vocab_size=BYTE_TOKENS, classifier_pooling="mean", pad_token_id=0, **ends, **classes, **sizes
        )
        return ModernBertForSequenceClassification(config)
    with silence():
        classifier = cast(Any, AutoModelForSequenceClassification).from_pretrained(name, **classes)
    # A decoder finds the last token by its padding.
    if classifier.config.pad_token_id is None:
        classifier.config.pad_token_id = classifier.config.eos_token_id
    return classifier


def data(
    path: str | list[str],
    labels: Sequence[str],
    text_field: str = "text",
    label_field: str = "label",
    max_tokens: int = 512,
    tokenizer: str = "bytes",
    broken_rows: Literal["stop", "skip"] = "stop",
) -> list[dict[str, Tensor]]:
    """Return the rows as samples {"input_ids": [T], "attention_mask": [T], "labels": []}; longer texts are cut.

    Raises:
        MegabatchError: A row has a label that ``labels`` lacks; with "stop" also one that cannot be read or has no
            text or no label.
    """
    encode, numbers = load_tokenizer(ModelConfig(tokenizer=tokenizer)), {label: at for at, label in enumerate(labels)}
    samples: list[dict[str, Tensor]] = []
    for row in rows_of(SourceConfig(path=path), KEY):
        try:
            if isinstance(row, BrokenRowError):
                raise row
            text, label = text_at(row, text_field, "text_field"), text_at(row, label_field, "label_field")
        except BrokenRowError as error:
            if broken_rows == "skip":
                continue
            raise MegabatchError(f'{error}; mend it, or leave such rows out with {KEY}.broken_rows = "skip"') from None
        if label not in numbers:
            raise MegabatchError(
                f"{row.name} has the label {label!r}, and {KEY}.labels has {', '.join(labels)}; add it there and in "
                "model.options.labels, or mend the row"
            )
        ids = torch.tensor(encode(text, truncation=True, max_length=max_tokens)["input_ids"])  # [T]
        label_id = torch.tensor(numbers[label])
        samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": label_id})
    if not samples:
        raise MegabatchError(f"{path} has no row that can be used; set {KEY}.path, or its fields")
    return samples


def text_at(row: Row, field: str, option: str) -> str:
    value = row.fields.get(field)
    if value is None or not str(value).strip():
        problem = "is empty" if field in row.fields else f"is not among {', '.join(map(repr, row.fields))}"
        raise BrokenRowError(f"{row.name}: the field {field!r} {problem}, which {KEY}.{option} names")
    return str(value) if option == "text_field" else str(value).strip()


def accuracy(model: nn.Module, microbatch: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """Return the number of samples whose likeliest class is right, and their number."""
    inputs = {name: value for name, value in microbatch.items() if name != "labels"}
    right = model(**inputs).logits.argmax(-1) == microbatch["labels"]  # [B]
    return {"accuracy": (right.sum(), len(right))}

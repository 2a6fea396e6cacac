"""Sequence classification: from which package a function is. megabatch train recipes/classification.toml

The weight is a number of samples. The trap: the mean over a microbatch, averaged over microbatches, gives the samples
of a short last one more than their share; which one is short depends on the cut.
"""

import ast
from itertools import islice
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
FIRST, OFFSET = 1, 3  # the token before a text, from which its class is read; bytes come after the three special ones


def model(**sizes):
    special = {"vocab_size": 256 + OFFSET, "num_labels": len(PACKAGES), "pad_token_id": 0}
    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **special, **sizes)
    return BertForSequenceClassification(config)


def functions(package):
    for path in sorted((Path(ast.__file__).parent / package).rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        yield from (ast.unparse(node) for node in nodes if isinstance(node, ast.FunctionDef))


def data(per_package, max_tokens):
    samples = []
    for label, package in enumerate(PACKAGES):
        for text in islice(functions(package), per_package):
            ids = torch.tensor([FIRST, *(byte + OFFSET for byte in text.encode()[: max_tokens - 1])])
            samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(label)})
    return samples


def metrics(model, microbatch):
    inputs = {name: value for name, value in microbatch.items() if name != "labels"}
    return {"right": ((model(**inputs).logits.argmax(-1) == microbatch["labels"]).sum(), len(microbatch["labels"]))}

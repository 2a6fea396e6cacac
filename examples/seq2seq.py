"""Sequence to sequence: the name of a function from its docstring. megabatch train recipes/seq2seq.toml

The weight is a number of target tokens, of the decoder. The trap: counting pairs, or the tokens of the source, by which
microbatches are cut but nothing is learned.
"""

import ast
from pathlib import Path

import torch
from transformers import T5Config, T5ForConditionalGeneration

START, END, OFFSET = 0, 1, 3  # START is the padding, too; bytes come after the three special tokens


def model(**sizes):
    special = {"decoder_start_token_id": START, "pad_token_id": START, "eos_token_id": END}
    return T5ForConditionalGeneration(T5Config(vocab_size=256 + OFFSET, dropout_rate=0.0, **special, **sizes))


def pairs(files):
    for path in sorted(Path(ast.__file__).parent.glob(files)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield text, node.name


def data(files, max_tokens):
    samples = []
    for text, name in pairs(files):
        source, target = ([byte + OFFSET for byte in each.encode()] for each in (text, name))
        ids, labels = torch.tensor(source[:max_tokens]), torch.tensor([*target, END])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        samples.append({**inputs, "decoder_input_ids": torch.tensor([START, *target]), "labels": labels})
    return samples

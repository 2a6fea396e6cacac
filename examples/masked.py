"""Masked language modeling, on the topics of Python's help(). megabatch train recipes/masked.toml

The weight is a number of masked tokens, of which microbatches have unequal numbers: the trap is the mean of means. And
another: a collator that draws masks for a microbatch draws others under another cut. Here they belong to the sample.
"""

from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM

MASK, OFFSET = 2, 3  # bytes come after the three special tokens


def model(**sizes):
    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, vocab_size=256 + OFFSET, **sizes)
    return BertForMaskedLM(config)


class Masked(Dataset):
    def __init__(self, texts, num_draws):
        self.texts, self.num_draws = texts, num_draws
        self.lengths = [len(text) for text in texts] * num_draws

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)  # the same under any cut, and on any rank
        ids = torch.tensor(list(self.texts[index % len(self.texts)])) + OFFSET
        is_target, way = torch.rand(len(ids), generator=draw) < 0.15, torch.rand(len(ids), generator=draw)
        others = torch.randint(OFFSET, 256 + OFFSET, ids.shape, generator=draw)
        shown = torch.where(way < 0.8, MASK, torch.where(way < 0.9, others, ids))  # of ten, eight, one and one
        inputs = {"input_ids": torch.where(is_target, shown, ids), "attention_mask": torch.ones_like(ids)}
        return {**inputs, "labels": torch.where(is_target, ids, -100)}


def data(max_tokens, num_draws):
    parts = [part.encode()[:max_tokens] for text in topics.values() for part in text.split("\n\n")]
    return Masked([part for part in parts if len(part) > 40], num_draws)

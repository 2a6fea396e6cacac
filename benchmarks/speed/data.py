"""The samples of two updates, drawn once and given to every contestant. Text is read as bytes."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers.trainer_pt_utils import LengthGroupedSampler

from benchmarks.speed.setting import NUM_MEASURED, Setting
from megabatch.train.data.stdlib import SKIPPED_FOLDERS, functions_of, stdlib_root

NAMES = {"gsm8k": "GSM8K", "stdlib": "standard library", "rollouts": "rollouts"}
MIN_BYTES = 100
ROLLOUTS, MEDIAN_TOKENS, SPREAD = 4096, 200, 0.9  # log-normal, a tenth of them over three times the median
Ids = list[int]


def pool(name: str, longest: int, gsm8k: Path, *, quick: bool = False) -> list[Ids]:
    """Return a data set up to a length: questions with answers, Python functions, or random tokens of rollout lengths.

    The lengths of rollouts are log-normal with a long tail, cut at the longest, as those of reinforcement learning.
    """
    if name == "rollouts":
        generator = np.random.default_rng(0)
        lengths = np.exp(generator.normal(np.log(MEDIAN_TOKENS), SPREAD, ROLLOUTS)).clip(16, longest).astype(int)
        return [generator.integers(3, 259, length).tolist() for length in lengths]
    if name == "gsm8k":
        rows = map(json.loads, gsm8k.read_text(encoding="utf-8").splitlines())
        texts = [f"{row['question']}\n{row['answer']}" for row in rows]
    else:
        texts = list(functions(stdlib_root() / "asyncio" if quick else stdlib_root()))
    return [[byte + 3 for byte in text.encode()] for text in texts if len(text.encode()) <= longest]


def functions(root: Path) -> Iterator[str]:
    """The functions of the modules in a folder, as they stand in the file, each text once; those of a line or two left
    out."""
    texts: dict[str, None] = {}
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            found = functions_of(path.read_text(encoding="utf-8", errors="replace"), path.name)
            texts |= dict.fromkeys(each.prompt + each.response for each in found)
    return (text for text in texts if len(text.encode()) >= MIN_BYTES)


def drawn(samples: Sequence[Ids], setting: Setting) -> list[Ids]:
    """The samples of the measured updates, in their order, the same for all: by chance, one of each of as many parts as
    there are to be samples, from the shortest part to the longest, so that few are as uneven as all."""
    generator = np.random.default_rng(0)
    by_length = sorted(range(len(samples)), key=lambda index: len(samples[index]))
    chosen = [generator.choice(part) for part in np.array_split(by_length, NUM_MEASURED * setting.update_size)]
    return [samples[index] for index in generator.permutation(chosen)]


def grouped(samples: Sequence[Ids], setting: Setting) -> list[Ids]:
    """What transformers' LengthGroupedSampler puts into two updates, at a quarter and three quarters of its first sort.

    Each of its updates has samples of one length, and its first sort is of 50 updates.
    """
    lengths = [len(sample) for sample in samples]
    sampler = LengthGroupedSampler(setting.update_size, lengths=lengths, generator=torch.Generator().manual_seed(0))
    order = list(sampler)
    num_updates = min(len(samples) // (4 * setting.update_size), 50) or 1
    starts = [num_updates * part // 4 * setting.update_size for part in (1, 3)]
    return [samples[index] for start in starts for index in order[start : start + setting.update_size]]

"""A tiny recipe on a tiny data set, and a way to run it."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoTokenizer

from megabatch.verification.float64_copy import Float64WithoutDropout
from tests.train.processes import Finished, Run, overrides
from tests.train.tokenizers_for_tests import chat_tokenizer

RECIPE = """
[model]
dtype = "float64"

[model.config]
model_type = "gpt2"
vocab_size = 384
n_embd = 16
n_layer = 2
n_head = 2
n_positions = 256
bos_token_id = 0
eos_token_id = 1
resid_pdrop = 0.1
embd_pdrop = 0.0
attn_pdrop = 0.0

[data]
source = "jsonl"
path = "{data}"

[update]
global_batch_size = 8
max_microbatch_tokens = 256
tail = "step"

[optim]
lr = 1e-2
warmup_steps = 2

[eval]
every = 2
num_samples = 5

[run]
folder = "{folder}"
keep_last = "none"
"""
NUM_SAMPLES = 50  # 45 to train on: five updates of 8, and one of 5
NO_DROPOUT = {"model__config__resid_pdrop": 0.0}


@dataclass(frozen=True)
class Bench:
    """A folder with a recipe and its data, in which runs are made."""

    path: Path
    names: Iterator[int]

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def folder(self) -> Path:
        """The folder of the recipe's run unless told otherwise."""
        return self.path / "run"

    def start(self, *, ranks: int = 1, recipe: Path | None = None, **values: Any) -> Run:
        values = {"data__cache": self.path / "cache", "run__verbose": "true", **values}
        arguments = ["train", str(recipe or self.recipe), *overrides(values)]
        return Run(arguments, self.path / f"logs{next(self.names)}", ranks)

    def finish(self, *, ranks: int = 1, recipe: Path | None = None, **values: Any) -> list[Finished]:
        return self.start(ranks=ranks, recipe=recipe, **values).wait()

    def train(self, *, ranks: int = 1, recipe: Path | None = None, **values: Any) -> str:
        """Run to a good end; what the main rank said."""
        finished = self.finish(ranks=ranks, recipe=recipe, **values)
        assert [each.status for each in finished] == [0] * ranks, "\n".join(each.err for each in finished)
        return finished[0].out

    def rows(self, folder: Path | None = None) -> list[dict[str, Any]]:
        return [json.loads(line) for line in ((folder or self.folder) / "metrics.jsonl").read_text().splitlines()]

    def losses(self, folder: Path | None = None) -> list[float]:
        return [row["loss"] for row in self.rows(folder) if "loss" in row]


OF_THE_CLOCK = (
    "tokens_per_second", "tokens_per_second_per_device", "mfu", "samples_per_second", "memory_gib",
    "measured_slowest_over_mean", "slowest_rank", "time", "seconds",
)  # fmt: skip


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without what the clock and the machine say; everything else must agree to the bit."""
    return [{key: row[key] for key in row if key not in OF_THE_CLOCK} for row in rows]


def states_of(checkpoint: Path, out: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, by its dotted name: weights and the optimizer's."""
    dcp_to_torch_save(checkpoint, out)
    tensors: dict[str, Any] = {}

    def walk(name: str, value: Any) -> None:
        for key, part in value.items() if isinstance(value, dict) else ():
            walk(f"{name}.{key}", part)
        if isinstance(value, torch.Tensor):
            tensors[name] = value

    walk("", torch.load(out, weights_only=False))
    return tensors


def write_pairs(path: Path, pairs: list[tuple[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt, "response": response}) + "\n" for prompt, response in pairs))
    return path


def some_pairs() -> list[tuple[str, str]]:
    """Prompts and responses of very different lengths; the longest sample has 150 bytes."""
    draw = random.Random(0)
    return [(f"count {'abc'[k % 3]} to {k}: ", "ab" * draw.choice([1, 3, 10, 60])) for k in range(NUM_SAMPLES)]


def bench_in(path: Path) -> Bench:
    data = write_pairs(path / "data.jsonl", some_pairs())
    bench = Bench(path, count())
    bench.recipe.write_text(RECIPE.format(data=data, folder=bench.folder))
    return bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return bench_in(tmp_path)


@pytest.fixture
def refuse(bench: Bench) -> Callable[..., str]:
    """Runs the recipe, which must end with status 2, one line, and nothing written; the line without its prefix."""

    def run(*, ranks: int = 1, recipe: Path | None = None, **values: Any) -> str:
        before = sorted(bench.folder.rglob("*"))
        finished = bench.finish(ranks=ranks, recipe=recipe, **values)
        assert [each.status for each in finished] == [2] * ranks, "\n".join(each.err for each in finished)
        lines = [line for each in finished for line in each.err.splitlines()]
        assert len(lines) == 1, "\n".join(lines)
        assert sorted(bench.folder.rglob("*")) == before
        return lines[0].removeprefix("megabatch: ")

    return run


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Norms of transformers' models compute in float32 otherwise, where the last bits depend on a batch's size."""
    with Float64WithoutDropout():
        yield


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Any]:
    """Tokenizers of the same tokens, with and without marks in their chat templates."""
    folders = {marks: tmp_path_factory.mktemp("tokenizer") for marks in (True, False)}
    return {
        marks: AutoTokenizer.from_pretrained(chat_tokenizer(folder, generation_markers=marks))
        for marks, folder in folders.items()
    }

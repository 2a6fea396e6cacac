"""Images of data.function: lengths that are told and not measured, and noise that evaluations have in common."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megabatch import GradientAccumulator
from megabatch.losses import classification
from megabatch.train.autotune.microbatch_limit import longest
from megabatch.train.config import EvalConfig
from megabatch.train.data.load import load_data
from megabatch.train.data.updates import Updates
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from tests.train.conftest import Bench, timeless
from tests.train.data_for_tests import load, recipe, updates_of
from tests.train.on_ranks import on_ranks

OWN = """
import random
import numpy as np
import torch
from torch import nn

class Images(list):
    pass

class Noisy:
    def __init__(self, number):
        self.images = images(number)
    def __len__(self):
        return len(self.images)
    def __getitem__(self, index):
        noise = torch.from_numpy(np.random.standard_normal((3, 4, 4)).astype("float32"))
        return self.images[index] | {"images": self.images[index]["images"] + noise}

def images(number):
    draw = torch.Generator().manual_seed(0)
    return [{"images": torch.randn(3, 4, 4, generator=draw), "labels": torch.tensor(k % 4)} for k in range(number)]

def patches():
    samples = Images(images(40))
    samples.lengths = [16 * (1 + k % 3) for k in range(40)]
    return samples

def plain():
    return images(40)

def noisy():
    return {"train": Noisy(40), "near": Noisy(6)}

class Drawing(list):
    def __getitem__(self, index):
        return {"x": torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])}

def drawing():
    return {"train": Drawing(range(30)), "other": Drawing(range(5))}

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 4))

def loss(model, microbatch):
    return nn.functional.cross_entropy(model(microbatch["images"]), microbatch["labels"], reduction="sum"), len(
        microbatch["labels"]
    )
"""
CAP = {"micro_batch_size": None, "max_microbatch_tokens": 64}
WAYS: dict[str, dict[str, Any]] = {"at once": {}, "workers": {"num_workers": 2}, "ahead": {"look_ahead": 0}}


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.linear(images.flatten(1))


def config_of(folder: Path, function: str, update: dict[str, Any] | None = None, **data: Any) -> Any:
    (folder / "own.py").write_text(OWN)
    return recipe(folder, data={"function": f"{folder / 'own.py'}:{function}", **data}, update=update or {})


def run(updates: Updates, update: Any, model: nn.Module) -> list[tuple[Any, Any, list[int]]]:
    """Each update, how it was cut, and the labels its microbatches had."""
    gradient = GradientAccumulator(
        model, micro_batch_size=update.micro_batch_size, max_microbatch_tokens=update.max_microbatch_tokens
    )
    found = []
    for samples in updates:
        sizes: list[int] = []

        def noting(model: Any, microbatch: Any, sizes: list[int] = sizes) -> Any:
            sizes.append(len(microbatch["labels"]))
            return classification(model, microbatch)

        gradient.forward_backward(samples, noting)
        found.append((gradient.finalize(), gradient.last_plan, sizes))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_told_lengths_are_what_is_counted(way: str, tmp_path: Path) -> None:
    """Samples of 16, 32 and 48 patches, where the images' first dim is 3."""
    config = config_of(tmp_path, "patches", CAP, **WAYS[way])
    updates = updates_of(config)
    found = run(updates, config.update, Linear())
    assert len(found) == 5
    assert sum(update.num_tokens for update, _, _ in found) == sum(16 * (1 + k % 3) for k in range(40))
    for update, plan, sizes in found:
        assert update.num_tokens == plan.num_tokens == sum(plan.lengths) <= plan.padded_tokens
        assert all(len(rows) * max(plan.lengths[row] for row in rows) <= 64 for rows in plan.microbatches)
        assert sizes == [len(rows) for rows in plan.microbatches]
        assert len(sizes) > 2
        assert max(sizes) > 1


@pytest.mark.parametrize("way", WAYS)
def test_a_bound_is_chosen_in_the_lengths_that_are_told(way: str, tmp_path: Path) -> None:
    """The longest has 48 patches, and three rows in its image's first dim."""
    config = config_of(tmp_path, "patches", {"micro_batch_size": None, "max_microbatch_tokens": "auto"}, **WAYS[way])
    data = load(config)
    updates, gradient = updates_of(config, data=data), GradientAccumulator(Linear())
    gradient.tune(longest(data, updates.peek()), classification)
    assert gradient.fit is not None
    assert gradient.fit.longest_tokens == 48
    assert gradient.fit.max_microbatch_tokens >= gradient.plan(updates.peek()).num_tokens > 48


def test_every_way_of_loading_makes_the_same_gradient(tmp_path: Path) -> None:
    gradients = []
    for data in WAYS.values():
        torch.manual_seed(0)
        config, model = config_of(tmp_path, "patches", CAP, **data), Linear()
        run(updates_of(config), config.update, model)
        gradients.append(model.linear.weight.grad)
    assert all(torch.equal(gradients[0], gradient) for gradient in gradients)


def test_a_look_ahead_of_images_without_lengths(tmp_path: Path) -> None:
    config = config_of(tmp_path, "plain", look_ahead=0)
    found = run(updates_of(config), config.update, Linear())
    assert [sizes for _, _, sizes in found] == [[4, 4]] * 5


def test_a_look_ahead_counts_the_tokens_of_text(tmp_path: Path) -> None:
    text = "import torch\ndef text():\n    return [{'input_ids': torch.ones(k + 1, dtype=int)} for k in range(9)]\n"
    (tmp_path / "text.py").write_text(text)
    data = {"function": f"{tmp_path / 'text.py'}:text"}
    for each in (data, {**data, "look_ahead": 0}):
        updates = updates_of(recipe(tmp_path, data=each))
        plans = [GradientAccumulator(Linear(), micro_batch_size=4).plan(samples) for samples in updates]
        assert sum(plan.num_tokens for plan in plans) == 45


def test_images_without_lengths_are_measured_where_they_are_cut(tmp_path: Path) -> None:
    assert isinstance(updates_of(config_of(tmp_path, "plain")).peek(), list)
    assert not load(config_of(tmp_path, "plain")).is_told


def on_rank(ranks: Ranks, folder: Path) -> list[tuple[int, int]]:
    config = config_of(folder / str(ranks.rank), "patches", {**CAP, "global_batch_size": 13})
    torch.manual_seed(0)
    data = load_data(config, None, ranks, Console(enabled=False, loss_digits=4))
    found = run(Updates(data, config, ranks), config.update, Linear())
    return [(update.num_tokens, update.num_samples) for update, _, _ in found]


@pytest.mark.slow
def test_a_rank_without_samples_runs_stand_ins_of_told_lengths(tmp_path: Path) -> None:
    """The last update has one sample, so that one of the ranks has none of it."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    one, other = on_ranks(2, tmp_path, on_rank, tmp_path)
    assert one == other
    assert [num_samples for _, num_samples in one] == [13, 13, 13, 1]
    assert sum(num_tokens for num_tokens, _ in one) == sum(16 * (1 + k % 3) for k in range(40))


def test_sets_to_evaluate_on_draw_the_same_whenever_they_are_read(tmp_path: Path) -> None:
    config = config_of(tmp_path, "drawing").model_copy(update={"eval": EvalConfig(num_samples=2)})
    data, again = load(config), load(config)
    other = load(config.model_copy(update={"run": config.run.model_copy(update={"seed": 1})}))
    for name, size in {"held-out": 2, "other": 5}.items():
        first = drawn_of(data.sets[name])
        assert drawn_of(data.sets[name]) == first == drawn_of(again.sets[name])
        assert set(drawn_of(other.sets[name])).isdisjoint(first)
        assert len(set(first)) == len(first) == size
    assert drawn_of(data.train) != drawn_of(data.train)  # of them the loader sees to it


def drawn_of(samples: Any) -> list[tuple[float, ...]]:
    """The numbers that each sample drew: by torch, numpy and random."""
    return [tuple(sample["x"].tolist()) for sample in samples]


RECIPE = """
[model]
function = "{own}:model"
[data]
function = "{own}:noisy"
[loss]
function = "{own}:loss"
[update]
global_batch_size = 8
micro_batch_size = 4
[optim]
schedule = "constant"
lr = {lr}
[eval]
every = 1
num_samples = 4
[run]
folder = "{folder}"
max_steps = {max_steps}
tensorboard = false
"""


@pytest.mark.slow
def test_noisy_samples_are_evaluated_with_the_same_noise(bench: Bench, tmp_path: Path) -> None:
    (bench.path / "own.py").write_text(OWN)

    def evaluations(folder: str, *max_steps: int, lr: float = 0.01) -> list[dict[str, Any]]:
        for number in max_steps:
            values = {"own": bench.path / "own.py", "folder": tmp_path / folder, "max_steps": number, "lr": lr}
            bench.recipe.write_text(RECIPE.format(**values))
            bench.train(run__resume=number > max_steps[0])
        return timeless([row for row in bench.rows(tmp_path / folder) if "set" in row])

    for name in ("held-out", "near"):  # a model that does not learn finds the same every time
        of_one = [row["eval_loss"] for row in evaluations(f"still {name}", 2, lr=0.0) if row["set"] == name]
        assert len(of_one) == 3
        assert len(set(of_one)) == 1
    whole = evaluations("whole", 4)
    assert len({row["eval_loss"] for row in whole}) == len(whole) == 10
    assert evaluations("resumed", 2, 4) == whole

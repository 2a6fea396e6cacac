"""A schedule of the batch size: the samples of each update, from any start, on any ranks; and what follows from it."""

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megabatch.errors import MegabatchError
from megabatch.planning.sampler import Consumed
from megabatch.train.config import OptimConfig
from megabatch.train.config.batch_size import BatchSizes, read_schedule, sizes_of
from megabatch.train.config.recipe import load_config
from megabatch.train.data.updates import NumUpdates
from megabatch.train.model.optimizer import follow, rate_factor
from megabatch.train.plan.grid import build_grid
from tests.train.conftest import Bench, timeless
from tests.train.data_for_tests import ids_of, load, updates_of, whole_updates
from tests.train.test_updates import KINDS, config_of
from tests.unit.failures.table import line_of

READ = {
    "[[0, 64]]": BatchSizes("updates", (0,), (64,)),
    "[[0, 64], [100, 256]]": BatchSizes("updates", (0, 100), (64, 256)),
    '[[0, 64], ["50M tokens", 256]]': BatchSizes("tokens", (0, 50_000_000), (64, 256)),
    '[["0 samples", 64], ["20k samples", 256], ["1.5B samples", 7]]': BatchSizes(
        "samples", (0, 20_000, 1_500_000_000), (64, 256, 7)
    ),
    '[[0, 4], ["1 update", 5], ["2_000 updates", 6]]': BatchSizes("updates", (0, 1, 2000), (4, 5, 6)),
}
REFUSED = {
    "[]": "is []; expected a number, or [[0, 64]",
    "[64]": "is [64]; expected a number, or [[0, 64]",
    "[[0, 64, 3]]": "is [[0, 64, 3]]; expected a number, or [[0, 64]",
    "[[0, 0]]": "has updates of 0 samples; expected a whole number of at least 1",
    "[[0, 2.5]]": "has updates of 2.5 samples; expected a whole number of at least 1",
    "[[0, true]]": "has updates of True samples; expected a whole number of at least 1",
    "[[3, 64]]": "begins at 3; the first size holds from 0 on: [[0, 64], ...]",
    '[["50M tokens", 64]]': "begins at '50M tokens'; the first size holds from 0 on",
    "[[0, 64], [9, 128], [9, 256]]": "goes from 9 to 9; put its points in increasing order",
    '[[0, 64], ["2k samples", 128], ["1k samples", 256]]': "goes from '2k samples' to '1k samples'; put its points",
    '[[0, 64], [100, 128], ["50M tokens", 256]]': "has points in tokens and in updates, which have no order",
    '[[0, 64], ["50 M", 256]]': "has the point '50 M'; expected a number of updates, or",
    '[[0, 64], ["1.5 tokens", 256]]': "has the point '1.5 tokens'; expected a number of updates, or",
    "[[0, 64], [-3, 256]]": "has the point -3; expected a number of updates, or",
    "[[0, 64], [1.5, 256]]": "has the point 1.5; expected a number of updates, or",
}
SCHEDULES = {
    "updates": [[0, 3], [4, 8], [7, 5]],
    "samples": [[0, 3], ["10 samples", 8], ["30 samples", 5]],
    "tokens": [[0, 3], ["0.06k tokens", 8], ["150 tokens", 5]],
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text("[model.config]\nmodel_type = 'gpt2'\n[update]\nglobal_batch_size = 4\n")
    return path


@pytest.mark.parametrize("text", READ)
def test_a_schedule_is_read(text: str, recipe: Path) -> None:
    config = load_config(recipe, [f"--update.global_batch_size={text}"])
    assert sizes_of(config.update) == READ[text]
    recipe.write_text(f"[model.config]\nmodel_type = 'gpt2'\n[update]\nglobal_batch_size = {text}\n")
    assert load_config(recipe, []) == config


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_schedule_is_refused_in_one_line(text: str, recipe: Path) -> None:
    assert line_of(lambda: load_config(recipe, [f"--update.global_batch_size={text}"])).startswith(
        f"update.global_batch_size {REFUSED[text]}"
    )


def test_a_size_holds_from_its_point_on() -> None:
    sizes = read_schedule([[0, 4], ["10 samples", 8]])
    assert [sizes(Consumed(samples=number)) for number in (0, 9, 10, 11)] == [4, 4, 8, 8]
    assert (str(sizes), sizes.largest) == ("4 samples, 8 after 10 samples", 8)
    assert str(read_schedule([[0, 4], [1, 8], [2000, 2]])) == "4 samples, 8 after 1 update, 2 after 2,000 updates"


def test_a_rate_follows_a_schedule_alone(recipe: Path) -> None:
    with pytest.raises(MegabatchError, match=r'^optim.lr_follows_batch is "sqrt" and all updates have 4 samples; give'):
        load_config(recipe, ["--optim.lr_follows_batch=sqrt"])


def test_a_rate_goes_with_the_root_of_the_size() -> None:
    sizes = read_schedule([[0, 4], [1, 9], [2, 1]])
    factors = [rate_factor(OptimConfig(lr_follows_batch="sqrt"), sizes, size) for size in sizes.sizes]
    assert factors == [1.0, 1.5, 0.5]
    assert rate_factor(OptimConfig(), sizes, 9) == 1.0


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_a_rate_is_multiplied_once(rate: Any) -> None:
    """Also where an update was not stepped, after which the scheduler has set nothing."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for factor, expected in ((2.0, 1.0), (2.0, 1.0), (4.0, 2.0)):
        follow(optimizer, scheduler, factor)
        assert float(optimizer.param_groups[0]["lr"]) == expected
    optimizer.step()
    scheduler.step()
    follow(optimizer, scheduler, 4.0)
    assert float(optimizer.param_groups[0]["lr"]) == 1.0


def walked(seen: list[tuple[int, int]], sizes: BatchSizes) -> list[int]:
    """The size that each update should have, by the samples and tokens of those before it."""
    sums = [Consumed(n, sum(a for a, _ in seen[:n]), sum(b for _, b in seen[:n])) for n in range(len(seen))]
    return [sizes(each) for each in sums]


IN_TOKENS = [
    kind for kind in KINDS if kind != "function"
]  # whose samples here are arrays, of which nothing is measured


@pytest.mark.parametrize(
    ("unit", "kind"),
    [*product(["tokens"], IN_TOKENS), *product(["updates", "samples"], ["plain", "stream", "weighted", "function"])],
)
def test_updates_grow_the_same_from_any_start_on_any_ranks(kind: str, unit: str, tmp_path: Path) -> None:
    tail = {"updates": "step", "samples": "carry", "tokens": "step"}[unit]
    if kind == "weighted":
        tail = "drop"
    config = config_of(kind, tmp_path, update={"global_batch_size": SCHEDULES[unit], "tail": tail})
    data = load(config)
    alone = whole_updates(config, 1, data)
    assert whole_updates(config, 3, data) == alone
    should = walked([(len(update), sum(map(len, update))) for update in alone], sizes_of(config.update))
    short = [number for number, update in enumerate(alone) if len(update) != should[number]]
    assert len(short) <= (2 if tail == "step" else 0)  # one at the end of each epoch
    assert len(set(should)) == 3 or kind == "packed"  # whose rows are few
    running, found = updates_of(config, 1, 2, data), []
    assert running.num_updates.of_data == (None if "stream" in kind else len(alone))
    states = [running.state_dict()]
    for update in running:
        found.append(ids_of(update))
        assert running.size == should[len(found) - 1]
        states.append(json.loads(json.dumps(running.state_dict())))
    for number, state in enumerate(states[::4]):
        resumed = updates_of(config, 1, 2, data)
        resumed.load_state_dict(state)
        assert [ids_of(update) for update in resumed] == found[4 * number :]
        assert resumed.state_dict() == states[-1]


def test_work_is_counted_in_samples(tmp_path: Path) -> None:
    config = config_of("plain", tmp_path, update={"global_batch_size": SCHEDULES["updates"]})
    counted = updates_of(config).num_updates  # 35 samples twice: 3 3 3 3 8 8 7, 5 5 5 5 5 5 5
    assert [counted.work(step) for step in (0, 1, 4, 7, 14)] == [0, 3, 12, 35, 70]
    assert (counted.of_data, counted.of_run) == (14, 14)
    assert updates_of(config_of("plain", tmp_path)).num_updates.work(3) == 3


def test_a_stream_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    running = updates_of(config_of("stream", tmp_path))
    next(iter(running))
    state = {key: value for key, value in running.state_dict().items() if key != "seen"}
    resumed = updates_of(config_of("stream", tmp_path))
    resumed.load_state_dict(state)
    assert len(list(resumed)) == len(list(updates_of(config_of("stream", tmp_path)))) - 1


def test_what_data_cannot_follow_is_refused(tmp_path: Path) -> None:
    drops = {"global_batch_size": [[0, 4], [2, 36]], "tail": "drop"}
    with pytest.raises(
        MegabatchError, match=r"goes to 36 samples, an epoch has 35, and update.tail=.drop. would leave"
    ):
        updates_of(config_of("plain", tmp_path, update=drops))
    (tmp_path / "pictures.py").write_text(
        "import torch\ndef samples():\n    return [{'x': torch.ones(2), 'y': torch.ones(1)}] * 9\n"
    )
    own = {"function": f"{tmp_path / 'pictures.py'}:samples"}
    config = config_of("function", tmp_path, data=own, update={"global_batch_size": SCHEDULES["tokens"]})
    with pytest.raises(MegabatchError, match=r"in tokens, and the samples of data\.function have no input_ids"):
        updates_of(config)


def test_a_plan_is_of_the_largest_update(tmp_path: Path) -> None:
    config = config_of("plain", tmp_path, update={"global_batch_size": [[0, 4], [2, 36], [3, 8]]})
    assert build_grid(config, set(), "ddp", 2, 9).samples_per_rank == 18


SCHEDULE: dict[str, Any] = {
    "update__global_batch_size": '[[0, 4], ["600 tokens", 9]]',
    "optim__lr_follows_batch": "sqrt",
    "run__max_epochs": 2,
}


@pytest.mark.slow
def test_a_run_that_is_stopped_grows_as_if_never_stopped(bench: Bench, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    said = bench.train(run__folder=whole, **SCHEDULE)
    for last in (2, 6, None):
        stop = {} if last is None else {"run__max_steps": last}
        bench.train(run__resume=last != 2, **stop, **SCHEDULE)
    rows = [row for row in bench.rows(whole) if "loss" in row]
    assert timeless(bench.rows()) == timeless(bench.rows(whole))
    should = walked(
        [(row["num_samples"], row["num_tokens"]) for row in rows], read_schedule([[0, 4], ["600 tokens", 9]])
    )
    assert [row["num_samples"] for row in rows] != [4] * len(rows)
    num_short = sum(row["num_samples"] != size for row, size in zip(rows, should, strict=True))
    assert num_short == said.count("its last update was stepped exactly: ") == 1  # of the two epochs
    assert f"{len(rows)} updates of 4 samples, 9 after 600 tokens (update.global_batch_size) on 1 rank" in said
    plain = tmp_path / "plain"
    bench.train(run__folder=plain, **{**SCHEDULE, "optim__lr_follows_batch": "none"})
    rates = [row["lr"] for row in bench.rows(plain) if "loss" in row]
    assert [row["lr"] for row in rows] == [rate * math.sqrt(size / 4) for rate, size in zip(rates, should, strict=True)]
    assert rates[0] == pytest.approx(1e-2 / 3)  # of the warmup: optim.lr is that of the first size


def test_a_run_that_has_gone_on_beyond_its_data_has_done_all_its_work() -> None:
    counted = NumUpdates(3, 3, np.array([4, 8, 16]))
    assert [counted.work(step) for step in (0, 1, 3, 9)] == [0, 4, 16, 16]

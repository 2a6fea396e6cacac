"""Metrics: the rows, what a resumed run keeps of them, and the same numbers for TensorBoard."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from megabatch import GradientAccumulator, MegabatchError, loss, losses
from megabatch.train.callbacks.loggers import Logger, make_loggers
from megabatch.train.callbacks.metrics import MetricsFile, UpdateClock, read_rows, sums_of, update_row
from megabatch.train.config import Config, ModelConfig, RunConfig, UpdateConfig
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"))


def loggers(folder: Path) -> list[Logger]:
    """TensorBoard's alone, as a recipe has it by default."""
    run, update = RunConfig(folder=str(folder)), UpdateConfig(global_batch_size=1)
    config = Config(model=ModelConfig(function="a:b"), update=update, run=run)
    return make_loggers(config, ALONE, Console(enabled=True, loss_digits=4))


def update(step: int, loss: float | None = None) -> dict[str, Any]:
    return {"step": step, "loss": step / 2 if loss is None else loss, "grad_norm": None, "lr": 1e-3}


def evaluation(step: int, name: str) -> dict[str, Any]:
    return {"step": step, "set": name, "eval_loss": step + 0.25, "eval_own": 1, "num_target_tokens": 7}


def write_run(folder: Path, last: int, *, first: int = 0, every: int = 2, tensorboard: bool = True) -> None:
    """The rows of a run that goes from one step to another, and evaluates at its end."""
    folder.mkdir(exist_ok=True)
    if first:
        time.sleep(1 - time.time() % 1)  # TensorBoard orders its files by the second of their start
    metrics = MetricsFile(folder, enabled=True, loggers=loggers(folder) if tensorboard else ())
    if first:
        metrics.cut(first, every)
    for step in range(first, last + 1):
        if step > first:
            metrics.append(update(step))
        if (step % every == 0 and (step > first or first == 0)) or step == last:
            for name in ("held-out", "code"):
                metrics.append(evaluation(step, name))
    metrics.close()


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's own reading of the folder: tag → (step, value)."""
    accumulator = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_rows_are_appended_and_read(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path, enabled=True)
    rows = [update(1, loss=0.1 + 0.2), evaluation(1, "held-out")]
    for row in rows:
        metrics.append(row)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # killed here
    assert read_rows(tmp_path / "metrics.jsonl") == rows
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_broken_line_is_refused_and_a_last_one_that_was_cut_off_is_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for cut_off in (b'{"step": 2, "lo', b'{"x": 1}', b"\xff", b"\0\0"):
        path.write_bytes(b'{"step": 1}\n\n' + cut_off)
        assert read_rows(path) == [{"step": 1}]
        path.write_bytes(b'{"step": 1}\n\n' + cut_off + b"\n")
        with pytest.raises(MegabatchError) as caught:
            read_rows(path)
        line = f"{path} is damaged (line 3 is no row with a step); mend or delete that line"
        assert str(caught.value) == line


def test_only_the_main_rank_writes(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path, enabled=False, loggers=loggers(tmp_path))
    metrics.append(update(1))
    metrics.cut(0, None)
    metrics.close()
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_has_the_rows_of_one_that_never_stopped_in_both_files(tmp_path: Path) -> None:
    """Stopped at an evaluation out of turn, then at one that was due, then gone back from, as after a kill."""
    write_run(tmp_path / "whole", 9)
    write_run(tmp_path / "parts", 3)
    write_run(tmp_path / "parts", 6, first=3)
    write_run(tmp_path / "parts", 8, first=6)
    write_run(tmp_path / "parts", 9, first=5)
    assert read_rows(tmp_path / "parts" / "metrics.jsonl") == read_rows(tmp_path / "whole" / "metrics.jsonl")
    assert events(tmp_path / "parts") == events(tmp_path / "whole")


def test_the_cut_drops_the_same_rows_of_every_set(tmp_path: Path) -> None:
    write_run(tmp_path, 7, every=3, tensorboard=False)
    MetricsFile(tmp_path, enabled=True).cut(7, 3)
    rows = read_rows(tmp_path / "metrics.jsonl")
    evaluations = [(row["step"], row["set"]) for row in rows if "set" in row]
    assert evaluations == [(step, name) for step in (0, 3, 6) for name in ("held-out", "code")]
    assert [row["step"] for row in rows if "set" not in row] == [1, 2, 3, 4, 5, 6, 7]
    MetricsFile(tmp_path, enabled=True).cut(6, 4)  # evaluated otherwise from here on
    evaluations = [row["step"] for row in read_rows(tmp_path / "metrics.jsonl") if "set" in row]
    assert evaluations == [0, 0, 3, 3]
    MetricsFile(tmp_path, enabled=True).cut(4, None)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 0, 1, 2, 3, 3, 3, 4]


def test_tensorboard_has_every_number_under_its_tag(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    found = events(tmp_path)
    assert sorted(found) == [
        *(f"eval/{name}/{key}" for name in ("code", "held-out") for key in ("loss", "num_target_tokens", "own")),
        "train/loss",
        "train/lr",
    ]
    assert found["train/loss"] == [(1, 0.5), (2, 1.0)]
    assert found["eval/code/loss"] == [(0, 0.25), (2, 2.25)]


def test_a_row_is_seen_once_it_is_flushed_as_before_each_checkpoint(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path, enabled=True, loggers=loggers(tmp_path))
    for row in (update(1), evaluation(1, "held-out"), update(2)):
        metrics.append(row)
    metrics.flush()
    assert events(tmp_path)["train/loss"] == [(1, 0.5), (2, 1.0)]
    assert events(tmp_path)["eval/held-out/loss"] == [(1, 1.25)]
    metrics.close()


def one_update(loss_fn: Any, samples: list[dict[str, torch.Tensor]], **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    accumulator = GradientAccumulator(model, micro_batch_size=2)
    accumulator.forward_backward(samples, loss_fn)
    done = accumulator.finalize(max_norm=1.0)
    assert accumulator.last_plan is not None
    return update_row(done, sums_of(accumulator.last_plan, ALONE), 3, 1e-3, 0.5, ALONE.device, **options)


SAMPLES = [{"inputs": torch.ones(2), "labels": torch.zeros(2)} for _ in range(3)]


def test_the_row_of_an_update_of_text() -> None:
    row = one_update(losses.mse, SAMPLES, epoch=1.5)
    assert list(row) == [
        "step", "loss", "grad_norm", "lr", "weight", "epoch", "num_samples", "num_microbatches", "num_tokens",
        "num_target_tokens", "padding", "tokens_per_second", "memory_gib",
    ]  # fmt: skip
    assert (row["step"], row["weight"], row["epoch"], row["num_target_tokens"]) == (3, 6.0, 1.5, 6)
    assert (row["num_samples"], row["num_microbatches"], row["num_tokens"]) == (3, 2, 6)
    assert row["tokens_per_second"] == 12.0
    assert json.loads(json.dumps(row)) == row


def test_the_row_of_an_update_of_something_else_counts_samples() -> None:
    row = one_update(losses.mse, SAMPLES, counts_tokens=False)
    assert row["samples_per_second"] == 6.0
    assert {"num_tokens", "num_target_tokens", "padding", "tokens_per_second", "epoch"} & row.keys() == set()


def test_a_weight_that_is_no_number_of_tokens_is_not_called_one() -> None:
    @loss(weigh=lambda microbatch: len(microbatch["labels"]) / 2)
    def half(model: nn.Module, microbatch: Any) -> tuple[torch.Tensor, float]:
        return model(microbatch["inputs"]).sum(), len(microbatch["labels"]) / 2

    row = one_update(half, SAMPLES)
    assert row["weight"] == 1.5
    assert "num_target_tokens" not in row


def test_each_of_several_terms_is_logged() -> None:
    def both(model: nn.Module, microbatch: Any) -> dict[str, tuple[torch.Tensor, float]]:
        output = model(microbatch["inputs"])
        return {"a": (output.sum(), 2.0), "count": (torch.tensor(3.0), 1.0), "none": (torch.tensor(0.0), 0.0)}

    row = one_update(both, SAMPLES)
    assert row["loss_a"] == pytest.approx(row["loss"])
    assert row["loss_count"] == 3.0
    assert row["loss_none"] is None


def test_the_clock_counts_all_between_two_updates_but_what_is_no_part_of_them() -> None:
    clock = UpdateClock()
    time.sleep(0.02)  # loading
    with clock.paused():
        time.sleep(0.3)
    time.sleep(0.02)
    assert 0.04 <= clock.lap() < 0.3
    assert clock.lap() < 0.04

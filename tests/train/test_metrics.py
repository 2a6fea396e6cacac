"""Metrics: the rows, what a resumed run keeps of them, and the same numbers for TensorBoard."""

import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from megabatch import GradientAccumulator, Plan, loss, losses
from megabatch.train.context import Callbacks, RunContext, read_values
from megabatch.train.parallel.utilization import Arithmetic, Utilization
from megabatch.train.records.metrics import Metrics, MetricsFile, Sums, update_row
from megabatch.train.runtime.files import read_rows
from tests.train.contexts import config_of, context_of
from tests.train.on_ranks import on_ranks
from tests.unit.failures.table import line_of


def update(step: int, loss: float | None = None) -> dict[str, Any]:
    return {"step": step, "loss": step / 2 if loss is None else loss, "grad_norm": None, "lr": 1e-3}


def evaluation(step: int, name: str) -> dict[str, Any]:
    return {"step": step, "set": name, "eval_loss": step + 0.25, "eval_own": 1, "num_target_tokens": 7}


def metrics_of(folder: Path, *, every: int | None = 2, resumed: int = 0, tensorboard: bool = False) -> RunContext:
    """The context of a run that only has its metrics."""
    learner: Any = SimpleNamespace(gradient=SimpleNamespace(model=None), model=None, step=resumed)
    config = config_of(folder, eval={"every": every}, run={"tensorboard": tensorboard})
    context = context_of(learner, losses.mse, config=config)
    context.callbacks = Callbacks([Metrics(context)])
    if resumed:
        context.checkpoint = folder
        context.logs[0].cut(resumed)
        context.callbacks.start[0].start(context)
    return context


def add(context: RunContext, row: dict[str, Any]) -> None:
    context.logs[0].append(row)
    context.logs[0].write()


def write_run(folder: Path, last: int, *, first: int = 0, every: int = 2, tensorboard: bool = True) -> None:
    """The rows of a run that goes from one step to another, and evaluates at its end."""
    folder.mkdir(exist_ok=True)
    if first:
        time.sleep(1 - time.time() % 1)  # TensorBoard orders its files by the second of their start
    context = metrics_of(folder, every=every, resumed=first, tensorboard=tensorboard)
    with context.exits:
        for step in range(first, last + 1):
            if step > first:
                add(context, update(step))
            if (step % every == 0 and (step > first or first == 0)) or step == last:
                for name in ("held-out", "code"):
                    add(context, evaluation(step, name))


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's own reading of the folder: tag → (step, value)."""
    accumulator = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_rows_are_appended_and_read(tmp_path: Path) -> None:
    context, rows = metrics_of(tmp_path), [update(1, loss=0.1 + 0.2), evaluation(1, "held-out")]
    for row in rows:
        add(context, row)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # killed here
    assert read_rows(tmp_path / "metrics.jsonl") == rows
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    context = metrics_of(tmp_path)
    add(context, evaluation(1, "held-out") | {"eval_loss": float("nan")})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert '"eval_loss": null' in line


def test_a_broken_line_is_refused_and_a_last_one_that_was_cut_off_is_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for cut_off in (b'{"step": 2, "lo', b'{"x": 1}', b"\xff", b"\0\0"):
        path.write_bytes(b'{"step": 1}\n\n' + cut_off)
        assert read_rows(path) == [{"step": 1}]
        path.write_bytes(b'{"step": 1}\n\n' + cut_off + b"\n")
        line = f"{path} is damaged (line 3 is no row with a step); mend or delete that line"
        assert line_of(read_rows, path) == line


def test_only_the_main_rank_writes(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path, enabled=False, eval_every=None)
    file.append(update(1))
    file.cut(0)
    file.flush()
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


def test_seconds_go_on_where_the_kept_rows_end(tmp_path: Path) -> None:
    """The time between two starts, and that of dropped updates, is no training time of the run."""
    for step, seconds in ((1, 50.0), (2, 100.0), (3, 7000.0)):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(update(step) | {"seconds": seconds}) + "\n")
    context = metrics_of(tmp_path, resumed=2)
    context.row = evaluation(3, "held-out")
    context.callbacks.after_evaluation[0].after_evaluation(context)
    *_, row = read_rows(tmp_path / "metrics.jsonl")
    assert 100 <= row["seconds"] < 110
    assert datetime.fromisoformat(row["time"]).tzinfo is UTC


def test_the_cut_drops_the_same_rows_of_every_set(tmp_path: Path) -> None:
    write_run(tmp_path, 7, every=3, tensorboard=False)
    MetricsFile(tmp_path, enabled=True, eval_every=3).cut(7)
    rows = read_rows(tmp_path / "metrics.jsonl")
    evaluations = [(row["step"], row["set"]) for row in rows if "set" in row]
    assert evaluations == [(step, name) for step in (0, 3, 6) for name in ("held-out", "code")]
    assert [row["step"] for row in rows if "set" not in row] == [1, 2, 3, 4, 5, 6, 7]
    MetricsFile(tmp_path, enabled=True, eval_every=4).cut(6)  # evaluated otherwise from here on
    evaluations = [row["step"] for row in read_rows(tmp_path / "metrics.jsonl") if "set" in row]
    assert evaluations == [0, 0, 3, 3]
    MetricsFile(tmp_path, enabled=True, eval_every=None).cut(4)
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


def test_a_row_is_seen_at_once_whatever_becomes_of_the_run(tmp_path: Path) -> None:
    context = metrics_of(tmp_path, tensorboard=True)
    for row in (update(1), evaluation(1, "held-out"), update(2)):
        add(context, row)
    context.flush_logs()
    assert events(tmp_path)["train/loss"] == [(1, 0.5), (2, 1.0)]
    assert events(tmp_path)["eval/held-out/loss"] == [(1, 1.25)]


def test_rows_of_fast_updates_are_written_together_and_before_a_checkpoint(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path, enabled=True, eval_every=None)
    file.append(update(1))
    file.append(update(2))
    assert not (tmp_path / "metrics.jsonl").exists()
    file.flush()
    assert read_rows(tmp_path / "metrics.jsonl") == [update(1), update(2)]


def one_update(loss_fn: Any, samples: list[dict[str, torch.Tensor]], **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    accumulator = GradientAccumulator(model, micro_batch_size=2)
    accumulator.forward_backward(samples, loss_fn)
    done = accumulator.finalize(max_norm=1.0)
    assert accumulator.last_plan is not None
    options = {"counts_tokens": True, **options}
    sums = Sums(accumulator.last_plan.padded_tokens, accumulator.last_plan.num_split, 0.0)
    return update_row(done, read_values(done), sums, 0.5, **options)


SAMPLES = [{"inputs": torch.ones(2), "labels": torch.zeros(2)} for _ in range(3)]


def test_the_row_of_an_update_of_text() -> None:
    row = one_update(losses.mse, SAMPLES)
    assert list(row) == [
        "loss", "grad_norm", "weight", "num_samples", "num_microbatches", "num_tokens", "num_target_tokens", "padding",
        "tokens_per_second",
    ]  # fmt: skip
    assert (row["weight"], row["num_target_tokens"]) == (6.0, 6)
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_values_are_read_beside_the_stream_of_the_step() -> None:
    device = torch.device("cuda")
    model = nn.Linear(2, 2, device=device)
    accumulator = GradientAccumulator(model, micro_batch_size=2)
    accumulator.forward_backward([{"inputs": torch.ones(2), "labels": torch.zeros(2)}], losses.mse)
    done = accumulator.finalize(max_norm=1.0)
    assert done.finite
    torch.cuda._sleep(2_000_000_000)  # a step that lasts
    start = time.perf_counter()
    values = read_values(done)
    assert time.perf_counter() - start < 0.2
    torch.cuda.synchronize()
    assert values == {"loss": float(done.loss), "weight": float(done.weight), "finite": 1.0,
                      "grad_norm": float(done.grad_norm)}  # fmt: skip


def row_of_two_ranks(ranks: Any, folder: Path) -> dict[str, Any]:
    """The row of an update that took about a thousand seconds on two ranks, of which each has half of the tokens."""
    learner: Any = SimpleNamespace(gradient=SimpleNamespace(model=None), model=None, step=1)
    context = context_of(learner, losses.mse, config=config_of(folder), ranks=ranks)
    context.model = replace(context.model, utilization=Utilization(Arithmetic(10, 10, 0), 1000.0, ""))
    metrics = Metrics(context)
    metrics._lr, metrics._counts_tokens = 0.1, True
    context.plan = Plan(((0, 1),), (20, 10))
    context.update = cast(Any, SimpleNamespace(num_tokens=60, num_samples=4, num_microbatches=2))
    context.values, context.started = {"loss": 1.0, "weight": 60.0}, time.perf_counter() - 1000
    return metrics._row(context)


def test_the_throughput_is_that_of_all_ranks(tmp_path: Path) -> None:
    for row in on_ranks(2, tmp_path, row_of_two_ranks, tmp_path):
        assert row["tokens_per_second"] == pytest.approx(60 / 1000, rel=0.2)
        assert row["tokens_per_second_per_device"] == row["tokens_per_second"] / 2
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] / 2 * 60 / 1000)  # 60 operations a token
        assert row["padding"] == pytest.approx(1 - 60 / 80)

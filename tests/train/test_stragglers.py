"""A rank that is slow: measured on real processes, named in the metrics and once on the console."""

import re
import time
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, Learner, losses
from megabatch.core.contract import loss_hooks
from megabatch.train.context import Callbacks
from megabatch.train.loop import make_update
from megabatch.train.records.timing import SLOW_IN, WINDOW, RankTiming, SlowRanks, Spans, slow_text
from megabatch.train.runtime.ranks import Ranks
from tests.train.conftest import NO_DROPOUT, Bench
from tests.train.contexts import ALONE, context_of
from tests.train.on_ranks import on_ranks

BUSY = """
import os
import time
import torch
from megabatch import losses

def busy(seconds):
    end = time.thread_time() + seconds * (os.environ.get("RANK") == "1")
    while time.thread_time() < end:
        pass

class Busy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, total):
        return total.clone()
    @staticmethod
    def backward(ctx, gradient):
        busy(0.05)
        return gradient

def slow(model, microbatch):
    total, weight = losses.next_token(model, microbatch)
    busy(0.05)
    return Busy.apply(total), weight

slow.weigh = losses.next_token.weigh
"""


Update = tuple[list[float], list[float]]  # predicted and measured seconds of each rank


class Alike(Ranks):
    """Ranks that all say the same."""

    def gather(self, text: str) -> list[str]:
        return [text] * self.size


def said(*updates: Update) -> list[list[str]]:
    """The lines after each of the updates, again and again."""
    seen, found = SlowRanks(Alike(0, len(updates[0][0]), ALONE.device)), []
    for number in range(2 * WINDOW):
        predicted, measured = updates[number % len(updates)]
        seen.add(measured, predicted)
        found.append(seen.warnings())
    return found


EVEN = [1.0] * 4


def test_a_rank_is_named_once_when_it_is_slow_in_most_updates() -> None:
    lines = said((EVEN, [1.0, 2.0, 1.0, 1.0]), ([0.8, 1.1, 1.05, 1.05], [0.8, 1.9, 1.0, 1.0]))
    assert [number for number, each in enumerate(lines) if each] == [SLOW_IN - 1]
    ((line,),) = [each for each in lines if each]
    named = (
        r"rank 1 \(process \d+ on .*\) takes 1\.6 times the mean of the ranks in forward and backward, in 8 or more "
    )
    assert re.match(named, line)


def test_ranks_that_are_slow_together_are_named_though_the_slowest_is_now_this_now_that() -> None:
    lines = said(([1.0] * 8, [2.0, 2.1, *[1.0] * 6]), ([1.0] * 8, [2.1, 2.0, *[1.0] * 6]))
    (both,) = [each for each in lines if each]
    assert [line.split(" (")[0] for line in both] == ["rank 0", "rank 1"]


def test_the_docs_show_the_line_as_it_is_written() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    assert f"warning: {slow_text(3, 'process 4711 on host-a', 1.6, 'in 8 or more of the last 10 updates')}\n" in docs


@pytest.mark.parametrize(
    "updates",
    [
        [(EVEN, [2.0, 1.0, 1.0, 1.0]), (EVEN, [1.0, 2.0, 1.0, 1.0])],  # now one, now the other
        [(EVEN, [2.0, 1.0, 1.0, 1.0])] * 2 + [(EVEN, EVEN)],  # in two of three
        [(EVEN, [1.4, 1.0, 1.0, 1.0])],
        [([1.4, 1.0, 1.0, 1.0], [2.0, 1.0, 1.0, 1.0])],  # its samples are a reason
        [([1.0], [2.0])],
    ],
)
def test_a_rank_is_not_named_for_less(updates: list[Update]) -> None:
    assert not any(said(*updates))


def test_spans_are_added_up_and_one_without_an_end_has_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    spans = Spans(torch.device("cpu"))
    for _ in range(2):
        spans.begin()
        clock[0] += 1
        spans.end()
        clock[0] += 1
        spans.end()  # further on
        clock[0] += 1
    spans.begin()
    assert spans.take() == 4
    assert spans.take() == 0


# In updates, on two ranks


def learned(ranks: Ranks, sync: str, clock: list[float], store: dist.Store | None) -> tuple[list[Any], list[float]]:
    """Weights, losses and the random stream after some updates; with a store, also the seconds of each of them.

    Each forward takes rank 1 a second of the clock, and rank 0 a quarter of one. Where times are measured, rank 1 waits
    until rank 0 has ended the span of its microbatch of the same number: if that came after the wait for rank 1, both
    would wait for ever.
    """
    num_forwards, num_ends = count(), count()
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    model = DistributedDataParallel(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    learner = Learner(model, optimizer, GradientAccumulator(model, micro_batch_size=2, sync=sync), max_norm=1.0)

    def slow(model: Any, microbatch: Any) -> Any:
        term = losses.mse(model, microbatch)
        clock[0] += 1 if ranks.rank else 0.25
        if ranks.rank and store is not None:
            store.wait([str(next(num_forwards))], timedelta(seconds=60))
        return term

    slow.weigh = loss_hooks(losses.mse).weigh
    context = context_of(learner, slow, ranks=ranks, wrapper="ddp")
    seconds: list[float] = []
    if store is not None:
        timing = RankTiming(context)
        context.callbacks = Callbacks([timing])
        take, end = timing._spans.take, timing._spans.end
        timing._spans.take = lambda: seconds.append(take()) or seconds[-1]
        if ranks.rank == 0:
            timing._spans.end = lambda: end() or store.set(str(next(num_ends)), "")
        assert loss_hooks(context.loss_fn) == loss_hooks(slow)
    found: list[Any] = []
    for step in range(1, 5):
        numbers = torch.arange(4 * (5 - 2 * ranks.rank), dtype=torch.float64).reshape(-1, 4).sin() * step  # 5 or 3
        make_update(context, [{"inputs": row, "labels": row[:3].cos()} for row in numbers])
        assert ("measured_slowest_over_mean" in context.row) == (store is not None)
        assert context.update is not None
        found += [context.update.loss, context.update.grad_norm]
    found += [*(each.detach().clone() for each in model.parameters()), torch.get_rng_state()]
    return found, seconds


def with_and_without(ranks: Ranks, sync: str, met: Path) -> tuple[bool, list[float]]:
    clock = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: clock[0])
        with_it, seconds = learned(ranks, sync, clock, dist.FileStore(str(met), 2))
        without, _ = learned(ranks, sync, clock, None)
    return all(map(torch.equal, with_it, without)), seconds


@pytest.mark.parametrize("sync", ["last", "every"])
def test_waiting_is_not_counted_and_nothing_learned_depends_on_it(tmp_path: Path, sync: str) -> None:
    """Each rank makes three forwards; rank 0 is quick and waits for rank 1 where gradients are summed."""
    (same, waits), (also, slow) = on_ranks(2, tmp_path, with_and_without, sync, tmp_path / "met")
    assert same
    assert also
    assert slow == [3.0] * 4
    assert waits == [0.75] * 4


# In runs


@pytest.mark.slow
def test_a_run_names_the_rank_that_is_slow(bench: Bench) -> None:
    (bench.path / "busy.py").write_text(BUSY)
    values = {"loss__function": f"{bench.path / 'busy.py'}:slow", "run__max_epochs": 2, **NO_DROPOUT}
    said = bench.train(ranks=2, parallel__wrapper="ddp", **values)
    rows = [each for each in bench.rows() if "grad_norm" in each]
    assert len(rows) == 12
    slow = [each for each in rows if each["slowest_rank"] == 1 and each["measured_slowest_over_mean"] > 1.3]
    assert len(slow) >= SLOW_IN  # all, unless the machine is busy elsewhere
    assert all(each["slowest_over_mean"] < 1.3 for each in rows if each["num_samples"] == 8)  # not in the tail
    lines = [line for line in said.splitlines() if "times the mean of the ranks" in line]
    assert len(lines) == 1
    assert re.match(r"warning: rank 1 \(process \d+ on .*\) takes 1\.\d times the mean of the ranks in", lines[0])

    fsdp = bench.path / "fsdp2"
    bench.train(ranks=2, parallel__wrapper="fsdp2", run__folder=fsdp, run__max_steps=2, **values)
    bench.train(run__folder=bench.path / "alone", run__max_steps=2, **values)
    for folder in (fsdp, bench.path / "alone"):
        assert not any({"measured_slowest_over_mean", "slowest_rank"} & each.keys() for each in bench.rows(folder))

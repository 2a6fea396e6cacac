"""The records of a run for its page: every cut and one timeline; nothing learned depends on them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, Learner, Plan, losses, plan
from megabatch.core.contract import loss, loss_hooks
from megabatch.core.wrapper import local
from megabatch.train.context import Callbacks, RunContext
from megabatch.train.loop import make_update
from megabatch.train.records.timing import RECORDED, Recording, Timeline, name_reductions, total_of
from megabatch.train.records.update_logs import MOST_MICROBATCHES, MOST_RANKS, MicrobatchLog, cut_of, row_of
from megabatch.train.runtime.ranks import Ranks
from tests.train.conftest import Bench
from tests.train.contexts import ALONE, config_of, context_of
from tests.train.on_ranks import on_ranks


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_cut_has_samples_real_tokens_and_padding() -> None:
    cut = Plan(((0, 2), (1,), ()), (5, 9, 3))
    assert cut_of(cut) == [[2, 1, 0], [8, 9, 0], [2, 0, 0]]
    filled = Plan(((0, 2), (1,), ()), (5, 9, 3), steps=(3,))
    assert cut_of(filled) == [[2, 1, 0], [8, 9, 0], [10, 9, 0]]
    in_two_steps = Plan(((1,), (0, 2), (3,), ()), (5, 9, 3, 2), steps=(1, 3))
    assert cut_of(in_two_steps) == [[1, 2, 1, 0], [9, 8, 2, 0], [0, 2, 8, 0]]
    for each in (cut, filled, in_two_steps):
        _, real, padding = cut_of(each)
        assert (sum(real), sum(real) + sum(padding)) == (each.num_tokens, each.padded_tokens)


def test_ranks_with_the_same_samples_count_once_and_a_line_is_bounded() -> None:
    told = [(rank % 2, 1, [[1], [rank % 2], [0]]) for rank in range(4)]
    assert row_of(7, told) == {"step": 7, "cut": [[[1], [0], [0]], [[1], [1], [0]]]}
    long = plan([1] * (MOST_MICROBATCHES + 5), micro_batch_size=1)[0]
    cut = cut_of(long)
    assert [len(column) for column in cut] == [MOST_MICROBATCHES] * 3
    many = [(rank, 3, cut_of(plan([1] * 3, micro_batch_size=1)[0])) for rank in range(MOST_RANKS + 2)]
    row = row_of(1, [*many, (MOST_RANKS + 2, len(long.microbatches), [])])
    assert len(row["cut"]) == MOST_RANKS
    assert row["microbatches_left_out"] == 2 * 3 + len(long.microbatches)
    assert row_of(1, [(0, len(long.microbatches), cut)])["microbatches_left_out"] == 5


# The timeline


def wrapped(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    if name == "ddp":
        return DistributedDataParallel(model)
    if name == "fsdp2":
        fully_shard(model)
    return model


def learned(ranks: Ranks, name: str, folder: Path | None, num_updates: int = 4) -> tuple[list[Any], RunContext]:
    """Weights, losses and the state of the random stream after some updates; with a folder their third is recorded."""
    model = wrapped(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    learner = Learner(model, optimizer, GradientAccumulator(model, micro_batch_size=2), max_norm=1.0)
    context = context_of(learner, losses.mse, ranks=ranks, config=config_of(folder or "nowhere"))
    if folder is not None:
        context.callbacks = Callbacks([Timeline(context)])
    found: list[Any] = []
    for step in range(1, num_updates + 1):
        numbers = torch.arange(4 * (5 - 3 * ranks.rank), dtype=torch.float64).reshape(-1, 4).sin() * step  # 5 or 2
        make_update(context, [{"inputs": row, "labels": row[:3].cos()} for row in numbers])
        assert context.update is not None
        found += [context.update.loss, context.update.grad_norm]
    if folder is not None:
        context.flush_logs()
    weights = [local(each.detach()).clone() for each in model.parameters()]
    return [*found, *weights, torch.get_rng_state()], context


def with_and_without(ranks: Ranks, folder: Path) -> list[str]:
    """Wrappers under which anything differs, to the bit."""
    names = ["plain"] if ranks.size == 1 else ["plain", "ddp", "fsdp2"]
    differ: list[str] = []
    for name in names:
        (folder / name).mkdir(exist_ok=True)
        with_it, _ = learned(ranks, name, folder / name)
        without, _ = learned(ranks, name, None)
        if not all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True)):
            differ.append(name)
    return differ


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_learned_depends_on_it(tmp_path: Path, size: int) -> None:
    """Weights, losses, norms and the random stream are equal to the bit; the line has every microbatch."""
    assert on_ranks(size, tmp_path, with_and_without, tmp_path) == [[]] * size
    for name in ["plain"] if size == 1 else ["plain", "ddp", "fsdp2"]:
        (row,) = lines_of(tmp_path / name / "timeline.jsonl")
        assert (row["step"], row["num_ranks"], len(row["ranks"])) == (RECORDED, size, size)
        for rank, spans in enumerate(row["ranks"]):
            kinds = spans["kinds"]
            num_stand_ins = 1 if rank else 0  # 2 samples and 5, two at a time
            assert (kinds.count("forward"), kinds.count("backward")) == (3 - num_stand_ins,) * 2
            assert kinds.count("dummy microbatch") == 2 * num_stand_ins
            assert (kinds[0], kinds[-2:], len(spans["ms"])) == ("idle", ["reduce", "step"], len(kinds) + 1)
            assert spans["ms"] == sorted(spans["ms"])
            is_reduced_with_each = name == "fsdp2"
            assert kinds.count("reduce") == (1 if size == 1 else 4 if is_reduced_with_each else 2)


def test_only_the_third_update_is_watched_and_nothing_stays(tmp_path: Path) -> None:
    _, context = learned(ALONE, "plain", tmp_path, num_updates=RECORDED - 1)
    assert not (tmp_path / "timeline.jsonl").exists()
    (timeline,) = context.callbacks.all
    timeline.before_update(context)
    (recording,) = context.callbacks.all
    assert isinstance(recording, Recording)
    assert context.loss_fn is not losses.mse
    context.values = {"finite": 0.0}  # an update that is not stepped leaves no line
    recording.after_update(context)
    context.flush_logs()
    assert not (tmp_path / "timeline.jsonl").exists()
    assert context.loss_fn is losses.mse
    assert not context.callbacks.all
    optimizer = context.learner.optimizer
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_loss_keeps_what_it_says_of_its_weight(tmp_path: Path) -> None:
    def weigh(microbatch: Any) -> int:
        return 1

    def prepare(microbatch: Any) -> Any:
        return microbatch

    _, context = learned(ALONE, "plain", tmp_path, num_updates=1)
    for loss_fn in (loss(weigh=weigh, prepare=prepare)(lambda *_: None), losses.next_token):
        context.loss_fn = loss_fn
        Recording(context, context.logs[0])
        assert context.loss_fn is not loss_fn
        assert loss_hooks(context.loss_fn) == loss_hooks(loss_fn)


def test_what_a_loss_must_not_return_is_left_to_the_library() -> None:
    total = torch.ones(2, requires_grad=True).sum()
    assert total_of((total, 3)) is total
    assert total_of({"metric": (torch.ones(()), 1), "loss": (total, 1)}) is total
    assert [total_of(each) for each in (None, 3, (), {}, {"loss": None}, total.detach(), (3, 4))] == [None] * 7


def test_what_comes_after_a_backward_is_a_reduction_where_there_is_one() -> None:
    kinds = ["idle", "forward", "backward", "idle", "forward", "backward", "idle", "reduce", "step"]
    last = [*kinds[:6], "reduce", *kinds[7:]]
    assert name_reductions(kinds, with_each=False) == last
    assert name_reductions(kinds, with_each=True) == [*last[:3], "reduce", *last[4:]]


@pytest.mark.slow
def test_a_run_that_goes_on_has_the_lines_of_one_that_was_never_stopped(bench: Bench, tmp_path: Path) -> None:
    """On two ranks; of the timeline there is a line for each start."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    said = bench.train(ranks=2, run__folder=whole)
    assert f"a page to look at: {whole / 'report.html'}" in said
    bench.train(ranks=2, run__folder=stopped, run__max_steps=4, run__save_every=2)
    (stopped / "checkpoints" / "latest").write_text("step-2")  # as if it had been killed before the next
    bench.train(ranks=2, run__folder=stopped, run__resume=True)
    assert (stopped / "cuts.jsonl").read_text() == (whole / "cuts.jsonl").read_text()
    assert [row["step"] for row in lines_of(whole / "timeline.jsonl")] == [3]
    assert [row["step"] for row in lines_of(stopped / "timeline.jsonl")] == [5]
    rows = lines_of(whole / "cuts.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    updates = [row for row in bench.rows(whole) if "loss" in row]
    for row, update in zip(rows, updates, strict=True):
        assert sum(sum(samples) for samples, _, _ in row["cut"]) == update["num_samples"]
        assert sum(sum(real) for _, real, _ in row["cut"]) == update["num_tokens"]
        assert {len(samples) for samples, _, _ in row["cut"]} == {update["num_microbatches"]}


def test_cuts_are_cut_back_with_the_run(tmp_path: Path) -> None:
    learner: Any = SimpleNamespace(gradient=SimpleNamespace(model=None), model=None, step=0)
    context = context_of(learner, losses.mse, config=config_of(tmp_path))
    cuts, context.plan = MicrobatchLog(context), Plan(((0,),), (5,))
    for learner.step in (1, 2, 3):
        cuts.after_update(context)
    context.flush_logs()
    context.logs[0].cut(2)
    assert [row["step"] for row in lines_of(tmp_path / "cuts.jsonl")] == [1, 2]

"""Memory runs out on one rank of a run: all end with one line, and the run goes on with smaller microbatches."""

import json
from pathlib import Path

import pytest
import torch

from megabatch import Plan
from megabatch.train.config import RunConfig
from megabatch.train.runtime.oom_limit import report_split
from megabatch.train.runtime.ranks import Ranks
from tests.train.conftest import NO_DROPOUT, Bench

pytestmark = pytest.mark.slow
LOSS = """
import os
from pathlib import Path

import torch

from megabatch import loss, losses


@loss(weigh=losses.next_token.weigh)
def greedy(model, microbatch):
    is_short = Path(__file__).with_name("short").exists() and os.environ["RANK"] == "1"
    if is_short and torch.is_grad_enabled() and microbatch["input_ids"].numel() > 300:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    return losses.next_token(model, microbatch)
"""


@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
def test_a_run_goes_on_with_smaller_microbatches(bench: Bench, tmp_path: Path, wrapper: str) -> None:
    (tmp_path / "own.py").write_text(LOSS)
    values = {"loss__function": f"{tmp_path}/own.py:greedy", "parallel__wrapper": wrapper, **NO_DROPOUT}
    values |= {"update__global_batch_size": 24, "update__max_microbatch_tokens": 600, "run__max_epochs": 2}
    bench.train(ranks=2, run__folder=tmp_path / "whole", **values)
    work = [row["slowest_over_mean"] for row in bench.rows(tmp_path / "whole") if "grad_norm" in row]
    assert all(1 <= each < 1.5 for each in work)
    bench.train(ranks=2, run__max_steps=2, **values)
    (tmp_path / "short").touch()
    learned: list[int] = []
    for _ in range(4):
        finished = bench.finish(ranks=2, run__resume=True, run__save_every=1, **values)
        if finished[0].status == 0:
            break
        assert [each.status for each in finished] == [2, 2], "\n".join(each.err for each in finished)
        (line,) = (line for each in finished for line in each.err.splitlines())
        assert line.startswith("megabatch: rank 1 of 2 ran out of memory in microbatch ")
        learned.append(json.loads((bench.folder / "microbatch.json").read_text())["tokens"])
        assert "(OutOfMemoryError: CUDA out of memory." in line
    assert finished[0].status == 0
    assert learned == sorted(set(learned), reverse=True), "each start with less than the one before"
    assert learned or wrapper == "ddp", "which runs parts again, but for its last microbatch"
    assert bench.losses() == pytest.approx(bench.losses(tmp_path / "whole"), rel=1e-10)


def test_a_microbatch_that_ran_in_parts_is_told_and_kept(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(LOSS.replace('os.environ["RANK"] == "1"', "SEEN.append(0) or len(SEEN) == 3"))
    (tmp_path / "short").touch()
    own = (tmp_path / "own.py").read_text().replace("import torch\n", "import torch\n\nSEEN = []\n", 1)
    (tmp_path / "own.py").write_text(own)
    values = {"loss__function": f"{tmp_path}/own.py:greedy", **NO_DROPOUT}
    values |= {"update__global_batch_size": 24, "update__max_microbatch_tokens": 600, "run__max_steps": 3}
    said = bench.train(**values)
    (row,) = (row for row in bench.rows() if "num_split" in row)
    learned = json.loads((bench.folder / "microbatch.json").read_text())
    assert row["num_split"] == 1
    assert (
        "1 microbatch did not fit in memory and ran in parts, to the same gradient; from here on one holds at most "
        f"{learned['tokens']} tokens, or {learned['samples']} samples" in said
    )


@pytest.mark.parametrize(("ranks", "bound", "limit"), [(2, 600, 300), (1, "auto", 700)])
def test_a_run_without_a_checkpoint_begins_again(
    bench: Bench, tmp_path: Path, ranks: int, bound: int | str, limit: int
) -> None:
    """By its recipe or its folder. "auto" meets what does not fit while it chooses, and goes on below it."""
    values = {"loss__function": f"{tmp_path}/own.py:greedy", **NO_DROPOUT, "run__max_steps": 2, "eval__every": None}
    values |= {"update__global_batch_size": 24, "update__max_microbatch_tokens": bound}
    values |= {"parallel__wrapper": "fsdp2"} if ranks > 1 else {}
    own = LOSS.replace('os.environ["RANK"] == "1"', "True").replace("> 300", f"> {limit}")
    (tmp_path / "own.py").write_text(own)
    bench.train(ranks=ranks, run__folder=tmp_path / "whole", **values)
    (tmp_path / "short").touch()
    statuses: list[int] = []
    for number in range(6):
        recipe = bench.folder if number % 2 and (bench.folder / "config.toml").exists() else None
        finished = bench.finish(ranks=ranks, recipe=recipe, **values)
        assert len({each.status for each in finished}) == 1, "\n".join(each.err for each in finished)
        statuses.append(finished[0].status)
        if statuses[-1] != 2:
            break
    assert (statuses[-1], len(statuses) > 1) == (0, bound != "auto"), "\n".join(each.err for each in finished)
    assert [row["step"] for row in bench.rows() if "loss" in row] == [1, 2]
    assert bench.losses() == pytest.approx(bench.losses(tmp_path / "whole"), rel=1e-10)


def test_a_stand_in_alone_teaches_nothing(tmp_path: Path) -> None:
    plan = Plan(((0,), ()), (5,), num_split=1)
    said = report_split(RunConfig(folder=str(tmp_path)), plan, None, Ranks(0, 1, torch.device("cpu")))
    assert said == "1 microbatch did not fit in memory and ran in parts, to the same gradient"
    assert list(tmp_path.iterdir()) == []


def test_what_was_learned_may_be_damaged(bench: Bench) -> None:
    bench.train(run__max_steps=1)
    (bench.folder / "microbatch.json").write_text("[]")
    bench.train(run__resume=True, run__max_steps=2)
    assert len(bench.losses()) == 2

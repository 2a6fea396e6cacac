"""A signal inside a long update: what is done of it is saved, and the run goes on there as if it had never ended."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.test_stop import disturb
from tests.train.conftest import NO_DROPOUT, Bench, timeless

pytestmark = pytest.mark.full
LONG = {
    "update__global_batch_size": 50,
    "update__max_microbatch_tokens": 160,
    "run__max_epochs": 3,
    "eval__num_samples": 0,
}


def long(own: Path, **values: Any) -> dict[str, Any]:
    """Updates of every sample, in some twenty microbatches."""
    of_own = {"loss__function": f"{own}:within", "run__after_update": f"{own}:after_update"}
    return {**LONG, **of_own, "checkpoint__partial": "true", **values}


@pytest.mark.parametrize(
    ("ranks", "step", "values"),
    [
        (1, 1, {"optim__ema_decay": 0.5}),
        (2, 2, {"parallel__wrapper": "ddp", "data__look_ahead": 1}),
        (2, 2, {"parallel__wrapper": "fsdp2", "update__sync": "last"}),
    ],
    ids=["alone, in the first update", "ddp", "fsdp2"],
)
def test_it_goes_on_inside_the_update(
    bench: Bench, own: Path, tmp_path: Path, ranks: int, step: int, values: dict[str, Any]
) -> None:
    whole, values = tmp_path / "whole", long(own, **values)
    bench.train(ranks=ranks, run__folder=whole, **values)
    disturb(bench, place="within", step=step, ranks=[ranks - 1], signals=[signal.SIGTERM])
    said = bench.train(ranks=ranks, **values)
    parts = 3 if ranks == 1 else 2
    assert f"update {step} is saved after 1 of {parts} parts" in said
    assert said.splitlines()[-1].startswith(f"stopped by SIGTERM after update {step - 1}; ")
    assert (bench.losses() if step > 1 else []) == bench.losses(whole)[: step - 1]
    (bench.path / "disturb.json").unlink()
    said = bench.train(ranks=ranks, recipe=bench.folder)
    assert f"update {step} resumes after 1 of {parts} parts" in said
    assert timeless(bench.rows()) == timeless(bench.rows(whole))
    assert not (bench.folder / "checkpoints" / "open").exists()


def test_it_is_stopped_again_and_again(bench: Bench, own: Path, tmp_path: Path) -> None:
    whole, values = tmp_path / "whole", long(own)
    bench.train(run__folder=whole, **values)
    for done in (1, 2):
        disturb(bench, place="within", step=1, signals=[signal.SIGINT])
        said = bench.train(**values) if done == 1 else bench.train(recipe=bench.folder)
        assert f"update 1 is saved after {done} of 3 parts" in said
    disturb(bench, place="within", step=1, signals=[signal.SIGINT])  # in the last part: there is nothing left to save
    assert "stopped by SIGINT after update 1" in bench.train(recipe=bench.folder)
    (bench.path / "disturb.json").unlink()
    bench.train(recipe=bench.folder)
    assert timeless(bench.rows()) == timeless(bench.rows(whole))


@pytest.mark.parametrize("change", ["ranks", "damage", "lost", "edited", "cut off"])
def test_an_update_that_cannot_go_on_begins_again(bench: Bench, own: Path, tmp_path: Path, change: str) -> None:
    whole, values = tmp_path / "whole", long(own, parallel__wrapper="ddp", **NO_DROPOUT)
    bench.train(ranks=2, run__folder=whole, **(values | {"checkpoint__partial": "false"}))
    disturb(bench, place="within", step=2, signals=[signal.SIGTERM])
    bench.train(ranks=2, **values)
    (bench.path / "disturb.json").unlink()
    left = bench.folder / "checkpoints" / "open" / "__1_open.pt"
    whole_bytes = left.read_bytes()
    if change == "damage":
        left.write_bytes(whole_bytes[:-100] + bytes(100))
    if change == "lost":
        left.unlink()
    said = left.with_name("open.json")
    if change == "edited":
        said.write_text(said.read_text().replace('"number of ranks": 2', '"number of ranks": 3'))
    if change == "cut off":
        said.write_text(said.read_text()[:40])
    reason = {
        "ranks": "number of ranks was 2 and is 1",
        "damage": "__1_open.pt is not what was written: its SHA-256 is another",
        "lost": "__1_open.pt is not there",
        "edited": "open.json: it is not what was written: its SHA-256 is another",
        "cut off": "open.json: ",
    }[change]
    (end, *_) = bench.finish(ranks=1 if change == "ranks" else 2, recipe=bench.folder)
    assert end.status == 0, end.err
    assert f"update 2 begins again, which was left open: {reason}" in end.out + end.err
    assert bench.losses() == pytest.approx(bench.losses(whole), rel=1e-10)


def test_an_open_update_of_another_checkpoint_is_left_alone(bench: Bench, own: Path) -> None:
    values = long(own, run__save_every=1)
    disturb(bench, place="within", step=3, signals=[signal.SIGTERM])
    bench.train(**values)
    (bench.path / "disturb.json").unlink()
    (bench.folder / "checkpoints" / "latest").write_text("step-1")
    losses = bench.losses()
    said = bench.train(recipe=bench.folder)
    assert "resumes after" not in said
    assert not (bench.folder / "checkpoints" / "open").exists()
    assert bench.losses()[:2] == losses
    assert len(bench.losses()) == 3


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, None),
        ({"run__seed": 1}, "run.seed was 0 and is 1"),
        ({"update__global_batch_size": 40}, "update.global_batch_size was 50 and is 40"),
        ({"loss__function": "megabatch.losses:next_token"}, "loss.function was "),
    ],
    ids=["the same run", "other samples", "fewer samples", "another loss"],
)
def test_a_run_that_lost_its_checkpoint_goes_on_with_no_other_runs_update(
    bench: Bench, own: Path, tmp_path: Path, values: dict[str, Any], problem: str | None
) -> None:
    """Ended between the open update and the checkpoint before it: the folder may be begun in by another recipe."""
    disturb(bench, place="within", step=1, signals=[signal.SIGTERM])
    bench.train(**long(own))
    (bench.path / "disturb.json").unlink()
    checkpoints = bench.folder / "checkpoints"
    shutil.rmtree(checkpoints / "step-0")
    (checkpoints / "latest").unlink()
    log = bench.folder / "log.txt"
    log.write_text("".join(line for line in log.read_text().splitlines(True) if "step-0" not in line))
    (end,) = bench.finish(**long(own, **values))
    assert end.status == 0, end.err
    assert ("update 1 resumes after 1 of 3 parts" in end.out) == (problem is None)
    assert problem is None or f"update 1 begins again, which was left open: {problem}" in end.out + end.err
    other = tmp_path / "other"
    bench.train(run__folder=other, **long(own, **values))
    assert timeless(bench.rows()) == timeless(bench.rows(other))


MOVED = """
from transformers import GPT2Config, GPT2LMHeadModel
import torch


class Counting(GPT2LMHeadModel):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, input_ids, **named):
        found = super().forward(input_ids, **named)
        if self.training:
            self.seen += input_ids.numel()
        found.logits = found.logits * (1 + self.seen / 10**6)
        return found


def counting(**options):
    return Counting(GPT2Config(**options))
"""


@pytest.mark.parametrize("saves", [{"run__save_every": 1}, {}], ids=["saved before", "saved then"])
@pytest.mark.parametrize("is_lost", [False, True], ids=["goes on", "begins again"])
def test_what_a_forward_moves_is_as_in_a_run_never_stopped(
    bench: Bench, own: Path, tmp_path: Path, saves: dict[str, Any], is_lost: bool
) -> None:
    (tmp_path / "moved.py").write_text(MOVED)
    text = bench.recipe.read_text()
    head, _, tail = text.partition("[model.config]")
    options, rest = tail.replace('model_type = "gpt2"\n', "").split("[data]")
    bench.recipe.write_text(
        f'{head}tokenizer = "bytes"\nfunction = "{tmp_path}/moved.py:counting"\n\n[model.options]{options}[data]{rest}'
    )
    whole, values = tmp_path / "whole", long(own, **saves) | {"model__options__resid_pdrop": 0.0}
    bench.train(run__folder=whole, **values)
    disturb(bench, place="within", step=2, signals=[signal.SIGTERM])
    bench.train(**values)
    (bench.path / "disturb.json").unlink()
    if is_lost:
        (bench.folder / "checkpoints" / "open" / "__0_open.pt").unlink()
    bench.train(recipe=bench.folder)
    assert timeless(bench.rows()) == timeless(bench.rows(whole))


def test_what_is_kept_is_small(bench: Bench, own: Path) -> None:
    """Only its part is kept of a gradient that lies in a larger buffer."""
    disturb(bench, place="within", step=1, signals=[signal.SIGTERM])
    bench.train(ranks=2, **long(own, parallel__wrapper="fsdp2"))
    sizes = [path.stat().st_size for path in (bench.folder / "checkpoints" / "open").glob("__*")]
    model = 384 * 16 + 256 * 16 + 2 * (12 * 16**2 + 13 * 16) + 2 * 16  # parameters of the recipe's GPT-2
    assert sum(sizes) < 8 * model * 1.5

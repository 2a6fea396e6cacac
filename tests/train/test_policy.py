"""The sync policy is chosen by memory and traffic: alike on all ranks, said, kept, and chosen anew elsewhere."""

from dataclasses import replace
from typing import Any

import pytest

from megabatch.errors import MicrobatchLimit
from megabatch.train.config import Config, ModelConfig, RunConfig, UpdateConfig
from megabatch.train.plan.grid import Choice
from megabatch.train.plan.search import NO, SIMULATION, TIGHT, YES, PlanRow, sort_rows
from megabatch.train.runtime.oom_limit import lowered_settings
from tests.train.conftest import NO_DROPOUT, Bench
from tests.train.planning import plan
from tests.train.test_plan import LLAMA

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "values", "line"),
    [
        (2, {"parallel__wrapper": "fsdp2"}, "sync every: FSDP2 reduce-scatters each microbatch"),
        (4, {"parallel__dp_replicate": 2, "parallel__dp_shard": 2}, "sync replica_last: "),
        (2, {"parallel__wrapper": "fsdp2", "update__sync": "gather_once"}, "sync gather_once: "),
    ],
    ids=["fsdp2", "hsdp", "stated"],
)
def test_the_plan_of_a_run_says_the_policy(bench: Bench, ranks: int, values: dict[str, Any], line: str) -> None:
    keys: dict[str, Any] = {"update__micro_batch_size": 1, "eval__every": "none", **NO_DROPOUT, **values}
    said = bench.train(ranks=ranks, **keys, run__max_steps=1)
    assert f"plan  {line}" in said


def config_of(**update: Any) -> Config:
    return Config(
        model=ModelConfig(config={"model_type": "gpt2"}), update=UpdateConfig(global_batch_size=8, **update),
        run=RunConfig(folder="runs/nowhere"),
    )  # fmt: skip


def test_a_microbatch_that_is_lowered_is_told() -> None:
    learned = MicrobatchLimit(2, 1500)
    (line,) = lowered_settings(config_of(micro_batch_size=4).update, learned)
    assert line.startswith("update.micro_batch_size 4 is lowered: ")
    assert line.endswith("one holds at most 2 samples (microbatch.json)")
    (line,) = lowered_settings(config_of(max_microbatch_tokens=4096).update, learned)
    assert line.startswith("update.max_microbatch_tokens 4,096 is lowered: ")
    assert line.endswith("one holds at most 1,500 tokens (microbatch.json)")
    for update in (config_of(micro_batch_size=2), config_of(max_microbatch_tokens=1500), config_of(micro_batch_size=1)):
        assert lowered_settings(update.update, learned) == []
    assert lowered_settings(config_of(micro_batch_size=4).update, None) == []


def row_of(sync: str, seconds: float, sent_bytes: int, fits: str = YES, size: int = 2) -> PlanRow:
    choice = Choice(size, 4, sync, reshard=True, recompute=False, fused=True)
    return PlanRow(choice, fits, "", 100, 100, 100, sent_bytes, seconds, "compute", SIMULATION, 64)


def test_a_plan_takes_of_two_policies_what_sends_least() -> None:
    every, last = row_of("every", 1.0, 50), row_of("last", 1.01, 30)
    other = row_of("last", 1.005, 10, size=1)
    assert sort_rows([every, other, last]) == [last, every, other]
    assert sort_rows([last, every]) == [last, every]
    assert sort_rows([every, replace(last, fits=TIGHT)])[0] == every
    once = replace(row_of("gather_once", 1.02, 20), choice=replace(last.choice, sync="gather_once", reshard=False))
    kept = replace(row_of("last", 1.02, 10), choice=replace(last.choice, reshard=False))
    assert sort_rows([every, last, once, kept])[0] == once
    assert sort_rows([replace(every, fits=NO), replace(last, fits=NO)])[0].choice == every.choice


def test_a_plan_says_that_a_microbatch_is_lowered(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = bench.path / "llama.toml"
    recipe.write_text(LLAMA)
    plan(recipe, ["--update.micro_batch_size=64"])
    assert "update.micro_batch_size 64 is lowered: a rank has no more samples of an update\n" in capsys.readouterr().out
    plan(recipe, ["--update.micro_batch_size=4"])
    assert "is lowered" not in capsys.readouterr().out

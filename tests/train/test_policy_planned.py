"""When ranks sum, as `megabatch plan` says it and as a run does; and what both say of a microbatch that they lower."""

from dataclasses import replace

import pytest

from megabatch.errors import MicrobatchLimit
from megabatch.train.autotune.sync_policy import LAST
from megabatch.train.config.byte_sizes import gb_text
from megabatch.train.plan.grid import Choice
from megabatch.train.plan.search import NO, SIMULATION, TIGHT, YES, PlanRow, sort_rows
from megabatch.train.plan.table import plan_recipe
from megabatch.train.runtime.oom_limit import lowered_settings
from tests.train.conftest import Bench
from tests.train.processes import overrides
from tests.train.test_plan import LLAMA
from tests.train.test_policy import chosen_line, config_of

pytestmark = pytest.mark.slow


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
    return PlanRow(choice, fits, "", 100, 100, sent_bytes, seconds, "compute", SIMULATION, 64)


def test_a_plan_takes_of_two_policies_what_sends_least() -> None:
    every, last = row_of("every", 1.0, 50), row_of("last", 1.01, 30)
    other = row_of("last", 1.005, 10, size=1)
    assert sort_rows([every, other, last]) == [last, every, other]
    assert sort_rows([last, every]) == [last, every]
    assert sort_rows([every, replace(last, fits=TIGHT)])[0] == every
    assert sort_rows([replace(every, fits=NO), replace(last, fits=NO)])[0].choice == every.choice


def test_the_plan_and_the_run_choose_alike(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """With the same keys on the same ranks, where there is room for all and where there is not."""
    recipe = bench.path / "llama.toml"
    recipe.write_text(LLAMA.replace("nowhere.jsonl", str(bench.path / "data.jsonl")))
    given = ["--world", "2", "--device", "cpu", "--parallel.wrapper=fsdp2", "--update.micro_batch_size=1"]
    given += ["--model.activation_checkpointing=false", "--parallel.reshard_after_forward=true"]
    size = {"model__config__hidden_size": 128, "model__config__num_hidden_layers": 3}
    given += [*overrides(size), "--data.max_sample_tokens=16"]
    rows = {row.choice.sync: row for row in plan_recipe(recipe, [*given, "--json"]) if row.choice.fused}
    assert plan_recipe(recipe, given)[0].choice.sync == LAST
    assert 'sync = "last"' in capsys.readouterr().out
    between = (rows["every"].peak_bytes + rows["last"].peak_bytes) // 2
    assert rows["every"].peak_bytes < rows["last"].peak_bytes
    assert plan_recipe(recipe, [*given, f"--memory={between}B"])[0].choice.sync == "every"
    values = {"parallel__wrapper": "fsdp2", "update__micro_batch_size": 1, "run__folder": bench.folder, **size}
    line = chosen_line(bench.train(ranks=2, recipe=recipe, **values, run__max_steps=1))
    assert line.startswith("update.sync last: ")
    assert f"every would send {gb_text(rows['every'].sent_bytes)} an update" in line, "as the plan says"


def test_a_plan_says_that_a_microbatch_is_lowered(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = bench.path / "llama.toml"
    recipe.write_text(LLAMA)
    plan_recipe(recipe, ["--update.micro_batch_size=64"])
    assert "update.micro_batch_size 64 is lowered: a rank has no more samples of an update\n" in capsys.readouterr().out
    plan_recipe(recipe, ["--update.micro_batch_size=4"])
    assert "is lowered" not in capsys.readouterr().out

"""`megabatch plan`: what it says fits, what it prints to be pasted, and what it refuses."""

import json
import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megabatch import MegabatchError
from megabatch.train.config.recipe import load_config
from megabatch.train.plan.estimate import estimate_cost
from megabatch.train.plan.request import read_request
from megabatch.train.plan.search import (
    CERTAIN,
    CLOSED_FORM,
    MIN_LAYERS,
    NO,
    SIMULATION,
    TIGHT,
    YES,
    PlanRow,
    judge_memory,
    min_peak_bytes,
    open_runner,
    reserved_bytes,
)
from megabatch.train.plan.simulation import Simulator, build_simulator
from megabatch.train.plan.table import keys_of, override_words, plan_recipe, toml_text
from megabatch.train.runtime.console import Console
from tests.train.conftest import Bench
from tests.train.processes import Run

pytestmark = pytest.mark.slow

LLAMA = """
[model.config]
model_type = "llama"
vocab_size = 384
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 1
num_attention_heads = 4
num_key_value_heads = 4
max_position_embeddings = 256

[data]
path = "nowhere.jsonl"
max_sample_tokens = 64

[update]
global_batch_size = 4
micro_batch_size = 1
"""
KEYS = {
    "micro_batch_size", "num_microbatches", "sync", "fits", "peak_bytes", "reserved_bytes", "wire_bytes", "seconds",
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "ddp": (2, {"parallel__wrapper": "ddp"}),
    "replicate": (2, {"parallel__wrapper": "replicate"}),
    "fsdp2": (2, {"parallel__wrapper": "fsdp2"}),
    "hsdp": (4, {"parallel__dp_replicate": 2, "parallel__dp_shard": 2, "update__global_batch_size": 8}),
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "llama.toml"
    path.write_text(LLAMA)
    return path


def arguments(world: int = 1, **values: Any) -> list[str]:
    return ["--world", str(world), *(f"--{key.replace('__', '.')}={value}" for key, value in values.items())]


def planned(recipe: Path, world: int = 1, **values: Any) -> list[PlanRow]:
    return plan_recipe(recipe, ["--json", *arguments(world, **values)])


def subject(recipe: Path, world: int = 1, **values: Any) -> Simulator:
    asked = read_request(arguments(world, **values))
    config = load_config(recipe, list(asked.overrides))
    return build_simulator(config, replace(asked, overrides=()), Console(enabled=False, loss_digits=4))


def test_json_has_the_rows_alone_and_the_best_first(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(recipe, 2, parallel__wrapper="fsdp2")
    rows = json.loads(capsys.readouterr().out)
    assert all(row.keys() >= KEYS for row in rows)
    assert {(row["micro_batch_size"], row["num_microbatches"], row["sync"]) for row in rows} == {
        (1, 2, "every"), (1, 2, "last"), (2, 1, "every"),
    }  # fmt: skip
    assert {row["fits"] for row in rows} == {YES}
    run = [row for row in rows if row["by"] == SIMULATION]
    assert rows[: len(run)] == sorted(run, key=lambda row: row["seconds"])
    assert all(sum(row["peak_bytes_by_category"].values()) == row["peak_bytes"] for row in run)
    assert all(row["reserved_bytes"] >= row["peak_bytes"] for row in run)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_closed_form_agrees_with_the_runs(recipe: Path, name: str) -> None:
    """Its traffic is exact, and its memory is never so much too high that it would leave out what fits."""
    world, values = LAYOUTS[name]
    what = subject(recipe, world, **values)
    rows = planned(recipe, world, **values)
    for row in (row for row in rows if row.by == SIMULATION):
        guess = estimate_cost(row.choice, what.sizes, what.sample.length_tokens, what.device)
        assert guess.sent_bytes == pytest.approx(row.sent_bytes, rel=1e-3, abs=8192)
        assert guess.peak_bytes * CERTAIN <= row.peak_bytes


def test_what_a_run_says_of_larger_choices_is_never_too_much(recipe: Path) -> None:
    what = subject(recipe, 2, parallel__wrapper="fsdp2")
    with open_runner(what, 2**40) as run:
        rows = run([choice for choice in what.grid.choices() if choice.fused])
    said = [(row, min_peak_bytes(row.choice, other)) for row, other in product(rows, rows)]
    assert sum(least > 0 for _, least in said) > len(rows)
    assert all(least <= row.peak_bytes for row, least in said)


def test_holding_back_costs_memory_and_saves_traffic(recipe: Path) -> None:
    wide = {"model__config__hidden_size": 128, "model__config__num_hidden_layers": 3, "update__micro_batch_size": 1}
    rows = {
        row.choice.sync: row
        for row in planned(recipe, 2, parallel__wrapper="fsdp2", model__activation_checkpointing="true", **wide)
        if row.choice.fused
    }
    assert rows["last"].peak_bytes > rows["every"].peak_bytes
    assert rows["last"].sent_bytes < rows["every"].sent_bytes


def test_with_replicas_nothing_is_run_that_sends_more_for_nothing(recipe: Path) -> None:
    world, values = LAYOUTS["hsdp"]
    rows = planned(recipe, world, update__micro_batch_size=1, **values)
    assert {row.choice.sync for row in rows if row.by == SIMULATION} == {"replica_last", "last"}
    sent = {row.choice.sync: row.sent_bytes for row in rows}
    assert sent["last"] < sent["replica_last"] < sent["every"]


@pytest.mark.parametrize(
    ("world", "values"),
    [
        (2, {"parallel__tp": 2}),
        (4, {"parallel__tp": 2, "parallel__wrapper": "fsdp2", "parallel__loss_parallel": "true"}),
        (2, {"parallel__wrapper": "fsdp2", "model__compute_dtype": "bfloat16", "optim__name": "Adagrad"}),
        (1, {"model__compute_dtype": "bfloat16", "optim__name": "SGD", "optim__options__momentum": 0.9}),
        (2, {"model__dtype": "bfloat16", "update__accumulate_dtype": "float32"}),
        (1, {"data__pack_tokens": 64, "model__attention": "eager"}),
        (1, {"model__freeze": "*.embed_tokens.*", "update__max_norm": "none"}),
    ],
)  # fmt: skip
def test_what_the_trainer_builds_is_planned(recipe: Path, world: int, values: dict[str, Any]) -> None:
    best, *_ = planned(recipe, world, update__micro_batch_size=2, model__activation_checkpointing="true", **values)
    assert (best.fits, best.by) == (YES, SIMULATION)
    assert best.peak_bytes > 0


def test_a_model_and_samples_of_ones_own_are_planned(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "from megabatch import losses\n"
        "def model(width): return nn.Linear(3, width)\n"
        "def data(): return [{'x': torch.zeros(3), 'labels': torch.zeros(5)} for _ in range(40)]\n"
    )
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        f'[model]\nfunction = "{tmp_path}/own.py:model"\n[model.options]\nwidth = 5\n'
        f'[data]\nfunction = "{tmp_path}/own.py:data"\n[loss]\nfunction = "megabatch.losses:mse"\n'
        "[update]\nglobal_batch_size = 4\nmicro_batch_size = 2\n"
    )
    rows = planned(recipe, 2)
    assert {row.choice.micro_batch_size for row in rows} == {1, 2}
    assert not any(row.choice.recompute for row in rows)


def test_where_too_little_is_there_nothing_fits(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    little = ["--device", "cpu", "--memory", "1MiB"]
    rows = plan_recipe(recipe, little)
    assert {row.fits for row in rows} == {NO}
    out = capsys.readouterr().out
    assert "nothing fits: the least is " in out
    assert "[update]" not in out
    assert {row.by for row in rows} == {CLOSED_FORM}
    with pytest.raises(MegabatchError, match="nothing fits, so there is no memory"):
        plan_recipe(recipe, [*little, "--chart", str(recipe.with_suffix(".png"))])


def test_between_all_and_nothing_the_smaller_fit(recipe: Path) -> None:
    """A microbatch of eight needs more than is there, one of one does not."""
    peaks = {row.choice: row.peak_bytes for row in planned(recipe, device="cpu") if row.by == SIMULATION}
    limit = sorted(peaks.values())[len(peaks) // 2]
    rows = planned(recipe, device="cpu", memory=f"{limit}B")
    assert {row.fits for row in rows} == {YES, NO}
    for row in rows:
        if row.choice in peaks and row.by == SIMULATION:
            assert (row.fits == YES) == (peaks[row.choice] <= limit)
        if row.by == CLOSED_FORM and row.fits == NO and row.choice in peaks:
            assert peaks[row.choice] > limit


@pytest.mark.parametrize("device", ["cpu", "a100-80g"])
def test_what_fits_is_what_the_allocator_takes(recipe: Path, device: str) -> None:
    what = subject(recipe, 2, parallel__wrapper="fsdp2", device=device)
    found = what.simulate(what.grid.choices()[0])
    assert judge_memory(found, reserved_bytes(found))[0] == YES
    assert judge_memory(found, found.peak_bytes - 1)[0] == NO
    between = found.peak_bytes
    told = judge_memory(found, between)[0]
    if device == "cpu":
        assert (told, reserved_bytes(found)) == (YES, found.peak_bytes)
        return
    assert reserved_bytes(found) > found.peak_bytes
    reserved, expandable = found.reserved(between), found.reserved(between, expandable=True)
    assert told == (
        YES if reserved.fits and not reserved.retries else TIGHT if expandable.fits or reserved.fits else NO
    )
    assert told != YES


def test_two_processes_find_what_one_finds(recipe: Path) -> None:
    what = subject(recipe, 2, parallel__wrapper="fsdp2")
    choices = [choice for choice in what.grid.choices() if choice.fused][:2]
    large = replace(what, sizes=replace(what.sizes, num_layers=MIN_LAYERS))  # which says that one process will not do
    with open_runner(large, 2**40) as together, open_runner(what, 2**40) as alone:
        assert together(choices) == alone(choices)


@pytest.mark.parametrize("bound", ["micro_batch_size", "max_microbatch_tokens"])
def test_the_lines_that_are_printed_load_and_train(
    bench: Bench, bound: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.recipe.write_text(bench.recipe.read_text().replace("max_microbatch_tokens = 256", f"{bound} = 160"))
    best, *_ = plan_recipe(bench.recipe, ["--length=160", "--update.global_batch_size=2"])
    lines = toml_text(keys_of(best, load_config(bench.recipe, [])))
    out = capsys.readouterr().out
    assert lines in out
    tables = tomllib.loads(lines)
    update, model = lines.split("\n\n")
    pasted = bench.path / "pasted.toml"
    text = bench.recipe.read_text().replace(f"{bound} = 160", update.removeprefix("[update]\n"))
    pasted.write_text(text.replace("[model]\n", f"{model}\n", 1))
    loaded = load_config(pasted, [])
    assert (
        getattr(loaded.update, bound)
        == tables["update"][bound]
        == best.choice.micro_batch_size * (160 if bound == "max_microbatch_tokens" else 1)
    )
    assert loaded.model.activation_checkpointing == best.choice.recompute
    assert loaded.update.sync == best.choice.sync
    command = out.splitlines()[-1]
    assert command.startswith(f"or: megabatch train {bench.recipe} ")
    assert command.endswith(" ".join(override_words(tables)))
    bench.train(recipe=pasted, run__max_steps=1, eval__num_samples=0)


def test_the_chart_is_drawn_and_the_table_names_the_runner_up(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = recipe.with_suffix(".svg")
    plan_recipe(recipe, [*arguments(2, parallel__wrapper="fsdp2"), "--chart", str(chart)])
    out = capsys.readouterr().out
    assert "\nbest: " in out
    assert "\nrunner-up: " in out
    assert "optimizer states" in chart.read_text()


def test_without_a_length_the_data_are_read(bench: Bench) -> None:
    values = {"data__cache": bench.path / "cache", "model__config__n_layer": 1}
    rows = planned(bench.recipe, **values)
    assert {row.microbatch_tokens // row.choice.micro_batch_size for row in rows} == {136}


def test_the_command_line_ends_as_it_should(recipe: Path, tmp_path: Path) -> None:
    refused = Run(["plan", str(recipe), "--memory", "80 bananas"], tmp_path / "refused", 1).wait()[0]
    assert (refused.status, refused.out) == (2, "")
    assert refused.err == "megabatch: --memory is '80 bananas'; write a size with its unit, 80GiB say\n"
    for rank in Run(["plan", str(recipe)], tmp_path / "two", 2).wait():
        assert rank.status == 2
    asked = Run(["plan", "--help"], tmp_path / "asked", 1).wait()[0]
    assert (asked.status, asked.err) == (0, "")
    assert "--bandwidth" in asked.out
    assert "--update.global" in asked.out
    done = Run(["plan", str(recipe), "--json"], tmp_path / "done", 1).wait()[0]
    assert (done.status, done.err) == (0, "")
    assert json.loads(done.out)[0]["fits"] == YES

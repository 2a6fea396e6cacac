"""`megabatch plan`: what it says fits, what it prints to be pasted, and what it refuses."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks.published_runs import (
    RUNS,
    SOURCES,
    Predicted,
    Published,
    divide_as_kempner,
    predict,
    recipe_of,
    summary,
)
from megabatch import GradientAccumulator, MegabatchError, UpdateSampler
from megabatch.simulate import device_named, extend
from megabatch.train.cli.arguments import Plan, options_of
from megabatch.train.config import Config, ModelConfig, ParallelConfig
from megabatch.train.config.contradictions import check_config
from megabatch.train.config.parallel_layout import layout_of
from megabatch.train.config.recipe import load_config, split_options
from megabatch.train.config.recipe_paths import check_paths
from megabatch.train.model.architecture import silence
from megabatch.train.plan import simulation
from megabatch.train.plan.device_file import device_toml
from megabatch.train.plan.estimate import estimate_cost
from megabatch.train.plan.grid import Choice, Grid, Limit, Split, UpdateLengths, build_grid
from megabatch.train.plan.layouts import build_layouts, layout_text, pipeline_degrees, propose_layouts
from megabatch.train.plan.request import PlanRequest
from megabatch.train.plan.search import (
    CERTAIN,
    CLOSED_FORM,
    NO,
    SIMULATION,
    TIGHT,
    YES,
    PlanRow,
    judge_memory,
    min_peak_bytes,
    reserved_bytes,
    run_simulation,
    search_choices,
    sort_rows,
    with_margin,
)
from megabatch.train.plan.simulation import Repeats, Simulator, bare_model, build_simulator, find_repeats
from megabatch.train.plan.table import command_line, keys_of, launcher_words, override_words
from megabatch.train.runtime.console import Console
from tests.train.conftest import Bench
from tests.train.planning import plan, request_of

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
SILENT = Console(enabled=False, loss_digits=4)
KEYS = {
    "micro_batch_size", "num_microbatches", "sync", "fits", "peak_bytes", "reserved_bytes", "wire_bytes", "seconds",
    "tokens_per_second",
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "ddp": (2, {"parallel__wrapper": "ddp"}),
    "replicate": (2, {"parallel__wrapper": "replicate"}),
    "fsdp2": (2, {"parallel__wrapper": "fsdp2"}),
    "hsdp": (4, {"parallel__dp_replicate": 2, "parallel__dp_shard": 2, "update__global_batch_size": 8}),
    "gathered once": (
        2,
        {
            "parallel__wrapper": "fsdp2",
            "update__sync": "gather_once",
            "model__config__num_hidden_layers": 3,
            "model__compute_dtype": "bfloat16",
        },
    ),
    "cp": (4, {"parallel__cp": 4, "model__config__num_key_value_heads": 2}),
    "cp, recomputed": (2, {"parallel__cp": 2, "model__activation_checkpointing": "true"}),
    "offload": (2, {"parallel__wrapper": "fsdp2", "parallel__cpu_offload": "true"}),
    "compiled": (2, {"parallel__wrapper": "fsdp2", "model__compile": "true"}),
    "fsdp2 over cp": (4, {"parallel__cp": 2, "parallel__wrapper": "fsdp2"}),
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "llama.toml"
    path.write_text(LLAMA)
    return path


def named_recipe(recipe: Path, size: dict[str, Any]) -> Path:
    """A recipe of the same model with other sizes, which it names. The folder has no weights."""
    keys = tomllib.loads(recipe.read_text())
    LlamaConfig(**{**keys["model"].pop("config"), **size}).save_pretrained(recipe.parent / "base")
    keys["model"] = {"name": str(recipe.parent / "base"), "tokenizer": "bytes"}
    named = recipe.with_name("named.toml")
    named.write_text(tomli_w.dumps(keys))
    return named


def arguments(world: int = 1, **values: Any) -> list[str]:
    return ["--world", str(world), *(f"--{key.replace('__', '.')}={value}" for key, value in values.items())]


def planned(recipe: Path, world: int = 1, **values: Any) -> list[PlanRow]:
    return plan(recipe, ["--json", *arguments(world, **values)])


def subject(recipe: Path, world: int = 1, **values: Any) -> Simulator:
    asked = request_of(arguments(world, **values))
    config = load_config(recipe, list(asked.overrides))
    return build_simulator(config, replace(asked, overrides=()), SILENT)


@pytest.mark.slow
def test_json_has_the_rows_alone_and_the_best_first(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(recipe, 2, parallel__wrapper="fsdp2")
    rows = json.loads(capsys.readouterr().out)
    assert all(row.keys() >= KEYS for row in rows)
    assert {(row["micro_batch_size"], row["num_microbatches"], row["sync"]) for row in rows} == {
        (1, 2, "every"), (1, 2, "last"), (1, 2, "gather_once"), (2, 1, "every"),
    }  # fmt: skip
    assert {row["fits"] for row in rows} == {YES}
    run = [row for row in rows if row["by"] == SIMULATION]
    assert rows[: len(run)] == sorted(run, key=lambda row: row["seconds"])
    assert all(sum(row["peak_bytes_by_category"].values()) == row["peak_bytes"] for row in run)
    assert all(row["reserved_bytes"] >= row["peak_bytes"] for row in run)


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_a_run_says_of_larger_choices_is_never_too_much(recipe: Path) -> None:
    what = subject(recipe, 2, parallel__wrapper="fsdp2")
    rows = [run_simulation(what, 2**40, choice) for choice in what.grid.choices()]
    said = [(row, min_peak_bytes(row.choice, other)) for row, other in product(rows, rows)]
    assert sum(least > 0 for _, least in said) > len(rows)
    assert all(least <= row.peak_bytes for row, least in said)


SEARCHED: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {"parallel__wrapper": "fsdp2", "update__global_batch_size": 8}),
    "slow links": (
        16,
        {"parallel__wrapper": "fsdp2", "update__global_batch_size": 32, "model__config__num_hidden_layers": 3},
    ),
    "copies": (2, {"parallel__wrapper": "ddp", "update__global_batch_size": 16, "model__config__hidden_size": 256}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHED)
def test_the_best_is_that_of_simulating_every_choice(recipe: Path, name: str) -> None:
    world, values = SEARCHED[name]
    what = subject(recipe, world, device="cpu", **values)
    every = [run_simulation(what, 2**40, choice) for choice in what.grid.choices()]
    peaks = {row.choice: row.peak_bytes for row in every}
    sizes = sorted(peaks.values())
    for limit in (sizes[len(sizes) // 4], sizes[len(sizes) // 2], 2**40):
        expected, *_ = sort_rows([replace(row, fits=YES if row.peak_bytes <= limit else NO) for row in every])
        rows = search_choices([what], limit, lambda _: None)
        best, *others = rows
        assert (best.choice, best.by, best.seconds) == (expected.choice, SIMULATION, expected.seconds)
        simulated = [row for row in (best, *others) if row.by == SIMULATION]
        assert len(simulated) < len(every) == len(others) + 1
        assert all(row.peak_bytes <= peaks[row.choice] for row in others if row.is_least)


def test_the_progress_counts_simulations_and_not_choices(recipe: Path) -> None:
    steps: list[int] = []
    rows = search_choices([subject(recipe, 1, device="cpu")], 2**40, steps.append)
    assert sum(steps) == sum(row.by == SIMULATION for row in rows) < len(rows)


@pytest.mark.parametrize(
    ("world", "stated", "texts"),
    [
        (2, [], ["fsdp2 2", "ddp 2", "tp 2"]),
        (
            16,
            ["--ranks-per-node=4"],
            [
                "fsdp2 16", "ddp 16", "hsdp 4 x 4", "fsdp2 8, tp 2", "replicate 8, tp 2", "hsdp 4 x 2, tp 2",
                "fsdp2 4, tp 4", "replicate 4, tp 4",
            ],
        ),
        (8, ["--parallel.tp=4"], ["fsdp2 2, tp 4", "replicate 2, tp 4"]),
        (8, ["--parallel.wrapper=ddp"], ["ddp 8"]),
        (8, ["--parallel.cp=4", "--parallel.tp=1"], ["fsdp2 2, cp 4", "replicate 2, cp 4"]),
        (2, ["--length=8192"], ["fsdp2 2", "ddp 2", "cp 2", "cp 2", "tp 2"]),
    ],
)  # fmt: skip
def test_the_layouts_of_processes(recipe: Path, world: int, stated: list[str], texts: list[str]) -> None:
    asked = request_of(["--layouts", *arguments(world), *stated])
    found = propose_layouts(load_config(recipe, list(asked.overrides)).parallel, asked, asked.length_tokens or 64)
    assert [layout_text(each) for each in found] == texts
    for each in found:
        replicas, shards = layout_of(each, world).data_degrees(each.wrapper, world)
        assert replicas * shards * each.cp * each.tp == world
        assert each.sequence_parallel == (each.tp > 1)


def test_pipelines_are_among_the_layouts_of_a_model_that_can_be_cut(recipe: Path) -> None:
    asked = request_of(["--layouts", *arguments(8, model__config__num_hidden_layers=4)])
    config = load_config(recipe, list(asked.overrides))
    with silence():
        degrees = pipeline_degrees(bare_model(config), config, asked)
    assert degrees == [1, 2, 4]  # a layer for each stage, of four, and four samples
    texts = [layout_text(each) for each in propose_layouts(config.parallel, asked, 64, degrees)]
    cut = [text for text in texts if "pp" in text and "tp" not in text]
    assert cut == ["fsdp2 4, pp 2", "replicate 4, pp 2", "fsdp2 2, pp 4", "replicate 2, pp 4"]
    assert "tp 2, pp 4" in texts
    long = [layout_text(each) for each in propose_layouts(config.parallel, asked, 16384, degrees)]
    assert {"fsdp2 2, cp 2, pp 2", "cp 2, tp 2, pp 2"} <= {*long} - {*texts}
    stated = request_of(["--layouts", *arguments(8, parallel__pp=3)])
    config = load_config(recipe, list(stated.overrides))
    assert pipeline_degrees(bare_model(config), config, stated) == [3]
    config = config.model_copy(update={"parallel": ParallelConfig()})
    with silence():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_neox", num_hidden_layers=4, hidden_size=64))
    assert pipeline_degrees(model, config, asked) == [1]


@pytest.mark.slow
def test_stages_of_cut_sequences_hold_half_of_the_activations(recipe: Path) -> None:
    values = {"parallel__pp": 2, "model__config__num_hidden_layers": 2, "update__micro_batch_size": 4}
    whole, cut = (
        plan(recipe, arguments(world, **values, parallel__wrapper="replicate", **keys))[0].at_peak["activations"]
        for world, keys in ((2, {}), (4, {"parallel__cp": 2}))
    )
    assert cut < 0.75 * whole


@pytest.mark.slow
def test_a_pipeline_is_planned_with_the_microbatches_that_run(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"parallel__pp": 2, "model__config__num_hidden_layers": 2, "update__micro_batch_size": 4}
    rows = plan(recipe, arguments(2, **values, model__activation_checkpointing="true"))
    assert [row.choice.num_microbatches for row in rows] == [2]  # one, and one of no weight: 1F1B has two stages
    assert (rows[0].choice.sync, rows[0].by, rows[0].parallel.pp) == ("last", SIMULATION, 2)
    out = capsys.readouterr().out
    assert "pipeline over 2 ranks, one stage of the layers on each, in the order of 1F1B" in out
    assert "2 microbatches of 4" in out
    assert "--parallel.pp=2" in out


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_the_closed_form_of_a_pipeline_leaves_out_nothing_that_fits(recipe: Path, schedule: str) -> None:
    values = {"parallel__pp": 2, "model__config__num_hidden_layers": 2, "update__global_batch_size": 8}
    what = subject(recipe, 2, **values, parallel__schedule=schedule)
    rows = [run_simulation(what, 2**40, each) for each in what.grid.choices() if each.micro_batch_size in (1, 4)]
    for row in rows:
        guess = what.estimate(row.choice)
        assert CERTAIN * guess.peak_bytes <= row.peak_bytes
        assert guess.bubble == pytest.approx(1 / row.choice.num_microbatches)
        held = [each for each in rows if what.num_held(row.choice) >= what.num_held(each.choice)]
        assert all(min_peak_bytes(row.choice, each) <= row.peak_bytes for each in held)


@pytest.mark.slow
def test_layouts_are_compared_and_the_keys_of_the_best_are_those_of_its_plan(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = plan(recipe, ["--layouts", *arguments(2, update__sync="last")])
    out = capsys.readouterr().out
    best, *_ = rows
    assert {layout_text(row.parallel) for row in rows} == {"fsdp2 2", "ddp 2", "tp 2"}
    assert all(f"\n{layout}  " in out for layout in ("fsdp2 2", "ddp 2", "tp 2"))
    assert f"best: {layout_text(best.parallel)}: " in out
    assert "\n2. " in out
    words = override_words(keys_of(best, load_config(recipe, [])))
    again = plan(recipe, ["--json", "--world", "2", *words])[0]
    assert layout_text(again.parallel) == layout_text(best.parallel)
    assert (again.choice, again.seconds, again.peak_bytes) == (best.choice, best.seconds, best.peak_bytes)


@pytest.mark.slow
def test_the_host_is_proposed_where_nothing_else_fits(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"model__config__hidden_size": 256, "update__global_batch_size": 2, "device": "cpu"}
    offloaded = planned(recipe, 2, parallel__wrapper="fsdp2", parallel__cpu_offload="true", **values)[0]
    others = plan(recipe, ["--layouts", *arguments(2, **values)])
    least = min(row.peak_bytes for row in others)
    assert not any(row.parallel.cpu_offload for row in others)
    assert offloaded.peak_bytes < least
    capsys.readouterr()
    limit = (offloaded.peak_bytes + least) // 2
    best, *_ = plan(recipe, ["--layouts", *arguments(2, memory=f"{limit}B", **values)])
    assert (best.fits, layout_text(best.parallel)) == (YES, "fsdp2 2, offloaded")
    out = capsys.readouterr().out
    assert "\non the host: " in out
    assert "--parallel.cpu_offload=true" in out


@pytest.mark.slow
def test_the_host_steps_as_fast_as_its_memory_and_copies_as_fast_as_pcie(recipe: Path) -> None:
    what = subject(recipe, 2, parallel__wrapper="fsdp2", parallel__cpu_offload="true", device="h100")
    choice = what.grid.choices()[0]
    device = replace(what.device, launch_seconds=0.0, host_bytes_per_second=1e3, pcie_bytes_per_second=1e3)
    with silence():
        found = replace(what, device=device).simulate(choice)
    shard = 4 * what.sizes.num_parameters / 2
    step = found.phases["step"]
    assert step.cpu_seconds * 1e3 == pytest.approx((8 + 1 + 2) * shard, rel=0.01)  # AdamW, the norm and the clip
    forward, backward = found.phases["forward 2"], found.phases["backward 2"]
    assert forward.copy_seconds * 1e3 == pytest.approx(shard, rel=0.01)
    assert backward.copy_seconds * 1e3 == pytest.approx(shard, rel=0.01)
    assert found.seconds > found.compute_seconds + step.cpu_seconds
    assert found.bound == "host"


@pytest.mark.slow
def test_a_layout_that_the_trainer_lacks_is_left_out_in_a_line(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = {"model__config__num_attention_heads": 3, "model__config__num_key_value_heads": 3}
    plan(recipe, ["--layouts", *arguments(2, model__config__hidden_size=48, **heads)])
    out = capsys.readouterr().out
    assert "without tp 2: parallel.tp is 2, which does not divide model.config.num_attention_heads = 3" in out
    assert "\ntp 2 " not in out


@pytest.mark.full
@pytest.mark.parametrize(("model", "world"), [("Llama 3 8B", 2), ("Llama 3 8B", 4), ("Llama 3 13B", 8)])
def test_layouts_are_ranked_as_a_source_has_measured_them_in_a_plan(model: str, world: int) -> None:
    """All five published pairs are of these runs, which recompute activations."""
    runs = [run for run in RUNS if (run.source, run.model, run.world) == ("kempner", model, world)]
    asked = request_of([
        "--layouts", "--ranks-per-node=4", *arguments(world, device="h200", model__activation_checkpointing="true"),
        "--update.micro_batch_size=4",
    ])  # fmt: skip
    whole = recipe_of(next(run for run in runs if run.tp == 1))
    update = whole.update.model_copy(update={"micro_batch_size": 4})
    own = whole.model.model_copy(update={"activation_checkpointing": True})
    with silence():
        layouts, _ = build_layouts(whole.model_copy(update={"update": update, "model": own}), asked, SILENT)
        published = {run.tp for run in runs}
        layouts = [
            each
            for each in layouts
            if each.config.parallel.tp in published
            and each.config.parallel.wrapper in ("fsdp2", None)
            and each.config.parallel.pp == 1
        ]
        rows = search_choices(layouts, asked.limit_bytes, lambda _: None)
    seconds: dict[int, float] = {}
    for row in rows:
        seconds.setdefault(row.parallel.tp, row.seconds)
    fastest_first = sorted(runs, key=lambda run: -(run.tokens_per_second or 0))
    assert sorted(seconds, key=seconds.__getitem__) == [run.tp for run in fastest_first]


@pytest.mark.slow
def test_holding_back_costs_memory_and_saves_traffic(recipe: Path) -> None:
    wide = {"model__config__hidden_size": 128, "model__config__num_hidden_layers": 3, "update__micro_batch_size": 1}
    rows = {
        row.choice.sync: row
        for row in planned(recipe, 2, parallel__wrapper="fsdp2", model__activation_checkpointing="true", **wide)
    }
    assert rows["last"].peak_bytes > rows["every"].peak_bytes
    assert rows["last"].sent_bytes < rows["every"].sent_bytes


@pytest.mark.slow
def test_with_replicas_nothing_is_run_that_sends_more_for_nothing(recipe: Path) -> None:
    world, values = LAYOUTS["hsdp"]
    rows = planned(recipe, world, update__micro_batch_size=1, **values)
    sent = {row.choice.sync: row.sent_bytes for row in rows}
    assert sent.keys() == {"replica_last", "last", "gather_once"}
    (every, *_) = planned(recipe, world, update__micro_batch_size=1, update__sync="every", **values)
    assert max(sent["last"], sent["gather_once"]) < sent["replica_last"] < every.sent_bytes


@pytest.mark.slow
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
        (2, {"parallel__pp": 2, "model__config__num_hidden_layers": 2, "optim__ema_decay": 0.5}),
        (4, {"parallel__pp": 2, "model__config__num_hidden_layers": 2, "parallel__wrapper": "fsdp2",
             "model__compute_dtype": "bfloat16"}),
    ],
)  # fmt: skip
def test_what_the_trainer_builds_is_planned(recipe: Path, world: int, values: dict[str, Any]) -> None:
    best, *_ = planned(recipe, world, update__micro_batch_size=2, model__activation_checkpointing="true", **values)
    assert (best.fits, best.by) == (YES, SIMULATION)
    assert best.peak_bytes > 0


@pytest.mark.slow
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


@pytest.mark.slow
def test_where_too_little_is_there_nothing_fits(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    little = ["--device", "cpu", "--memory", "1MiB"]
    rows = plan(recipe, little)
    assert {row.fits for row in rows} == {NO}
    out = capsys.readouterr().out
    assert "nothing fits: the least is at least " in out
    assert out.count(" >=") == 3 * sum(row.is_least for row in rows[:6]) > 0
    assert "[update]" not in out
    assert {row.by for row in rows} == {CLOSED_FORM}


def test_between_all_and_nothing_the_smaller_fit(recipe: Path) -> None:
    """With the memory that one simulated update takes, those that take more do not fit."""
    limit = min(row.peak_bytes for row in planned(recipe, device="cpu") if row.by == SIMULATION)
    rows = planned(recipe, device="cpu", memory=f"{limit}B")
    assert {row.fits for row in rows if row.by == SIMULATION} == {YES, NO}
    what = subject(recipe, device="cpu")
    for row in rows:
        with silence():
            peak = what.simulate(row.choice).peak_bytes
        if row.by == SIMULATION:
            assert (row.fits == YES) == (peak <= limit)
        if row.why.startswith("at least"):  # a closed form that is a bound
            assert peak > limit


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "a100-80g"])
def test_what_fits_is_what_the_allocator_takes(recipe: Path, device: str) -> None:
    what = subject(recipe, 2, parallel__wrapper="fsdp2", device=device)
    found = what.simulate(what.grid.choices()[0])
    needed = reserved_bytes(found)
    margined = with_margin(needed, found.device)
    assert judge_memory(found, margined, needed)[0] == YES
    assert judge_memory(found, margined - 1, needed)[0] == (NO if device == "cpu" else TIGHT)
    assert judge_memory(found, needed, needed)[0] == (YES if device == "cpu" else TIGHT)
    assert judge_memory(found, found.peak_bytes - 1, needed)[0] == NO
    between = found.peak_bytes
    told = judge_memory(found, between, needed)[0]
    if device == "cpu":
        assert (told, needed) == (YES, found.peak_bytes)
        return
    assert needed > found.peak_bytes
    reserved, expandable = found.reserved(between), found.reserved(between, expandable=True)
    assert told == (TIGHT if expandable.fits or reserved.fits else NO)


ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEP_ROUTED = {"model_type": "qwen3_moe", "head_dim": 16, **ROUTED}
DEEP: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (4, {"parallel__wrapper": "fsdp2", "model__dtype": "bfloat16"}),
    "gather_once": (4, {"parallel__wrapper": "fsdp2", "optim__options__foreach": "true"}),
    "routed": (
        4,
        {
            "parallel__wrapper": "fsdp2",
            "model__dtype": "bfloat16",
            **{f"model__config__{key}": value for key, value in DEEP_ROUTED.items()},
        },
    ),
    "router loss": (
        4,
        {
            "parallel__ep": 2,
            "model__dtype": "bfloat16",
            "model__experts__router_loss": 0.01,
            # Means of so many experts take 512 bytes of each layer.
            **{f"model__config__{key}": value for key, value in (DEEP_ROUTED | {"num_experts": 128}).items()},
        },
    ),
    "selective": (1, {"model__activation_checkpointing": "selective"}),
    "tp": (4, {"parallel__tp": 2, "parallel__wrapper": "fsdp2", "parallel__sequence_parallel": "true"}),
    "recompute": (1, {"model__activation_checkpointing": "true"}),
    "offload": (4, {"parallel__wrapper": "fsdp2", "parallel__cpu_offload": "true"}),
    "on a CPU": (1, {"device": "cpu"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
def test_two_shallow_models_tell_of_a_deep_one(recipe: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, values = DEEP[name]
    extended: list[object] = []
    monkeypatch.setattr(simulation, "extend", lambda *args: extended.append(extend(*args)) or extended[-1])
    deep = subject(recipe, world, model__config__num_hidden_layers=12, **values)
    assert deep.repeats is not None
    choices = deep.grid.choices()[:2]
    if name == "gather_once":
        choices = [replace(choice, sync=name, num_microbatches=2, reshard=False) for choice in choices]
    for choice in choices:
        with silence():
            found, expected = (each.simulate(choice) for each in (deep, replace(deep, repeats=None)))
        assert (found.where, found.flops, found.num_parameters) == (
            expected.where, expected.flops, expected.num_parameters,
        )  # fmt: skip
        assert found.seconds == pytest.approx(expected.seconds, rel=5e-3)
        assert found.sent_bytes == pytest.approx(expected.sent_bytes, rel=1e-4)
        assert found.peak_bytes == expected.peak_bytes
        assert found.at_peak == expected.at_peak
        assert found.reserved().peak_bytes == expected.reserved().peak_bytes
        assert found.host_bytes == expected.host_bytes
    assert len(extended) == len(choices)
    assert None not in extended


@pytest.mark.slow
def test_a_step_that_is_cut_across_layers_is_extended(recipe: Path) -> None:
    """`LowBits` steps as much at a time as the embedding has, and that is more than a layer has."""
    values = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "vocab_size": 128256}
    shallow, deeper = (
        subject(
            recipe, 1024, parallel__wrapper="fsdp2", model__dtype="bfloat16", update__global_batch_size=4096,
            model__config__num_hidden_layers=num_layers, model__config__num_key_value_heads=8,
            **{f"model__config__{key}": value for key, value in values.items()},
        )
        for num_layers in (3, 4)
    )  # fmt: skip
    choice = next(choice for choice in shallow.grid.choices() if choice.recompute)
    with silence():
        pair = shallow.simulate(choice), deeper.simulate(choice)
    peaks: list[int] = []
    for num_blocks in (17, 47, 77):
        found = extend(*pair, num_blocks)
        assert found is not None
        peaks.append(found.peak_bytes)
    assert peaks[2] - peaks[1] == pytest.approx(peaks[1] - peaks[0], rel=0.01)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model_type": "llama", "num_hidden_layers": 12}, (3, 1, 9)),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 12, **ROUTED}, (3, 1, 9)),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 20, "mlp_only_layers": [0, 1, 2], **ROUTED}, (6, 1, 14)),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 20, "mlp_only_layers": [9], **ROUTED}, None),
        ({"model_type": "llama", "num_hidden_layers": 4}, None),  # nothing is spared
        (
            {"model_type": "gemma3_text", "num_hidden_layers": 20, "sliding_window": 8, "head_dim": 16,
             "layer_types": ["sliding_attention"] * 17 + ["full_attention"] * 3},
            None,
        ),
    ],
)  # fmt: skip
def test_layers_that_are_not_alike_are_all_simulated(
    values: dict[str, Any], expected: tuple[int, int, int] | None
) -> None:
    sizes = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4
    }  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes | values))
    assert find_repeats(model) == expected


def test_layers_of_several_stacks_or_of_other_code_are_all_simulated() -> None:
    sizes = {"vocab_size": 64, "d_model": 16, "d_ff": 16, "d_kv": 4, "num_heads": 4, "num_layers": 12}
    llama = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=12, num_attention_heads=4
    )

    class Own(LlamaForCausalLM):
        """A model that may use its layers in any order."""

    with torch.device("meta"):
        models = T5ForConditionalGeneration(T5Config(**sizes)), Own(llama), LlamaForCausalLM(llama)
    assert [find_repeats(model) for model in models] == [None, None, (3, 1, 9)]


@pytest.mark.slow
@pytest.mark.parametrize("bound", ["micro_batch_size", "max_microbatch_tokens"])
def test_the_lines_that_are_printed_load_and_train(
    bench: Bench, bound: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.recipe.write_text(bench.recipe.read_text().replace("max_microbatch_tokens = 256", f"{bound} = 160"))
    best, *_ = plan(bench.recipe, ["--length=160", "--update.global_batch_size=2"])
    lines = tomli_w.dumps(keys_of(best, load_config(bench.recipe, []))).rstrip()
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


@pytest.mark.slow
def test_the_speed_is_told_per_device_by_day_and_as_utilization(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*arguments(2, parallel__wrapper="ddp"), "--device", "h100", "--length", "128", "--tokens", "2.5B"]
    best = plan(recipe, words)[0]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("speed: ")]
    rate = best.tokens_per_second
    config = load_config(recipe, []).model.config
    layers, hidden, inside = (config[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    heads, key_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    layer = 2 * hidden**2 + 2 * hidden * hidden * key_heads // heads + 3 * hidden * inside + 2 * hidden
    computed = layers * layer + hidden + config["vocab_size"] * hidden  # with the head, without the input embedding
    mfu = (6 * computed + 12 * layers * hidden * 128) * rate / 2 / 67e12
    assert f"speed: {rate / 2:,.0f} tokens/s per device, {rate * 86_400 / 1e9:.3g}B tokens a day" in line
    assert f"MFU {mfu:.0%} of h100-80g's 67 TFLOP/s in float32" in line
    assert f"{2.5e9 / rate / 86_400:,.3g} days for 2.5B tokens; times are predicted, +-20 %" in line
    plan(recipe, [*arguments(1), "--device", "cpu", "--length", "128"])
    assert "no MFU: the peak of a CPU is not known" in capsys.readouterr().out
    plan(recipe, [*arguments(1, model__lora__r=4), "--device", "h100", "--length", "128"])
    assert "no MFU: model.lora is not counted in plans" in capsys.readouterr().out


def test_no_cell_of_the_table_is_cut(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*arguments(2, parallel__wrapper="fsdp2"), "--length", "128"]
    plan(recipe, words)
    wide = capsys.readouterr().out
    assert "\nrunner-up: " in wide
    monkeypatch.setenv("TERM", "dumb")  # of 80 columns, without colors
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    best = plan(recipe, words)[0]
    narrow = capsys.readouterr().out
    assert "activations" in wide.partition("best:")[0]
    head, _, body = narrow.partition("best:")[0].rpartition("─")
    assert "activations" not in head
    assert "\N{HORIZONTAL ELLIPSIS}" not in wide + narrow
    assert body.splitlines()[1].split()[-2:] == [f"{best.seconds:.3g}", best.bound]


@pytest.mark.parametrize("text", ["many", "0", "1Q", "-3B", "9" * 30])
def test_a_number_of_tokens_is_read(recipe: Path, text: str) -> None:
    with pytest.raises(MegabatchError, match=r"^--tokens is .*; write a number of tokens, 300M, 15B or 1.5T say$"):
        request_of(["--tokens", text])
    assert request_of(["--tokens", "1.5t"]).num_tokens == 1.5e12


@pytest.mark.slow
def test_a_folder_with_nothing_but_a_config_is_planned(recipe: Path, tmp_path: Path) -> None:
    own = tomllib.loads(LLAMA)
    (tmp_path / "config.json").write_text(json.dumps(own["model"]["config"]))
    recipe.write_text(tomli_w.dumps({**own, "model": {"name": str(tmp_path), "tokenizer": "bytes"}}))
    assert planned(recipe)[0].fits == YES
    with pytest.raises(MegabatchError, match="a folder without weights"):
        check_paths(load_config(recipe, []))


def test_without_a_length_the_data_are_read(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory is that of the longest sample, and time that of the lengths, which are shorter."""
    values = {"data__cache": bench.path / "cache", "model__config__n_layer": 1}
    rows = planned(bench.recipe, **values)
    own = [row for row in rows if row.microbatch_tokens == 256]  # the recipe's own limit, two samples at most
    assert {row.choice.micro_batch_size for row in own} == {2}
    others = [row for row in rows if row not in own]
    assert {row.microbatch_tokens // row.choice.micro_batch_size for row in others} == {136}
    capsys.readouterr()
    plan(bench.recipe, arguments(**values))
    out = capsys.readouterr().out
    assert "; time by 4 updates of " in out
    assert "\ndealing: " in out
    assert "% of the computed tokens are padding" in out
    what = subject(bench.recipe, device="cpu", **values)
    choice = next(each for each in what.grid.choices() if each.micro_batch_size == 1)
    assert choice.fill < 1
    with silence():
        ragged, longest = what.simulate(choice), what.simulate(replace(choice, fill=1.0))
    step = longest.phases["step"].compute_seconds
    assert ragged.peak_bytes == longest.peak_bytes
    assert ragged.compute_seconds - step == pytest.approx(choice.fill * (longest.compute_seconds - step))
    assert rows[0].tokens_per_second == pytest.approx(what.grid.lengths.num_tokens / rows[0].seconds)


RAGGED = tuple(int(length) for length in torch.randint(1, 40, (24,), generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("kind", ["micro_batch_size", "max_microbatch_tokens"])
@pytest.mark.parametrize("size", [1, 3, 24])
def test_an_update_is_split_as_the_library_splits_it(kind: str, size: int) -> None:
    longest = max(RAGGED)
    limit = Limit(size, None if kind == "micro_batch_size" else size * longest)
    num, fill, *_ = UpdateLengths((RAGGED,), longest, one_row=False).split(limit, 1)
    accumulator = GradientAccumulator(torch.nn.Linear(1, 1), **limit.as_keys())
    real = accumulator.plan([{"x": torch.zeros(each)} for each in RAGGED])
    assert (num, num * size * longest * fill) == (real.num_microbatches, pytest.approx(real.padded_tokens))


@pytest.mark.parametrize("kind", ["micro_batch_size", "max_microbatch_tokens"])
def test_a_pipeline_is_split_into_the_schedule_steps_of_a_run(kind: str) -> None:
    """Two lengths that are far apart: eight long samples in one step, and eight short ones in another."""
    parallel = ParallelConfig(pp=2, schedule="1F1B")
    lengths = UpdateLengths(((40,) * 8 + (10,) * 8,), 40, one_row=False, parallel=parallel)
    split = lengths.split(Limit(1, None if kind == "micro_batch_size" else 40), 2)
    if kind == "micro_batch_size":  # 4 microbatches of 40 tokens and 4 of 10 on each rank
        assert split == (8, pytest.approx((4 * 40 + 4 * 10) / (8 * 40)), 4, pytest.approx((1 + 1 / 4) / (5 / 8)))
    else:  # 4 of 40 tokens, and 4 short samples in one, which 1F1B over two ranks runs as two of two
        assert split == (6, pytest.approx((4 * 40 + 2 * 20) / (6 * 40)), 4, pytest.approx((1 + 1 / 2) / (5 / 6)))


@pytest.mark.slow
def test_deep_stages_that_are_cut_over_ranks_are_simulated_by_a_few_layers(recipe: Path) -> None:
    values = {"parallel__pp": 2, "parallel__tp": 2, "parallel__sequence_parallel": "true"}
    what = subject(recipe, 4, **values, model__config__num_hidden_layers=24, update__micro_batch_size=1)
    assert all(end.repeats is not None for end in what.ends)
    choice = what.grid.choices()[0]
    few, all_layers = (each.simulate(choice) for each in (what, replace(what, ends=[
        replace(end, repeats=None) for end in what.ends
    ])))  # fmt: skip
    assert few.peak_bytes == all_layers.peak_bytes
    assert few.sent_bytes == all_layers.sent_bytes


def test_layouts_share_the_models_whose_sizes_are_counted(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.nn.Module] = []
    monkeypatch.setattr(simulation, "bare_model", lambda *args: made.append(bare_model(*args)) or made[-1])
    asked = request_of(["--layouts", *arguments(8, model__config__num_hidden_layers=4)])
    with silence():
        layouts, _ = build_layouts(load_config(recipe, list(asked.overrides)), asked, SILENT)
    cuts = {(each.wrapper.name, each.config.parallel.pp) for each in layouts if each.ends}
    assert len(layouts) > 2 * len(cuts)
    assert len(made) == 1 + 2 * len(cuts)  # both ends of each


@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.full)])
def test_schedule_steps_gather_what_one_step_gathers(recipe: Path, reshard: bool) -> None:
    """What the last backward of a step gathers stays for the next one."""
    values = {"parallel__pp": 2, "parallel__wrapper": "fsdp2", "model__config__num_hidden_layers": 2}
    what = subject(recipe, 4, **values, update__micro_batch_size=1, update__global_batch_size=8)
    choice = next(each for each in what.grid.choices() if each.micro_batch_size == 1 and each.reshard == reshard)
    choices = [replace(choice, num_microbatches=num) for num in (2, 4)]
    choices.append(replace(choice, num_microbatches=4, num_together=2, bubbles=2.0))
    found = [what.simulate(each) for each in choices]
    few, whole, steps = ({each.collective: each.calls for each in one.sent if each.axis == "dp_shard"} for one in found)
    assert steps == whole
    assert (few["all_gather"] < whole["all_gather"]) == reshard
    for each, one in zip(choices, found, strict=True):
        assert what.estimate(each).sent_bytes == pytest.approx(one.sent_bytes, rel=1e-2)


@pytest.mark.slow
def test_an_update_in_two_schedule_steps_takes_as_long_as_both(recipe: Path) -> None:
    """And its memory is that of the larger one."""
    values = {"parallel__pp": 2, "model__config__num_hidden_layers": 2, "update__micro_batch_size": 1}
    what = subject(recipe, 2, **values, update__global_batch_size=8)
    choice = next(each for each in what.grid.choices() if each.micro_batch_size == 1)
    long, short = (
        what.simulate(replace(choice, num_microbatches=num, fill=fill)) for num, fill in ((6, 1.0), (2, 0.5))
    )
    split = Split(8, (6 + 2 * 0.5) / 8, 6, 1.5 / (7 / 8))
    both_choice = replace(choice, **split._asdict())
    both = what.simulate(both_choice)
    step = long.phases["step"].seconds
    assert both.seconds == pytest.approx(long.seconds + short.seconds - step, rel=0.03)  # mean microbatches
    assert (both.peak_bytes, both.num_microbatches) == (long.peak_bytes, 8)
    assert sum(each.sent_bytes for each in both.sent) == pytest.approx(
        sum(each.sent_bytes for found in (long, short) for each in found.sent), rel=0.01
    )
    one, two = what.estimate(replace(choice, num_microbatches=6)), what.estimate(both_choice)
    assert two.peak_bytes == one.peak_bytes
    assert two.compute_seconds == pytest.approx(one.compute_seconds * 7 / 6)
    assert two.bubble == pytest.approx(1.5 / 7)


def test_samples_in_one_row_are_not_padded() -> None:
    lengths = UpdateLengths(((90, *[10] * 7),), 90, one_row=True)
    assert lengths.split(Limit(1, 90), 1)[:2] == (2, pytest.approx(160 / (2 * 90)))
    assert lengths.split(Limit(1, 90), 2)[:2] == (2, pytest.approx(120 / (2 * 90))), (
        "the slower rank has the long one and three others"
    )
    assert lengths.split(Limit(4), 1)[:2] == (2, pytest.approx(160 / (2 * 4 * 90)))
    assert lengths.num_tokens == 160
    assert lengths.balance(Limit(1, 90), 2) == (0, 120 / 80)


def test_padding_and_the_busiest_rank_are_those_of_a_run() -> None:
    lengths = UpdateLengths((RAGGED,), max(RAGGED), one_row=False)
    padding, busiest = lengths.balance(Limit(3, 60), 2)
    computed: list[int] = []
    for rank in range(2):
        sampler = UpdateSampler(
            RAGGED, global_batch_size=len(RAGGED), max_microbatch_tokens=60, dp_rank=rank, dp_degree=2
        )
        share = [{"x": torch.zeros(RAGGED[sample])} for sample in next(iter(sampler))]
        gradient = GradientAccumulator(torch.nn.Linear(1, 1), max_microbatch_tokens=60)
        computed.append(gradient.plan(share).padded_tokens)
    assert padding == pytest.approx(1 - sum(RAGGED) / sum(computed), abs=0.05)  # a run may cut a rank's share finer
    assert busiest == pytest.approx(max(computed) * 2 / sum(RAGGED), abs=0.05)


def test_a_larger_microbatch_that_pads_more_may_take_longer() -> None:
    small, large = Choice(1, 4, "last", True, False, True, 0.3), Choice(4, 1, "last", True, False, True, 0.9)
    assert not large.takes_no_longer_than(small)
    assert replace(large, fill=0.3).takes_no_longer_than(small)


def config(**update: Any) -> Config:
    return Config.model_validate({"model": {"config": {}}, "update": update, "run": {"folder": "unused"}})


@pytest.mark.parametrize(
    ("values", "sizes"), [({"micro_batch_size": 3}, (1, 2, 3, 4, 6)), ({"max_microbatch_tokens": 9}, (1, 2, 3, 4, 6))]
)
def test_a_grid_has_every_size_that_makes_sense(values: dict[str, int], sizes: tuple[int, ...]) -> None:
    grid = build_grid(config(global_batch_size=12, **values), set(), "fsdp2", 2, 3)
    assert (sizes_in(grid), grid.recomputes, grid.fused) == (sizes, (False, True), True)
    choices = grid.choices()
    assert len(choices) == len(set(choices))
    assert {choice.num_microbatches for choice in choices if choice.micro_batch_size == 4} == {2}
    assert {choice.sync for choice in choices if choice.num_microbatches == 1} == {"every"}


def test_what_the_command_line_states_stays() -> None:
    stated = {"update.micro_batch_size", "update.sync", "model.activation_checkpointing"}
    grid = build_grid(config(global_batch_size=12, micro_batch_size=3, sync="last"), stated, "fsdp2", 2, 3)
    assert {(each.micro_batch_size, each.sync, each.recompute) for each in grid.choices()} == {(3, "last", False)}


def test_selective_recomputation_is_compared_if_the_recipe_has_it() -> None:
    recipe = config(global_batch_size=2).model_copy(update={"model": ModelConfig(activation_checkpointing="selective")})
    assert build_grid(recipe, set(), "fsdp2", 2, 3).recomputes == (False, "selective", True)
    assert build_grid(recipe, {"model.activation_checkpointing"}, "fsdp2", 2, 3).recomputes == ("selective",)


@pytest.mark.slow
def test_selective_recomputation_is_planned(recipe: Path) -> None:
    kept, some, most = (
        planned(recipe, model__activation_checkpointing=each, update__micro_batch_size=2)[0]
        for each in ("false", "selective", "true")
    )
    activations = [row.at_peak["activations"] for row in (kept, some, most)]
    assert activations == sorted(activations, reverse=True)
    assert kept.seconds < some.seconds < most.seconds
    assert (
        override_words(keys_of(some, config(global_batch_size=2)))[-1] == "--model.activation_checkpointing=selective"
    )


def sizes_in(grid: Grid) -> tuple[int, ...]:
    return tuple(sorted({limit.micro_batch_size for limit in grid.limits}))


@pytest.mark.parametrize(("cap", "sizes"), [(899, (1, 2, 4, 5)), (150, (1,)), (900, (1, 2, 4, 6))])
def test_a_cap_that_the_command_line_states_is_kept(cap: int, sizes: tuple[int, ...]) -> None:
    values = config(global_batch_size=12, max_microbatch_tokens=cap)
    grid = build_grid(values, {"update.max_microbatch_tokens"}, "fsdp2", 2, 150)
    assert sizes_in(grid) == sizes
    assert {*sizes_in(build_grid(values, set(), "fsdp2", 2, 150))} == {1, 2, 4, 6, *sizes}


def test_the_limit_of_a_recipe_is_planned_as_it_is() -> None:
    updates = ((150, *[100] * 11),)
    for cap, size, num_microbatches in ((20_000, 6, 1), (400, 3, 3)):
        values = config(global_batch_size=12, max_microbatch_tokens=cap)
        for stated in (set[str](), {"update.max_microbatch_tokens"}):
            grid = build_grid(values, stated, "fsdp2", 2, 150, updates)
            assert grid.limits[0] == Limit(size, cap)
            assert {each.num_microbatches for each in grid.choices() if each.limit_tokens == cap} == {num_microbatches}


def test_a_limit_that_splits_as_another_is_planned_once() -> None:
    grid = build_grid(config(global_batch_size=2, max_microbatch_tokens=10**6), set(), "fsdp2", 1, 9, ((9, 9),))
    assert {each.limit_tokens for each in grid.choices()} == {9, 10**6}


def test_the_device_of_the_help_is_planned_for() -> None:
    assert request_of([]).device.name == str(Plan.device)


def test_an_override_in_two_words_is_one() -> None:
    values, overrides = split_options(
        ["--update.sync", "last", "--ranks_per_node=2", "--world", "4", "--json", "--optim.lr=1", "--data.streaming"],
        *options_of(Plan),
    )
    assert values == [("ranks-per-node", "2"), ("world", "4"), ("json", "")]
    assert overrides == ["--update.sync=last", "--optim.lr=1", "--data.streaming"]
    with pytest.raises(MegabatchError, match=r"^--layouts=4: --layouts takes no value"):
        split_options(["--layouts=4"], *options_of(Plan))


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (1, "megabatch"),
        (4, "torchrun --nproc-per-node 4 -m megabatch"),
        (8, "torchrun --nproc-per-node 8 -m megabatch"),
        (12, "torchrun --nnodes 2 --nproc-per-node 6 --rdzv-backend c10d"),
        (
            16,
            "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id megabatch",
        ),
    ],
)
def test_the_command_starts_as_many_processes(world: int, words: str) -> None:
    found = launcher_words(request_of(["--world", str(world)]))
    assert " ".join(found).startswith(words)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["--world", "0"], "--world is '0'; it must be a whole number of at least 1"),
        (["--world"], "--world has no value; write --world VALUE"),
        (["--world", "2.5"], "--world is '2.5'; it must be a whole number of at least 1"),
        (["--memory", "80 bananas"], "--memory is '80 bananas'; write a size with its unit, 80GiB say"),
        (["--memory", "0GiB"], "--memory is '0GiB'; write a size with its unit, 80GiB say"),
        (["--memory", "1GiB"], "--memory is 1,073,741,824 bytes, and the context of a a100-80g alone takes"),
        (["--bandwidth", "fast"], "--bandwidth is 'fast'; write bytes or bits per second with their unit, 235GB/s say"),
        (["--device", "abacus"], "the device 'abacus' is not known; name one of "),
        (["--device", "none.toml"], "the device file none.toml cannot be read ("),
        (["--length=64", "--update.max_microbatch_tokens=50"], "update.max_microbatch_tokens is 50 and the longest"),
        (["--length", "1"], "--length is '1'; it must be a whole number of at least 2"),
        (["--length", "512"], "a sample has 512 tokens and the model 256 positions; raise the positions"),
        (["--update.batch_size=3"], "unknown key update.batch_size on the command line; here it is update.global"),
        (["--layouts"], "--layouts compares layouts of several processes and --world is 1; give --world N"),
        (["--layouts", "--world=4", "--parallel.tp=3"], "no layout of 4 processes has the degrees that the"),
        (["extra"], "cannot read the argument 'extra'; write --section.key=value"),
        (["--world", "3", "--parallel.tp=2"], "parallel.tp is 2 and there are 3 processes; take a multiple of 2"),
        (
            ["--world", "2", "--parallel.wrapper=ddp", "--parallel.dp_shard=2"],
            'parallel.wrapper is "ddp", which shards nothing',
        ),
        (["--optim.in_backward"], "unknown key optim.in_backward on the command line; it was removed"),
        (["--world", "2", "--parallel.pp=2"], "model.config.num_hidden_layers is 1 and 1F1B over 2 ranks has 2 stages"),
        (
            ["--world", "2", "--parallel.pp=2", "--model.config.num_hidden_layers=2", "--update.sync=every"],
            "update.sync is 'every', but a pipeline reduces once per call",
        ),
        (["--data.max_sample_tokens=none"], "data.path is 'nowhere.jsonl', and there is no such file"),
        (["--optim.name=LBFGS"], "optim.name is 'LBFGS', which cannot be used"),
        (["--optim.name=Adafactor"], "optim.name is 'Adafactor', whose step looks at numbers, and a plan has none"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(recipe: Path, given: Sequence[str], line: str) -> None:
    with pytest.raises(MegabatchError) as caught:
        plan(recipe, given)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_device_file_decides_the_time(recipe: Path, tmp_path: Path) -> None:
    """With arithmetic so slow that nothing else counts, twice the rate takes half of the time."""
    times: list[float] = []
    for rate in (1e7, 2e7):
        file = tmp_path / "here.toml"
        rates = {"float32": rate, "bfloat16": rate}
        figures = {"like": "cpu", "name": "here", "torch": "2", "memory_bytes": 2**36, "memory_bytes_per_second": 1e14}
        figures |= {"launch_seconds": 1e-8, "matmul_flops_per_second": rates, "attention_flops_per_second": rates}
        file.write_text(device_toml(figures))
        times.append(planned(recipe, device=file)[0].seconds)
    assert times[0] == pytest.approx(2 * times[1], rel=1e-3)


def test_the_margin_covers_the_published_reserved_memory_but_for_a_lower_bound() -> None:
    (path,) = (Path(__file__).parents[2] / "benchmarks" / "results").glob("published_cpu_*.json")
    rows = json.loads(path.read_text())["rows"]
    more = {
        row["run"]["eight_bit"]: row["run"]["gib"] / row["gib"]
        for row in sorted(rows, key=lambda row: -(row["memory_ratio"] or 2))
        if SOURCES[row["run"]["source"]].is_reserved and row["memory_ratio"]
    }
    margin = device_named("a100-80g").margin
    assert 1.1 < more[False] < 1 + margin < more[True], "the most of each kind"
    assert device_named("cpu").margin == 0


def test_every_published_run_is_a_recipe_whose_layout_the_trainer_has() -> None:
    for run in RUNS:
        found = recipe_of(run)
        layout = layout_of(found.parallel, run.world)
        per_rank = run.micro_batch_size * run.num_microbatches
        assert layout.dp_degree(run.world) * per_rank == found.update.global_batch_size
        check_config(found)
    assert {run.source for run in RUNS} == SOURCES.keys()
    assert sum(run.is_fitted for run in RUNS) < sum(run.tokens_per_second is not None for run in RUNS) / 2


@pytest.mark.full
def test_a_published_run_is_predicted() -> None:
    small = next(run for run in RUNS if run.model == "MPT 350M")
    row = predict(small)
    assert row.fits == YES
    assert row.speed_ratio == pytest.approx(1, abs=0.2)
    assert summary([row, replace(row, run=replace(small, is_fitted=True, gib=row.gib))])[0].startswith(
        "memory, allocated: 1 runs"
    )


def test_the_committed_published_runs_are_those_of_the_table_and_are_ranked_as_measured() -> None:
    (path,) = (Path(__file__).parents[2] / "benchmarks" / "results").glob("published_cpu_*.json")
    found = json.loads(path.read_text())
    names = {field.name for field in fields(Predicted)} - {"run"}
    rows = [Predicted(Published(**row["run"]), **{name: row[name] for name in names}) for row in found["rows"]]
    assert [row.run for row in rows] == list(RUNS)
    assert found["summary"] == summary(rows)
    assert "right in 6 of 6 pairs" in found["summary"][-2]
    one_each, interleaved = (row for row in rows if row.run.is_ranked_only)
    published = interleaved.run.tokens_per_second / one_each.run.tokens_per_second
    assert interleaved.tokens_per_second / one_each.tokens_per_second == pytest.approx(published, rel=0.03)


def test_a_key_that_is_chosen_is_said_once() -> None:
    asked = request_of(["--world", "2", "--update.sync=last", "--optim.lr=0.1"])
    line = command_line({"update": {"sync": "every"}}, Path("a recipe.toml"), asked)
    assert line == ("torchrun --nproc-per-node 2 -m megabatch train 'a recipe.toml' --optim.lr=0.1 --update.sync=every")


FROZEN: dict[str, tuple[int, dict[str, Any]]] = {
    "adapters": (1, {"model__dtype": "bfloat16"}),
    "adapters ddp": (2, {"parallel__wrapper": "ddp"}),
    "adapters fsdp2": (2, {"parallel__wrapper": "fsdp2", "model__dtype": "bfloat16"}),
    "adapters quantized": (1, {"model__dtype": "bfloat16", "model__quantize": "nf4"}),
    "adapters quantized ddp": (2, {"parallel__wrapper": "ddp", "model__quantize": "nf4"}),
    "freeze fsdp2": (2, {"parallel__wrapper": "fsdp2", "model__freeze": "*embed*,*.layers.0.*"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FROZEN)
def test_what_is_frozen_costs_no_gradient(recipe: Path, name: str) -> None:
    """Neither in a run, which must agree with the closed form, nor in what is sent."""
    world, values = FROZEN[name]
    size = {"num_hidden_layers": 2, "hidden_size": 128}
    if "model__quantize" in values:
        recipe = named_recipe(recipe, size)
    else:
        values = {**values, **{f"model__config__{key}": value for key, value in size.items()}}
    lora = {"model__lora__r": 4, "model__lora__target_modules": ["q_proj", "v_proj"]} if "adapters" in name else {}
    what, rows = subject(recipe, world, **values, **lora), planned(recipe, world, **values, **lora)
    runs = [row for row in rows if row.by == SIMULATION]
    for row in runs:
        guess = estimate_cost(row.choice, what.sizes, what.sample.length_tokens, what.device)
        assert guess.peak_bytes * CERTAIN <= row.peak_bytes
        assert guess.sent_bytes == pytest.approx(row.sent_bytes, rel=1e-3, abs=8192) or not lora
    if lora:
        sizes = what.sizes
        assert sizes.num_trained == 2 * 2 * 2 * 4 * 128  # layers, modules, A and B of each
        kept = {kind: max(row.at_peak.get(kind, 0) for row in runs) for kind in ("gradients", "optimizer states")}
        assert 0 < kept["gradients"] <= 2 * 4 * sizes.num_trained
        assert 0 < kept["optimizer states"] <= 2 * 4 * sizes.num_trained + 8192  # in blocks of 512
        if "quantized" in name:
            matrices = 2 * (4 * 128 * 128 + 3 * 128 * 128)  # of the layers: attention, and the MLP of 128 features
            item = 2 if values.get("model__dtype") == "bfloat16" else 4
            rest = item * (2 * 384 * 128 + 5 * 128) + 4 * sizes.num_trained
            assert runs[0].at_peak["parameters"] == pytest.approx(matrices * (4.5 / 8) + rest, rel=0.1)
        if name.endswith("ddp"):
            assert all(row.sent_bytes == pytest.approx(4 * sizes.num_trained, abs=8192) for row in runs)


__all__ = ["recipe"]


@pytest.mark.slow
def test_a_large_vocabulary_is_counted_by_the_chunks_that_are_there_at_once(recipe: Path) -> None:
    what = subject(recipe, 2, parallel__wrapper="fsdp2", model__config__vocab_size=2**16)
    rows = [run_simulation(what, 2**40, choice) for choice in what.grid.choices()]
    for row in rows:
        guess = estimate_cost(row.choice, what.sizes, what.sample.length_tokens, what.device)
        assert guess.peak_bytes * CERTAIN <= row.peak_bytes


@pytest.mark.slow
def test_an_average_of_the_weights_is_counted(recipe: Path) -> None:
    values = {"parallel__wrapper": "fsdp2", "model__config__hidden_size": 256}
    without, with_it = (planned(recipe, 2, **values, **more) for more in ({}, {"optim__ema_decay": 0.99}))
    of_parameters = 4 * subject(recipe, 2, **values).sizes.num_parameters / 2
    for a, b in zip(without, with_it, strict=True):
        if a.by == b.by == SIMULATION:
            assert b.peak_bytes - a.peak_bytes == pytest.approx(of_parameters, rel=0.05)
    assert any(row.by == SIMULATION for row in without)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_a_wrapper_on_one_rank_sends_nothing(recipe: Path, wrapper: str) -> None:
    rows = planned(recipe, 1, parallel__wrapper=wrapper)
    assert {row.sent_bytes for row in rows if row.by == SIMULATION} == {0}


@pytest.mark.slow
def test_a_quantized_optimizer_is_planned_without_its_package(recipe: Path) -> None:
    """A function that is missing is refused elsewhere; torchao and bitsandbytes are not installed here."""
    values = {"parallel__wrapper": "fsdp2", "model__dtype": "bfloat16", "model__config__hidden_size": 256}
    kept = {}
    for name in ("torchao.optim:AdamW8bit", "torchao.optim:AdamW4bit", "bitsandbytes.optim:PagedAdamW8bit"):
        what = subject(recipe, 2, optim__function=name, **values)
        rows = [run_simulation(what, 2**40, choice) for choice in what.grid.choices()[:2]]
        for row in rows:
            guess = estimate_cost(row.choice, what.sizes, what.sample.length_tokens, what.device)
            assert guess.peak_bytes * CERTAIN <= row.peak_bytes
        assert all(row.is_least for row in rows), "whose step is not simulated"
        kept[name] = rows[0].at_peak["optimizer states"] / (what.sizes.num_parameters / 2)
    assert [*kept.values()] == pytest.approx([2 + 8 / 256, 1 + 8 / 128, 2 + 8 / 256], rel=0.03)
    with pytest.raises(MegabatchError, match="cannot be imported"):
        subject(recipe, 2, optim__function="torchao.optim:NoSuch", **values)


@pytest.mark.slow
def test_a_published_layout_keeps_the_embedding_whole_and_frees_the_root() -> None:
    small = replace(RUNS[5], model="Llama 2 7B", micro_batch_size=1, length_tokens=512)
    request = PlanRequest(small.world, device_named("h200"), 2**40)
    with silence():
        own = build_simulator(recipe_of(small), request, SILENT)
    own = replace(own, repeats=Repeats(1, 1, 0))
    choice = Choice(1, 2, "last", reshard=True, recompute=True, fused=True)
    with silence():
        plain, source = (each.simulate(choice) for each in (own, replace(own, divide=divide_as_kempner)))
    more = 32000 * 4096 * (1 - 1 / small.tp)  # numbers of the embedding that other ranks have
    assert source.steady_bytes - plain.steady_bytes == pytest.approx(more * 2 * 3, rel=0.01)  # weights and two states

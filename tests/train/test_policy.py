"""The sync policy is chosen by memory and traffic: alike on all ranks, said, kept, and chosen anew elsewhere."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megabatch import CostModel, Plan
from megabatch.errors import MicrobatchLimit
from megabatch.planning.limits import MeasuredMicrobatch, TunedLimit
from megabatch.train.autotune.sync_policy import AUTO, GATHER_ONCE, LAST, ChosenSync, leave_room, load_policy
from megabatch.train.checkpoints.metadata import IDENTITY, POSITIONS, read_meta
from megabatch.train.checkpoints.retention import Checkpoints
from megabatch.train.config import Config, ModelConfig, RunConfig, UpdateConfig
from megabatch.train.config.byte_sizes import gb_text
from megabatch.train.plan.grid import Choice
from megabatch.train.plan.search import NO, SIMULATION, TIGHT, YES, PlanRow, sort_rows
from megabatch.train.runtime.files import sealed_text
from megabatch.train.runtime.oom_limit import lowered_settings
from tests.train import policy_jobs
from tests.train.conftest import NO_DROPOUT, Bench, write_pairs
from tests.train.contexts import ALONE
from tests.train.on_ranks import on_ranks
from tests.train.planning import plan
from tests.train.policy_jobs import SOME
from tests.train.processes import overrides
from tests.train.test_plan import LLAMA

pytestmark = pytest.mark.slow


LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {  # ranks, the wrapper's own policy, keys
    "fsdp2": (2, "every", {"parallel__wrapper": "fsdp2"}),
    "hsdp": (4, "replica_last", {"parallel__dp_replicate": 2, "parallel__dp_shard": 2}),
}
WIDE = {"model__config__n_embd": 256, "model__dtype": "float32"}  # a gradient of 6.7 MiB
SHARDED = {"parallel__wrapper": "fsdp2", "update__micro_batch_size": 1, "eval__every": "none", **NO_DROPOUT}
HALF = {"model__compute_dtype": "bfloat16"}  # of the bytes of a gradient, which is reduced in float32
GOING_ON = {**SHARDED, "run__resume": True}


@pytest.fixture
def ask(bench: Bench, tmp_path: Path) -> Callable[..., list[Any]]:
    """Run a job of policy_jobs on each rank, with the bench's recipe and these keys."""

    def asked(job: Callable[..., Any], ranks: int, *values: dict[str, Any]) -> list[Any]:
        cache = {"data__cache": bench.path / "cache"}
        given = [overrides({**cache, **each}) for each in values]
        return on_ranks(ranks, tmp_path, job, bench.recipe, given if job is policy_jobs.counted else given[0])

    return asked


def chosen_line(said: str) -> str:
    """The line of the plan that says what was chosen."""
    lines = re.findall(r"^plan  (update\.sync [\w:]+: .*)", said, re.MULTILINE)
    assert len(lines) == 1, said
    return lines[0]


def short_samples(bench: Bench) -> None:
    write_pairs(bench.path / "data.jsonl", [(f"{k}: ", "ab" * (3 + k % 12)) for k in range(90)])


@pytest.mark.parametrize(
    ("layout", "more", "sends_least", "kept"),
    [
        ("fsdp2", {}, GATHER_ONCE, r"gathered model of 6\.\d MiB"),
        ("fsdp2", {**HALF, "parallel__reshard_after_forward": "false"}, LAST, r"whole gradient of 6\.\d MiB"),
        ("hsdp", {}, GATHER_ONCE, r"gathered model of 6\.\d MiB"),
    ],
    ids=["fsdp2", "fsdp2, kept gathered", "hsdp"],
)
def test_what_sends_least_is_chosen_where_it_fits(
    bench: Bench, ask: Callable[..., list[Any]], layout: str, more: dict[str, Any], sends_least: str, kept: str
) -> None:
    short_samples(bench)
    ranks, own, keys = LAYOUTS[layout]
    late = {"data__look_ahead": 1} if layout == "hsdp" else {}  # samples are loaded when their microbatch comes
    found = ask(policy_jobs.under_caps, ranks, {**keys, **WIDE, **more, **late, "update__micro_batch_size": 1})
    assert all(each == found[0] for each in found)
    short, enough = found[0]["half of it"], found[0]["all of it"]
    assert (short.sync, enough.sync) == (own, sends_least)
    gib = r"\d+\.\d\d GiB"
    assert re.fullmatch(
        rf"{sends_least} would keep the {kept} \(peak {gib} of {gib}\), to send 0\.\d\d of the \d+\.\d MB "
        "of an update", short.why,
    ), short.why  # fmt: skip
    assert re.fullmatch(
        rf"its {kept} fits \(peak {gib} of {gib}\), and {own} would send \d+\.\d MB an update, "
        r"[12]\.\d\d times as much", enough.why,
    ), enough.why  # fmt: skip


def test_the_bound_and_the_policy_are_chosen_together(bench: Bench, ask: Callable[..., list[Any]]) -> None:
    short_samples(bench)
    keys = {**LAYOUTS["fsdp2"][2], **WIDE, **HALF, "update__micro_batch_size": 1, "update__global_batch_size": 80}
    found = ask(policy_jobs.with_bounds, 2, keys)
    assert found[0] == found[1]
    chosen = {name: (each["sync"], each["tokens"], each["more"]) for name, each in found[0].items()}
    assert chosen == {
        "room": (GATHER_ONCE, 400, True),
        "a little less": (GATHER_ONCE, 380, True),
        "half of the bound": (SOME, 400, False),
        "no room": (SOME, 400, False),
    }
    said = {name: each["said"] for name, each in found[0].items()}
    assert said["a little less"][0].startswith("update.max_microbatch_tokens 380: predicted peak ")
    assert said["a little less"][1].startswith("update.sync gather_once: its gathered model of 3.")
    assert said["half of the bound"][1].startswith("update.sync gather_once:2: its partly gathered model of 1.")
    assert said["no room"][0].startswith("update.max_microbatch_tokens 400: predicted peak ")


def test_a_bound_gives_way_once_to_what_was_measured(bench: Bench, ask: Callable[..., list[Any]]) -> None:
    short_samples(bench)
    keys = {**LAYOUTS["fsdp2"][2], **WIDE, **HALF, "update__micro_batch_size": 1, "update__global_batch_size": 80}
    found = ask(policy_jobs.measured_over, 2, keys)
    assert found[0] == found[1]
    tokens = {name: each.fit and each.fit.max_microbatch_tokens for name, each in found[0].items()}
    assert tokens == {"never": 400, "once": 380, "twice": 400, "always": None}
    assert [each.sync for each in found[0].values()] == [GATHER_ONCE, GATHER_ONCE, SOME, "every"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_sent_and_kept_is_what_was_said(ask: Callable[..., list[Any]], layout: str) -> None:
    ranks, own, keys = LAYOUTS[layout]
    keys = {
        **keys,
        "update__micro_batch_size": 1,
        "update__global_batch_size": 12,
        **NO_DROPOUT,
        "model__dtype": "float32",
    }
    variants = [
        keys,
        {**keys, "model__compute_dtype": "bfloat16", "parallel__reshard_after_forward": "false"},
        {**keys, "model__freeze": "*wte*"},
    ]
    found = ask(policy_jobs.counted, ranks, *variants)
    assert all(each == found[0] for each in found)
    num_replicas = 2 if layout == "hsdp" else 1
    for by_own, by_last, by_one, by_some in zip(*(found[0][at::4] for at in range(4)), strict=True):
        n, num_groups = by_own["num_microbatches"], 3
        assert n > 2
        assert (by_own["sync"], by_last["sync"]) == (own, LAST)
        assert (by_own["table"]["reduce_scatter"], by_last["table"]["reduce_scatter"]) == (n * num_groups, num_groups)
        assert by_own["table"]["all_gather"] == by_last["table"]["all_gather"]
        assert (by_one["table"]["all_gather"], by_one["table"]["reduce_scatter"]) == (num_groups, n * num_groups)
        times = 2 if by_own["table"]["all_gather"] == n * (2 * num_groups - 1) else 1
        assert by_some["table"]["all_gather"] == 2 + n * times * (num_groups - 2)
        for each in (by_own, by_last, by_one, by_some):
            table = each["table"]
            assert table.get("all_reduce", 0) == (num_groups if num_replicas > 1 else 0)
            within = (table["all_gather_bytes"] + table["reduce_scatter_bytes"]) / 2  # of two ranks, in a ring
            assert each["sent"] == within + table.get("all_reduce_bytes", 0)
        assert (by_own["kept"], by_last["kept"]) == (by_own["whole"] - by_own["more"], by_last["whole"])
        assert by_last["more"] > 0


def test_a_run_says_what_it_chose_and_keeps_it(bench: Bench) -> None:
    said = bench.train(ranks=2, **SHARDED, run__max_steps=2)
    assert re.fullmatch(
        r"update\.sync gather_once: its gathered model is 0\.1 MiB of the [\d,.]+ GiB that are free, and every would "
        r"send 0\.\d MB an update, [12]\.\d\d times as much", chosen_line(said),
    ), chosen_line(said)  # fmt: skip
    assert "plan  sync gather_once: chosen for this run, since it fits and sends least\n" in said
    assert chosen_line(said) in (bench.folder / "plan.txt").read_text()
    meta = read_meta(Checkpoints(bench.folder).latest_valid(ALONE).path)
    assert meta["sync"]["sync"] == GATHER_ONCE
    assert meta["sync"]["made_for"]["number of ranks"] == 2

    said = bench.train(ranks=2, **GOING_ON, run__max_steps=3)
    assert chosen_line(said) == "update.sync gather_once: the checkpoint's, so that sums are rounded the same"
    assert "plan  sync gather_once: chosen for this run" in said
    whole = bench.path / "whole"
    bench.train(ranks=2, **SHARDED, run__max_steps=3, run__folder=whole)
    assert bench.losses() == bench.losses(whole), "the same bits"
    assert json.loads((whole / "timeline.jsonl").read_text())["sync"] == GATHER_ONCE

    said = bench.train(ranks=2, **GOING_ON, run__max_steps=4, update__sync="every")
    assert "update.sync" not in said
    assert "plan  sync every: FSDP2 reduce-scatters each microbatch" in said
    assert read_meta(Checkpoints(bench.folder).latest_valid(ALONE).path)["sync"]["sync"] == "every"
    every = bench.path / "every"
    bench.train(ranks=2, **SHARDED, run__max_steps=4, run__folder=every, update__sync="every")
    assert bench.losses() == pytest.approx(bench.losses(every), rel=1e-12)

    said = bench.train(ranks=2, **GOING_ON, run__max_steps=5)
    assert "plan  update.sync is chosen anew: update.sync was every and is auto" in said
    assert chosen_line(said).startswith("update.sync gather_once: its gathered model")


def test_another_layout_chooses_anew(bench: Bench) -> None:
    bench.train(ranks=2, **SHARDED, run__max_steps=1)
    values = {**GOING_ON, **LAYOUTS["hsdp"][2]}
    said = bench.train(ranks=4, **values, run__max_steps=2)
    assert "plan  update.sync is chosen anew: number of ranks was 2 and is 4\n" in said
    assert re.match(
        r"update\.sync gather_once: .* and replica_last would send .*, [12]\.\d\d times as much", chosen_line(said)
    )
    said = bench.train(ranks=2, **{**values, "parallel__wrapper": "ddp", "parallel__dp_shard": 1}, run__max_steps=3)
    assert "update.sync" not in said, "nothing is to be chosen"
    assert read_meta(Checkpoints(bench.folder).latest_valid(ALONE).path)["sync"]["sync"] == AUTO


@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        (1, {}),
        (2, {"parallel__wrapper": "ddp"}),
        (2, {"parallel__wrapper": "replicate"}),
        (2, {"update__micro_batch_size": 4}),
        (2, {"update__sync": "last"}),
        (2, {"update__sync": "gather_once:2"}),
        (2, {"parallel__wrapper": "none", "parallel__pp": 2, "model__config__tie_word_embeddings": "false"}),
    ],
    ids=["one process", "ddp", "replicate", "one microbatch", "stated", "a part", "pipeline"],
)
def test_where_nothing_is_open_nothing_is_said(bench: Bench, ranks: int, values: dict[str, Any]) -> None:
    said = bench.train(ranks=ranks, **{**SHARDED, **values}, run__max_steps=1)
    assert "update.sync" not in said


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"parallel__pp": 2, "model__config__tie_word_embeddings": "false", "update__sync": "every"},
            "update.sync is 'every', but a pipeline reduces once per call, after its last microbatch; "
            "leave update.sync out",
        ),
        (
            {"parallel__wrapper": "fsdp2", "update__sync": "replica_last"},
            "update.sync is 'replica_last', which is for HSDP, and the model has FSDP2 without replicas; "
            "leave update.sync out, or shard with fully_shard over a mesh of two axes (dp_replicate, dp_shard)",
        ),
    ],
)
def test_a_policy_that_cannot_be_is_refused_by_its_key(
    refuse: Callable[..., str], values: dict[str, Any], line: str
) -> None:
    assert refuse(ranks=2, update__micro_batch_size=1, **values) == line


def test_a_run_that_ran_out_of_memory_keeps_least(bench: Bench) -> None:
    bench.train(ranks=2, **{**SHARDED, "update__micro_batch_size": 2}, run__max_steps=1)
    (bench.folder / "microbatch.json").write_text('{"samples": 1, "tokens": 136}\n')
    said = bench.train(ranks=2, **{**GOING_ON, "update__micro_batch_size": 2}, run__max_steps=2)
    line = "update.sync every: a microbatch did not fit in memory (microbatch.json), and it keeps least"
    assert chosen_line(said) == line
    assert (
        "plan  update.micro_batch_size 2 is lowered: since a microbatch did not fit in memory, one holds at most "
        "1 sample (microbatch.json)\n" in said
    )


def test_a_run_that_is_at_its_end_has_nothing_to_choose(bench: Bench) -> None:
    values = {**SHARDED, "model__config__n_embd": 640}  # whose gradient is not slight
    bench.train(ranks=2, **values)
    said = bench.train(ranks=2, **values | {"update__micro_batch_size": 2, "run__resume": True})
    assert "would send" not in said
    assert len(bench.losses()) == 6


def test_a_stream_keeps_least_unless_it_is_packed(bench: Bench) -> None:
    values = {**SHARDED, "data__streaming": True, "optim__schedule": "constant", "eval__num_samples": 0, **WIDE}
    values["model__config__n_embd"] = 640  # more than is slight
    said = bench.train(ranks=2, **values, run__max_steps=1)
    line = "update.sync every: the longest sample of a stream is not known, and it keeps least"
    assert chosen_line(said) == line


def test_the_room_beside_a_whole_gradient_is_the_bounds() -> None:
    fit = TunedLimit(
        1000, CostModel(bytes_fixed=100.0, bytes_per_token=2.0), 50, (MeasuredMicrobatch(1, 100.0),), 2150.0, 2000.0, 20
    )
    assert leave_room(fit, 0.0) == fit
    lowered = leave_room(fit, 250.0)
    assert lowered is not None
    assert (lowered.max_microbatch_tokens, lowered.outgrown_rows) == (900, None)
    assert lowered.cost.peak_bytes(1, 900) == fit.limit_bytes
    slack = leave_room(replace(fit, limit_bytes=2500.0), 250.0)
    assert slack is not None
    assert (slack.max_microbatch_tokens, slack.outgrown_rows) == (1000, 20)
    assert slack.cost.bytes_fixed == 350.0
    assert leave_room(fit, 1950.0) is not None
    assert leave_room(fit, 1951.0) is None
    assert leave_room(fit, 5000.0) is None


def config_of(**update: Any) -> Config:
    return Config(
        model=ModelConfig(config={"model_type": "gpt2"}), update=UpdateConfig(global_batch_size=8, **update),
        run=RunConfig(folder="runs/nowhere"),
    )  # fmt: skip


def test_a_policy_is_kept_with_the_checkpoint(tmp_path: Path) -> None:
    def saved(meta: dict[str, Any], config: Config) -> ChosenSync:
        (tmp_path / "step-1").mkdir(exist_ok=True)
        parts = {key: {} for key in (*IDENTITY, *POSITIONS)}
        (tmp_path / "step-1" / "meta.json").write_text(sealed_text({**parts, "step": 1, **meta}))
        return load_policy(config, ALONE, None, tmp_path / "step-1")

    config = config_of(micro_batch_size=2)
    here = load_policy(config, ALONE, None, None)
    kept = saved(json.loads(json.dumps(replace(here, sync=LAST).meta)), config)
    assert (kept.sync, len(kept.words)) == (LAST, 1)
    anew = saved(json.loads(json.dumps(replace(here, sync=LAST).meta)), config_of(micro_batch_size=4))
    assert (anew.sync, anew.words) == (
        None, ("update.sync is chosen anew: update.micro_batch_size was 2 and is 4",),
    )  # fmt: skip
    stated = saved(json.loads(json.dumps(here.meta)), config_of(micro_batch_size=2, sync="every"))
    assert (stated.sync, stated.words) == ("every", ())
    plan = Plan(((0,),), (5,), sync=LAST, reason="as asked")
    assert kept.shown(plan).reason != "as asked"
    assert replace(stated, sync=LAST).shown(plan) == plan


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


def test_the_plan_and_the_run_choose_alike(bench: Bench) -> None:
    """With the same keys on the same ranks, where there is room for all and where there is not."""
    recipe = bench.path / "llama.toml"
    recipe.write_text(LLAMA.replace("nowhere.jsonl", str(bench.path / "data.jsonl")))
    given = ["--world", "2", "--device", "cpu", "--parallel.wrapper=fsdp2", "--update.micro_batch_size=1"]
    given += ["--model.activation_checkpointing=false", "--parallel.reshard_after_forward=true"]
    size = {"model__config__hidden_size": 128, "model__config__num_hidden_layers": 3}
    given += [*overrides(size), "--data.max_sample_tokens=16"]
    rows = {row.choice.sync: row for row in plan(recipe, [*given, "--json"]) if row.choice.fused}
    assert plan(recipe, given)[0].choice.sync == GATHER_ONCE
    least, *others = (rows[sync].peak_bytes for sync in ("every", "last", GATHER_ONCE))
    assert least < min(others)
    assert plan(recipe, [*given, f"--memory={(least + min(others)) // 2}B"])[0].choice.gathers_some
    values = {"parallel__wrapper": "fsdp2", "update__micro_batch_size": 1, "run__folder": bench.folder, **size}
    line = chosen_line(bench.train(ranks=2, recipe=recipe, **values, run__max_steps=1))
    assert line.startswith("update.sync gather_once: ")
    assert f"every would send {gb_text(rows['every'].sent_bytes)} an update" in line, "as the plan says"


def test_a_plan_says_that_a_microbatch_is_lowered(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = bench.path / "llama.toml"
    recipe.write_text(LLAMA)
    plan(recipe, ["--update.micro_batch_size=64"])
    assert "update.micro_batch_size 64 is lowered: a rank has no more samples of an update\n" in capsys.readouterr().out
    plan(recipe, ["--update.micro_batch_size=4"])
    assert "is lowered" not in capsys.readouterr().out

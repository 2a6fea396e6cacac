"""Benchmarks: what those of speed and of GPUs write, and that contestants make the updates they are said to make."""

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import dropins, elastic_torchft, hardware, memory, needless_pass, result, throughput
from benchmarks.llama import flops_per_token, llama, sizes_of
from benchmarks.speed import table
from benchmarks.speed.__main__ import left_out
from benchmarks.speed.agreement import disagreeing
from benchmarks.speed.contestants import CONTESTANTS

ROOT = Path(__file__).parents[1]
RUNS = {1: ["megabatch", "plain", "accelerate", "hf_rebalance", "sorted"], 2: ["megabatch", "plain"]}  # of extra dev
KEYS = {
    "regime", "data", "ranks", "contestant", "same_samples", "weighs", "seconds_per_update", "repeats_seconds",
    "cpu_seconds", "repeats_cpu_seconds", "micro_batch_size", "sweep_cpu_seconds",
    "real_tokens", "computed_tokens", "num_forwards", "peak_bytes", "start_bytes", "weights", "gradient_error",
    "weights_error", "proof_weights", "collectives", "load_before", "command", "commit", "versions", "machine", "cores",
}  # fmt: skip


def ran(ranks: int, folder: Path) -> list[dict]:
    out = folder / f"{ranks}.json"
    words = ["--tiny", "--regimes", "launch", "--data", "stdlib", "--ranks", str(ranks), "--out", str(out)]
    words += ["--only", ",".join(RUNS[ranks])]
    command = [sys.executable, "-m", "benchmarks.speed", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert set(found) == {"claim", "settings", "rows", "left_out"}
    return found["rows"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return [row for ranks in RUNS for row in ran(ranks, tmp_path_factory.mktemp("bench"))]


@pytest.fixture(scope="module")
def by_name(rows: list[dict]) -> dict[tuple[str, int], dict]:
    return {(row["contestant"], row["ranks"]): row for row in rows}


@pytest.mark.full
def test_every_row_says_where_it_comes_from(rows):
    assert [(row["contestant"], row["ranks"]) for row in rows] == [(n, ranks) for ranks in RUNS for n in RUNS[ranks]]
    for row in rows:
        assert set(row) == KEYS
        assert row["command"].startswith("python -m benchmarks.speed --tiny")
        assert (row["contestant"] == "megabatch") == (row["micro_batch_size"] is None)
        assert row["cpu_seconds"] == min(row["sweep_cpu_seconds"].values())
        assert {"torch", "megabatch", *CONTESTANTS[row["contestant"]].libraries} <= set(row["versions"])
        assert min(row["seconds_per_update"], row["peak_bytes"], row["cores"]) > 0
        assert len(row["load_before"]) == len(row["repeats_seconds"]) == 1


@pytest.mark.full
def test_gradients_are_what_they_are_said_to_be(rows):
    errors = {(row["contestant"], row["ranks"]): row["gradient_error"] for row in rows}
    for (name, _), error in errors.items():
        assert error < 1e-12 if CONTESTANTS[name].weighs == "targets" else error > 1e-3
    assert disagreeing(rows) == []


@pytest.mark.full
def test_counts(by_name):
    """The same tokens for all; fewer of them padded, and no more sent for it than the plain loop sends."""
    assert len({row["real_tokens"] for row in by_name.values()}) == 1
    for ranks in RUNS:
        ours, plain = by_name["megabatch", ranks], by_name["plain", ranks]
        assert ours["real_tokens"] <= ours["computed_tokens"]
        assert plain["num_forwards"] == 16 / plain["micro_batch_size"] / ranks
    for name in ("megabatch", "plain"):
        assert by_name[name, 1]["collectives"] == {}
        assert by_name[name, 2]["collectives"]["all_reduce"] == 1


@pytest.mark.full
def test_the_table_has_a_line_for_each(rows):
    text = table.render({"rows": rows})
    assert text.count("**megabatch**") == len(RUNS)
    assert text.count("\n|") + text.startswith("|") == len(rows) + 2 * len(RUNS)
    assert text.count("exact |") == sum(CONTESTANTS[row["contestant"]].weighs == "targets" for row in rows)


def test_the_table_says_how_far_runs_are_apart():
    runs = [[2.0, 2.2, 1.8], [1.0, 1.5, 1.0], [4.0, 4.0, 4.4]]
    text = table.runs_text([{"repeats_seconds": each, "repeats_cpu_seconds": each} for each in runs])
    assert "3 runs" in text
    assert "20% (one row by 50%)" in text
    assert table.runs_text([{"repeats_seconds": [2.0]}]) == table.ONE_RUN


def made(name: str, **values: object) -> dict:
    """A row by hand."""
    who = CONTESTANTS[name]
    row = {"contestant": name, "data": "gsm8k", "regime": "launch", "ranks": 1, "same_samples": who.comparable}
    row["weighs"] = who.weighs
    error = 0.5 if who.weighs == "microbatches" else 1e-14
    return row | {"weights_error": error, "gradient_error": error, "proof_weights": 600.0} | values


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (made("megabatch"), False),
        (made("megabatch", weights_error=1e-5), True),
        (made("megabatch", gradient_error=1e-5), True),
        (made("accelerate"), False),
        (made("accelerate", gradient_error=0.6), True),  # as of another scale, which AdamW's weights do not show
        (made("accelerate", proof_weights=600.001), True),
        (made("lightning", proof_weights=600.001), True),
        (made("lightning", proof_weights=600.001, ranks=2), False),  # deals samples, not microbatches
        (made("hf_group", weights_error=1e-5), True),
        (made("trl", weights_error=None), False),
    ],
)
def test_who_makes_another_update_is_named(row, named):
    assert bool(disagreeing([made("plain"), made("plain", ranks=2), row])) == named


def test_what_is_not_there_is_left_out_and_said(capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.result.version", lambda name: None if name == "lightning" else "1")
    asked = argparse.Namespace(only=["megabatch", "lightning"], data=["gsm8k", "rollouts"], gsm8k=Path("nowhere.jsonl"))
    said = left_out(asked)
    assert said == {"lightning": "lightning not installed", "gsm8k": "no file of it; give one with --gsm8k"}
    assert (asked.only, asked.data) == (["megabatch"], ["rollouts"])
    assert capsys.readouterr().out.count("left out") == 2


def test_the_page_has_the_newest_result():
    text = table.PAGE.read_text().partition(table.START)[2].partition(table.END)[0]
    newest = table.newest()
    assert text == (table.render(json.loads(newest.read_text())) if newest else "")


def benchmark(name: str, out: Path, *words: str) -> subprocess.CompletedProcess:
    """One of those for a GPU, small."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--out", str(out), *words]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.full
def test_steps_with_and_without_a_pass_have_the_same_gradient(tmp_path):
    done = benchmark("needless_pass", tmp_path / "found.json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["gradients_differ"]) == {"torchtune", "megabatch"}
    assert max(found["gradients_differ"].values()) <= found["tolerance"] <= 1e-5
    assert found["gradients_agree"]
    assert list(found["rows"]) == ["plain", "torchtune", "pass", "megabatch", "foreach_pass"]
    assert min(row["ms"] for row in found["rows"].values()) > 0
    assert found["hardware"] == "cpu"
    assert "the 8B numbers are not measured here" in found["not_measured"]
    assert found["not_measured"] in done.stdout


def test_a_wrong_gradient_is_seen():
    torch.manual_seed(0)
    size = needless_pass.SIZES["quick"]
    model = llama(size.shape, size.tokens, size.dtype, torch.device("cpu"))
    ways = needless_pass.ways_of(model, needless_pass.batch_of(size))

    def wrong() -> None:
        ways["plain"]()
        for parameter in model.parameters():
            parameter.grad *= 1.001

    found = needless_pass.differences(model, {**ways, "torchtune": wrong})
    assert found["torchtune"] == pytest.approx(1e-3, rel=1e-2)
    assert found["megabatch"] < 1e-5


@pytest.mark.full
def test_samples_in_one_row_are_timed_beside_padded_ones(tmp_path):
    done = benchmark("one_row", tmp_path / "found.json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found["rows"]) == ["padded, sdpa", "one row, sdpa"]
    padded, in_row = found["rows"].values()
    assert padded["padding"] > 0 == in_row["padding"]
    assert padded["times_padded"] == 1
    assert found["gradients_differ"]["one row, sdpa"] <= found["tolerance"] <= 1e-5
    assert found["left_out"]["flex_attention"] == "it has no backward on the CPU"
    assert "the 1B numbers are not measured here" in found["not_measured"]


@pytest.mark.full
def test_samples_that_begin_alike_are_timed_beside_padded_ones(tmp_path):
    done = benchmark("shared_prefix", tmp_path / "found.json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    alike, apart = found["works"].values()
    assert (alike["tokens"], alike["computed_tokens"], alike["samples_per_row"]) == (288, 96, [4])
    assert apart["tokens"] == apart["computed_tokens"]
    assert 0 < alike["gradients_differ"] <= found["tolerance"]
    assert apart["gradients_differ"] == 0


def test_the_committed_times_of_shared_prefixes_are_what_the_page_says():
    (path,) = (ROOT / "benchmarks/results").glob("shared_prefix_*.json")
    page = (ROOT / "docs/several-calls.md").read_text()
    assert path.name in page
    for name, work in json.loads(path.read_text())["works"].items():
        assert f"| {name} | {work['tokens']:,} | {work['computed_tokens']:,} | {work['times_faster']:.2f} |" in page
        assert work["times_faster"] >= 1


@pytest.mark.full
def test_the_trainer_and_a_loop_by_hand_are_timed(tmp_path):
    done = benchmark("throughput", tmp_path / "found.json", "--repeats", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["rows"]) == {"megabatch", "by_hand"}
    for row in found["rows"].values():
        assert len(row["runs"]) == 2
        assert row["tokens_per_second"] > 0
        assert row["mfu"] is None
        for each in row["runs"]:
            assert each["first_loss"] == pytest.approx(math.log(found["size"]["shape"]["vocabulary"]), abs=0.1)
    speeds = [found["rows"][name]["tokens_per_second"] for name in ("megabatch", "by_hand")]
    assert found["ratio"] == pytest.approx(speeds[0] / speeds[1])
    assert found["peak_flops_per_second"] is None
    assert "no peak is known" in found["peak_from"]
    assert "the 1B numbers are not measured here" in found["not_measured"]
    assert found["not_measured"] in done.stdout


def test_a_loop_by_hand_counts_the_tokens_of_an_update(tmp_path, monkeypatch):
    """And the trainer's samples are the rows that it takes."""
    size = throughput.SIZES["quick"]
    drawn = torch.randint(size.shape.vocabulary, (size.updates * size.update_rows, size.tokens)).numpy()
    np.save(tmp_path / throughput.ROWS, drawn)
    ticks = itertools.count()
    monkeypatch.setattr("benchmarks.hardware.seconds_now", lambda: 2.0 * next(ticks))
    throughput.loop(size, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run" / throughput.METRICS).read_text().splitlines()]
    assert [line["tokens_per_second"] for line in lines] == [4 * 32 / 2] * size.updates
    assert [sample["input_ids"].tolist() for sample in throughput.rows(str(tmp_path))] == drawn.tolist()


def test_arithmetic_per_token():
    tied, apart = throughput.SIZES["1b"], needless_pass.SIZES["8b"]
    assert sizes_of(tied.shape) == (1_235_814_400, 1_235_814_400)
    assert sizes_of(apart.shape) == (8_030_261_248, 8_030_261_248 - 128_256 * 4096)
    assert flops_per_token(tied.shape, 2048) == 6 * 1_235_814_400 + 12 * 16 * 2048 * 2048


def test_a_result_is_named_by_its_hardware_and_date():
    assert re.fullmatch(r"speed_cpu_\d{4}-\d\d-\d\d\.json", result.dated("speed").name)
    named = result.dated("needless_pass", "NVIDIA H100 80GB HBM3").name
    assert re.fullmatch(r"needless_pass_h100-80gb-hbm3_\d{4}-\d\d-\d\d\.json", named)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA H200", 989),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA H100 PCIe", None),  # the same letters, and slower
        ("NVIDIA H200 NVL", None),
        ("Tesla T4", None),
        ("cpu", None),
    ],
)
def test_the_peak_is_that_of_the_device_or_none_with_a_reason(name, teraflops):
    peak, why = hardware.peak_flops(name, torch.bfloat16)
    assert peak == (None if teraflops is None else teraflops * 1e12)
    assert why


def test_the_committed_memory_is_of_the_runs_that_are_measured_and_is_what_it_is_said_to_be():
    (path,) = result.RESULTS.glob("memory_cpu_*.json")
    found = json.loads(path.read_text())
    ratios = {row["run"]: row["ratio"] for row in found["rows"]}
    assert (found["claim"], list(ratios)) == (memory.CLAIM, list(map(str, memory.RUNS)))
    for name, ratio in ratios.items():
        assert 0.95 < ratio <= 1.0, name


@pytest.mark.parametrize(
    "size", ["flat", *(pytest.param(size, marks=pytest.mark.full) for size in ("25m", "100m"))]
)  # the model of a run
def test_the_committed_memory_is_that_of_the_simulator_as_it_is_now(size):
    """Run `python -m benchmarks.memory` and commit its result if this fails."""
    (path,) = result.RESULTS.glob("memory_cpu_*.json")
    found = {row["run"]: row["predicted_bytes"] for row in json.loads(path.read_text())["rows"]}
    for run in (run for run in memory.RUNS if run.size == size):
        assert memory.predicted(run).peak_bytes == pytest.approx(found[str(run)], rel=1e-4), run


def test_the_lines_of_a_drop_in_are_those_of_its_two_forms():
    assert dropins.ROWS["Trainer"].lines == (4, 1)  # the import, the class and the call
    assert all(min(row.lines) > 0 for row in dropins.ROWS.values())
    assert dropins.lines_of_diff("-from torchtitan.trainer import Trainer") == (1, 1)


def test_the_runs_with_lost_replicas_are_what_the_page_says():
    found = json.loads(sorted(result.RESULTS.glob("elastic_torchft_cpu_*.json"))[-1].read_text())
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert list(found["summary"]) == list(dict.fromkeys(case.name for case, _ in elastic_torchft.cases()))
    assert all(row["right"] for row in found["rows"])
    settings = {case.name: case.setting for case, _ in elastic_torchft.cases()}
    for name, row in found["summary"].items():
        assert row["largest_error"] <= elastic_torchft.SETTINGS[settings[name]]
    right, runs, kills = (sum(row[key] for row in found["summary"].values()) for key in ("right", "runs", "kills"))
    assert f" {right} of {runs} runs were right, with {kills} kills" in page
    at_random = found["summary"]["at random"]
    seconds = at_random["microbatch_seconds_median"], at_random["microbatch_seconds_worst"]
    assert "it takes {:.2f} s at the median of the random runs, and {:.2f} s at worst".format(*seconds) in page


def test_the_peers_of_a_lost_replica_are_what_the_page_says():
    found = json.loads(sorted(result.RESULTS.glob("elastic_peers_cpu_*.json"))[-1].read_text())
    page = (ROOT / "docs/benchmarks.md").read_text()
    for name, row in found["summary"].items():
        line = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
        assert f"| {row['seconds_median']:.2f} | {row['seconds_worst']:.2f} |" in line
    for name, row in found["price"].items():
        assert f"| {name} | {row['messages_per_update']:.0f} | {row['cpu_ms_per_update']:.0f} |" in page

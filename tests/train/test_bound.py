"""A bound that the recipe leaves open: measured, said, kept with the checkpoint, and chosen anew on another layout."""

import json
import re
from pathlib import Path

import pytest

from megabatch.train.checkpoints import metadata
from megabatch.train.checkpoints.metadata import first_difference, read_meta
from megabatch.train.checkpoints.retention import Checkpoints
from megabatch.train.config import Config, ModelConfig, RunConfig, UpdateConfig
from megabatch.train.runtime.ranks import Ranks
from tests.train.conftest import NO_DROPOUT, Bench, write_pairs
from tests.train.contexts import ALONE
from tests.train.on_ranks import on_ranks
from tests.train.test_dealing import rewrite

pytestmark = pytest.mark.slow
AUTO = {"update__max_microbatch_tokens": "auto", "eval__every": None}
GOING_ON = {**AUTO, "run__resume": True}


def test_a_bound_is_kept_and_chosen_anew(bench: Bench) -> None:
    said = bench.train(**AUTO, run__max_steps=3)
    (tokens,) = re.findall(r"update\.max_microbatch_tokens ([\d,]+): predicted peak", said)
    meta = read_meta(Checkpoints(bench.folder).latest_valid(ALONE).path)
    assert meta["bound"]["fit"]["max_microbatch_tokens"] == int(tokens.replace(",", ""))
    assert [row["step"] for row in bench.rows() if "predicted_peak_gib" in row] == [2]
    assert re.search(r"memory came to .* of the .* predicted", said)

    said = bench.train(**GOING_ON, run__max_steps=4)
    assert f"update.max_microbatch_tokens {tokens}: the checkpoint's, so that sums are rounded the same" in said

    said = bench.train(**GOING_ON, run__max_steps=5, update__memory="3GiB")
    assert "the bound is chosen anew: update.memory was None and is 3GiB" in said
    assert "of 3.00 GiB, measured with" in said

    said = bench.train(ranks=2, **GOING_ON, update__memory="3GiB")
    assert "the bound is chosen anew: number of ranks was 1 and is 2" in said


def test_too_little_memory_is_one_line_and_keeps_no_folder_from_a_run_with_more(bench: Bench) -> None:
    (end,) = bench.finish(**AUTO, update__memory="1MiB")
    line = r"megabatch: one sample of \d+ tokens needs .* GiB, and .* give more memory, shorten it, .*\n"
    said = "".join(
        each for each in end.err.splitlines(keepends=True) if not each.startswith("[W")
    )  # of torch's profiler
    assert (end.status, bool(re.fullmatch(line, said))) == (2, True), end.err
    assert "stopped by PlanError: one sample of " in (bench.folder / "log.txt").read_text()
    bench.train(**AUTO, run__max_steps=1)


def test_a_stream_goes_on_with_longer_samples(bench: Bench) -> None:
    """The limit chosen for the first samples is no cap that anybody has set; the later one is kept."""
    lengths = [*range(10, 34), *range(100, 124)]
    write_pairs(bench.path / "data.jsonl", [("count: ", "a" * length) for length in lengths])
    values = {**AUTO, "data__streaming": True, "data__shuffle_window": 1, "optim__schedule": "constant", **NO_DROPOUT}
    values["eval__num_samples"] = 0
    bench.train(**values, run__max_steps=2)
    chosen = read_meta(Checkpoints(bench.folder).latest_valid(ALONE).path)["bound"]["fit"]
    assert chosen["longest_tokens"] < 60
    said = bench.train(**values, run__resume=True, run__max_steps=5)
    anew = read_meta(Checkpoints(bench.folder).latest_valid(ALONE).path)["bound"]["fit"]
    assert anew["longest_tokens"] > 100
    assert f"update.max_microbatch_tokens {anew['max_microbatch_tokens']:,}: predicted peak" in said
    whole = bench.train(**values, run__folder=bench.path / "whole", run__max_steps=5)
    assert whole.count("predicted peak") >= 2
    assert bench.losses() == pytest.approx(bench.losses(bench.path / "whole"), rel=1e-12)


@pytest.mark.parametrize("step", [3, 2], ids=["at once", "later"])
def test_a_stream_goes_on_with_a_sample_longer_than_the_bound(bench: Bench, step: int) -> None:
    """The bound of a run whose first samples were short has no room for one of the fourth update."""
    write_pairs(bench.path / "data.jsonl", [("count: ", "a" * length) for length in [20] * 24 + [120] * 24])
    values = {**AUTO, "data__streaming": True, "data__shuffle_window": 1, "optim__schedule": "constant", **NO_DROPOUT}
    values |= {"eval__num_samples": 0}
    bench.train(**values, run__max_steps=step)
    kept = read_meta(Checkpoints(bench.folder).latest_valid(ALONE).path)["bound"]
    rewrite(bench.folder, step, {**kept, "fit": kept["fit"] | {"max_microbatch_tokens": 60}})
    said = bench.train(**values, run__resume=True)
    lines = re.findall(r"update\.max_microbatch_tokens ([\d,]+): predicted peak", said)
    assert len(lines) == 1
    assert int(lines[0].replace(",", "")) > 120
    assert len(bench.losses()) == 6


def test_ranks_on_unlike_devices_choose_alike(tmp_path: Path) -> None:
    (first, second) = on_ranks(2, tmp_path, circumstances_of)
    assert first == second
    assert first["device"] == "cpu, 1 GiB and cpu, 2 GiB"


def circumstances_of(ranks: Ranks) -> dict[str, object]:
    """On hosts of another size each."""
    metadata.device_text = lambda device: f"{device.type}, {ranks.rank + 1} GiB"
    update = UpdateConfig(global_batch_size=8, max_microbatch_tokens="auto")
    model = ModelConfig(config={"model_type": "gpt2"})
    return metadata.describe_conditions(Config(model=model, update=update, run=RunConfig(folder="runs/a")), ranks)


def test_what_changes_a_microbatch_changes_the_bound() -> None:
    def circumstances(**values: dict[str, object]) -> dict[str, object]:
        config = Config(
            model=ModelConfig(config={"model_type": "gpt2"}, **values.get("model", {})),
            update=UpdateConfig(global_batch_size=8, max_microbatch_tokens="auto", **values.get("update", {})),
            run=RunConfig(folder="runs/a"),
        )
        return metadata.describe_conditions(config, ALONE)

    kept = json.loads(json.dumps(circumstances()))
    assert first_difference(kept, circumstances()) is None
    for values in (
        {"model": {"activation_checkpointing": True}},
        {"model": {"compile": True}},
        {"model": {"attention": "eager"}},
        {"model": {"compute_dtype": "bfloat16"}},
        {"update": {"sync": "every"}},
    ):
        assert first_difference(kept, circumstances(**values)) is not None

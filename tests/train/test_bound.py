"""A bound that the recipe leaves open: measured, said, kept with the checkpoint, and chosen anew on another layout."""

import re
from collections.abc import Callable

import pytest

from megabatch.train import checkpoint
from tests.train.conftest import Bench

pytestmark = pytest.mark.slow
AUTO = {"update__max_microbatch_tokens": "auto", "eval__every": None}
GOING_ON = {**AUTO, "run__resume": True}


def test_a_bound_is_kept_and_chosen_anew(bench: Bench) -> None:
    said = bench.train(**AUTO, run__max_steps=3)
    (bound,) = re.findall(r"update\.max_microbatch_tokens ([\d,]+): predicted peak", said)
    meta = checkpoint.read_meta(checkpoint.latest(bench.folder))
    assert meta["bound"]["max_microbatch_tokens"] == int(bound.replace(",", ""))
    assert [row["step"] for row in bench.rows() if "predicted_peak_gib" in row] == [2]
    assert re.search(r"memory came to .* of the .* predicted", said)

    said = bench.train(**GOING_ON, run__max_steps=4)
    assert f"update.max_microbatch_tokens {bound}: the checkpoint's, so that sums are rounded the same" in said

    said = bench.train(**GOING_ON, run__max_steps=5, update__memory="3GiB")
    assert "the bound is chosen anew: update.memory was None and is 3GiB" in said
    assert "of 3.00 GiB, measured with" in said

    said = bench.train(ranks=2, **GOING_ON, update__memory="3GiB")
    assert "the bound is chosen anew: number of ranks was 1 and is 2" in said


def test_too_little_memory_is_one_line(refuse: Callable[..., str]) -> None:
    line = refuse(**AUTO, update__memory="1MiB")
    assert re.fullmatch(r"one sample of \d+ tokens needs .* GiB, and .* give more memory, shorten it, .*", line), line

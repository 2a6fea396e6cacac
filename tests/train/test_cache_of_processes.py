"""The cache where several processes want the same of it."""

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import ByT5Tokenizer

from megabatch import MegabatchError
from megabatch.train.data import cache
from megabatch.train.data.cache import main_rank_first, tokenize_once
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from tests.train.test_cache import ALONE, TEXTS, config, entries, once, write


def rank_main(folder: Path, rank: int, size: int, values: dict[str, Any]) -> None:
    """One rank: tokenizes slowly, with a pulse after every sample, and writes down what it got."""
    cache.SECONDS_OF_WAITING = 0.0
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    ranks = Ranks(rank, size, torch.device("cpu"))
    console = Console(enabled=rank == 0, loss_digits=3)
    try:
        data = config(folder, **values)
        samples = tokenize_once(data, "data", data, ByT5Tokenizer(), ranks, console)
        result = f"{len(samples)} {samples.fingerprint}"
    except MegabatchError as error:
        result = str(error)
    (folder / f"rank{rank}").write_text(result)
    dist.destroy_process_group()


def on_ranks(folder: Path, size: int, **values: Any) -> list[str]:
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=rank_main, args=(folder, rank, size, values)) for rank in range(size)]
    for each in started:
        each.start()
    for each in started:
        each.join(60)
    assert [each.exitcode for each in started] == [0] * size
    (folder / "meeting").unlink(missing_ok=True)
    return [(folder / f"rank{rank}").read_text() for rank in range(size)]


def test_every_rank_reads_what_the_main_one_has_written(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", TEXTS)
    results = on_ranks(tmp_path, 3)
    assert results == [f"300 {once(config(tmp_path)).fingerprint}"] * 3
    assert len(entries(tmp_path)) == 1
    assert on_ranks(tmp_path, 3) == results


def test_every_rank_refuses_what_the_main_one_refuses(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", [*TEXTS, ""])
    first, *others = on_ranks(tmp_path, 3)
    assert first.startswith(f"{tmp_path}/data.jsonl:301 has an empty text")
    assert others == [first] * 2


def patient_rank(folder: Path, rank: int) -> None:
    """One rank of two, which give up after three seconds of waiting for each other, while one works for five."""
    cache.SECONDS_OF_WAITING = 0.5
    timeout = timedelta(seconds=3)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timeout)

    def work(pulse: Callable[[], None]) -> None:
        for _ in range(50):
            time.sleep(0.1)
            pulse()
        (folder / "done").write_text("")

    main_rank_first(Ranks(rank, 2, torch.device("cpu")), work)
    assert (folder / "done").exists()
    dist.destroy_process_group()


@pytest.mark.slow
def test_the_others_wait_longer_than_a_collective_does(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=patient_rank, args=(tmp_path, rank)) for rank in range(2)]
    for each in started:
        each.start()
    for each in started:
        each.join(60)
    assert [each.exitcode for each in started] == [0, 0]


def endless(folder: Path) -> None:
    """Tokenizes a pipe whose end never comes."""
    data = config(folder, path=str(folder / "pipe.jsonl"))
    tokenize_once(data, "data", data, ByT5Tokenizer(), ALONE, Console(enabled=False, loss_digits=3))


def test_a_run_that_is_killed_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    pipe = os.open(tmp_path / "pipe.jsonl", os.O_RDWR)
    child = multiprocessing.get_context("fork").Process(target=endless, args=(tmp_path,))
    child.start()
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("cache/*.unfinished/samples.arrow")) and time.monotonic() < deadline:
        time.sleep(0.02)
    child.kill()
    child.join()
    os.close(pipe)
    (left,) = entries(tmp_path)
    assert left.endswith(".unfinished")
    (tmp_path / "pipe.jsonl").unlink()
    write(tmp_path / "pipe.jsonl", TEXTS)
    assert len(once(config(tmp_path, path=str(tmp_path / "pipe.jsonl")))) == 300


def two_at_once(folder: Path, number: int) -> None:
    data = config(folder)
    samples = tokenize_once(data, "data", data, ByT5Tokenizer(), ALONE, Console(enabled=False, loss_digits=3))
    (folder / f"got{number}").write_text(samples.fingerprint)


def test_runs_at_once_do_no_harm(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", TEXTS * 10)
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=two_at_once, args=(tmp_path, number)) for number in range(4)]
    for each in started:
        each.start()
    for each in started:
        each.join(60)
    assert [each.exitcode for each in started] == [0] * 4
    assert {(tmp_path / f"got{number}").read_text() for number in range(4)} == {once(config(tmp_path)).fingerprint}
    assert len(entries(tmp_path)) == 1

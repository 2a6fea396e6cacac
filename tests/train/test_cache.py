"""Cache: what was tokenized once is read again, bit for bit, until something that it depends on changes."""

import json
import multiprocessing
import os
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tokenizers import normalizers
from transformers import AutoTokenizer, ByT5Tokenizer

from megabatch import MegabatchError
from megabatch.train.config import DataConfig, SourceConfig
from megabatch.train.data.cache import TokenizedSamples, cache_folder, tokenize_once
from megabatch.train.data.encode import Skipped, samples_of
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from tests.train.contexts import ALONE
from tests.train.tokenizers_for_tests import chat_tokenizer
from tests.unit.failures.table import line_of

EMPTY = "has an empty text in the field 'text', so no token to learn"
TEXTS = [chr(97 + number % 26) * (1 + number % 50) for number in range(300)]


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_pairs(path: Path, texts: list[str]) -> Path:
    """The same texts, of which the first letter is the prompt."""
    path.write_text("".join(json.dumps({"prompt": text[0], "response": text[1:]}) + "\n" for text in texts))
    return path


def config(folder: Path, **values: Any) -> DataConfig:
    return DataConfig(**{"path": str(folder / "data.jsonl"), "cache": str(folder / "cache"), **values})


def once(config: DataConfig, *, source: SourceConfig | None = None, tokenizer: Any = None) -> TokenizedSamples:
    console = Console(enabled=True, loss_digits=3)
    return tokenize_once(source or config, "data", config, tokenizer or ByT5Tokenizer(), ALONE, console)


def test_who_may_share_the_cache_is_the_umasks_matter(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", TEXTS)
    once(config(tmp_path))
    (entry,) = (tmp_path / "cache").glob("*/") if (tmp_path / "cache").is_dir() else ()
    (tmp_path / "plain").mkdir()
    assert entry.stat().st_mode == (tmp_path / "plain").stat().st_mode


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "cache").iterdir())


def test_a_file_whose_name_is_no_utf8_is_named_all_the_same(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl"))
    write(path, TEXTS[:2])
    samples = once(config(tmp_path, path=f"{tmp_path}/caf*.jsonl"))
    assert samples.name(1) == f"{tmp_path}/caf\\xe9.jsonl:2"


def test_what_is_read_back_is_what_was_tokenized(tmp_path: Path) -> None:
    texts = [text + "é" for text in TEXTS]
    path = write_pairs(tmp_path / "data.jsonl", texts)
    stored_samples = once(config(tmp_path))
    source = SourceConfig(path=str(path))
    fresh = samples_of(source, "data", DataConfig(), ByT5Tokenizer(), Skipped())
    assert len(stored_samples) == len(TEXTS)
    for index, (name, sample) in enumerate(fresh):
        assert (stored_samples.name(index), list(stored_samples[index])) == (name, ["input_ids", "labels"])
        assert all(torch.equal(stored_samples[index][key], sample[key]) for key in sample)
        assert all(tensor.dtype == torch.int64 for tensor in stored_samples[index].values())
    assert stored_samples.lengths.tolist() == [len(text.encode()) + 1 for text in texts]
    assert stored_samples.num_targets.tolist() == [len(text.encode()) for text in texts]  # not the first, but the end


def test_it_is_a_sequence_that_other_processes_can_be_sent(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", TEXTS)
    samples = once(config(tmp_path))
    assert len(list(samples)) == len(TEXTS)
    assert samples[-1]["input_ids"].tolist() == samples[299]["input_ids"].tolist()
    assert [len(sample["labels"]) for sample in samples[10:13]] == [12, 13, 14]
    for index in (300, -301):
        with pytest.raises(IndexError):
            samples[index]
    sent = pickle.dumps(samples)
    assert len(sent) < 1000
    again = pickle.loads(sent)
    assert (again.fingerprint, again.name(7)) == (samples.fingerprint, samples.name(7))
    samples[0]["input_ids"].zero_()  # a sample is the caller's own
    assert samples[0]["input_ids"].tolist() == [ord("a") + 3, 1]


def test_the_second_time_nothing_is_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data.jsonl", TEXTS)
    first = once(config(tmp_path))
    (entry,) = entries(tmp_path)
    written = (tmp_path / "cache" / entry / "samples.arrow").stat().st_mtime_ns
    monkeypatch.chdir(tmp_path)
    second = once(config(tmp_path, path="data.jsonl"), source=SourceConfig(path="data.jsonl"))
    assert entries(tmp_path) == [entry]
    assert (tmp_path / "cache" / entry / "samples.arrow").stat().st_mtime_ns == written
    assert second.fingerprint == first.fingerprint


def test_whatever_samples_depend_on_makes_another_entry(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", TEXTS)
    plain = AutoTokenizer.from_pretrained(chat_tokenizer(tmp_path / "a", generation_markers=True))
    other = AutoTokenizer.from_pretrained(chat_tokenizer(tmp_path / "b", generation_markers=False))
    lower = AutoTokenizer.from_pretrained(plain.name_or_path)
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    asked: list[tuple[DataConfig, Any]] = [
        (config(tmp_path), ByT5Tokenizer()),
        (config(tmp_path, max_samples=10), ByT5Tokenizer()),
        (config(tmp_path, max_sample_tokens=10), ByT5Tokenizer()),
        (config(tmp_path, broken_rows="skip"), ByT5Tokenizer()),
        (config(tmp_path, text_field="text"), ByT5Tokenizer()),
        (config(tmp_path, source="text"), ByT5Tokenizer()),
        (config(tmp_path, path=[str(path), str(path)]), ByT5Tokenizer()),
        (config(tmp_path), ByT5Tokenizer(extra_ids=5)),
        (config(tmp_path), plain),
        (config(tmp_path), other),
        (config(tmp_path), lower),
    ]
    for number, (each, tokenizer) in enumerate(asked, start=1):
        once(each, tokenizer=tokenizer)
        assert len(entries(tmp_path)) == number, each
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))
    once(config(tmp_path))
    assert len(entries(tmp_path)) == len(asked) + 1
    write(path, [*TEXTS[:-1], "other"])
    assert once(config(tmp_path)).lengths[-1] == 6


def test_the_fingerprint_is_of_the_samples_and_not_of_where_they_were(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", TEXTS)
    first = once(config(tmp_path))
    moved = write(tmp_path / "moved.jsonl", TEXTS)
    assert once(config(tmp_path, path=str(moved))).fingerprint == first.fingerprint
    write(moved, [*TEXTS[1:], TEXTS[0]])
    assert once(config(tmp_path, path=str(moved))).fingerprint != first.fingerprint
    whole, pairs = write(moved, TEXTS[1:20]), write_pairs(tmp_path / "pairs.jsonl", TEXTS[1:20])
    as_text, as_pairs = (once(config(tmp_path, path=str(path))) for path in (whole, pairs))
    assert [sample["input_ids"].tolist() for sample in as_text] == [sample["input_ids"].tolist() for sample in as_pairs]
    assert as_text.fingerprint != as_pairs.fingerprint


def test_an_entry_that_is_damaged_is_made_again_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "data.jsonl", TEXTS)
    first = once(config(tmp_path))
    (entry,) = entries(tmp_path)
    file = tmp_path / "cache" / entry / "samples.arrow"
    summary_file = file.parent / "summary.json"

    def flip_bit() -> None:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    def change_summary() -> None:
        summary_file.write_text(summary_file.read_text().replace('"broken": 0', '"broken": 9'))

    damages = (lambda: os.truncate(file, 100), file.unlink, summary_file.unlink, flip_bit, change_summary)
    for damage in damages:
        damage()
        assert once(config(tmp_path)).fingerprint == first.fingerprint
        assert f"the tokenized data in {file.parent} is damaged (" in capsys.readouterr().out
    assert entries(tmp_path) == [entry]


def test_a_mistake_leaves_nothing_behind(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", [*TEXTS, ""])
    with pytest.raises(
        MegabatchError,
        match=r"data.jsonl:301 has an empty text in the field 'text', so no token to learn; mend it, or leave",
    ):
        once(config(tmp_path))
    assert entries(tmp_path) == []
    with pytest.raises(MegabatchError, match="there is no such file"):
        once(config(tmp_path / "missing"))
    assert not (tmp_path / "missing").exists()


def test_what_killed_runs_have_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", TEXTS)
    once(config(tmp_path))
    (entry,) = entries(tmp_path)
    old, new = (tmp_path / "cache" / f".{entry}.{name}.tmp" for name in ("old", "new"))
    for left in (old, new):
        left.mkdir()
    os.utime(old, (0, 0))
    shutil.rmtree(tmp_path / "cache" / entry)
    once(config(tmp_path))
    assert entries(tmp_path) == [new.name, entry]


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", TEXTS)
    (tmp_path / "file").write_text("")
    assert line_of(lambda: once(config(tmp_path, cache=str(tmp_path / "file" / "cache")))) == (
        f"cannot write tokenized data to {tmp_path}/file/cache (Not a directory); set data.cache to a folder that can "
        "be written and has room"
    )


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", TEXTS)
    full = tmp_path / "cache"
    child = multiprocessing.get_context("fork").Process(target=write_with_little_room, args=(tmp_path,))
    child.start()
    child.join()
    assert (child.exitcode, list(full.iterdir())) == (0, [])


def write_with_little_room(folder: Path) -> None:
    """In a process that may write files of 2 KB only."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    with pytest.raises(
        MegabatchError, match=r"cannot write tokenized data to .* \(.*File too large.*\); set data.cache"
    ):
        once(config(folder))


def test_what_was_left_out_is_said_every_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "data.jsonl", ["a", "", "b" * 20, ""])
    for _ in range(2):
        samples = once(config(tmp_path, broken_rows="skip", max_sample_tokens=10))
        assert samples.skipped == Skipped(broken=2, long=1, first=f"{path}:2 {EMPTY}")
        said = capsys.readouterr().out
        assert f"data: left out 2 broken rows, first {path}:2 {EMPTY}" in said
        assert "data: left out 1 samples longer than data.max_sample_tokens" in said
    write(path, ["a"])
    once(config(tmp_path))
    assert capsys.readouterr().out == ""


def test_the_users_cache_folder_is_where_tokens_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder(DataConfig()) == tmp_path / ".cache" / "megabatch"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder(DataConfig()) == Path("/x/megabatch")
    assert cache_folder(DataConfig(cache="~/c")) == tmp_path / "c"


def rank_main(folder: Path, rank: int, size: int, values: dict[str, Any]) -> None:
    """One rank: tokenizes, and writes down what it got."""
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
    while not list(tmp_path.glob("cache/.*.tmp/samples.arrow")) and time.monotonic() < deadline:
        time.sleep(0.02)
    child.kill()
    child.join()
    os.close(pipe)
    (left,) = entries(tmp_path)
    assert left.endswith(".tmp")
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

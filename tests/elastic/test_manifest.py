"""A manifest tells two runs apart, and finds one again on another number of ranks and after a kill."""

import json
from pathlib import Path

import pytest
import torch

from megabatch.batching import Deferred
from megabatch.train.cli import commands as cli
from megabatch.train.records.update_logs import noting_hashes, sum_of_hashes
from megabatch.train.runtime.files import MANIFEST as FILE_NAME
from tests.train.conftest import NO_DROPOUT, Bench

ROWS = [
    {
        "step": step,
        "samples": f"{step:032x}",
        "num_samples": 8,
        "weight": 40.0,
        "lr": 0.1,
        "loss": 2.0,
        "grad_norm": 1.0,
    }
    for step in (1, 2, 3)
]


def write(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / FILE_NAME).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def changed(step: int, **values: object) -> list[dict]:
    return [row | values if row["step"] == step else row for row in ROWS]


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = cli.run(["report", *map(str, arguments)])
    caught = capsys.readouterr()
    return status, caught.out + caught.err


@pytest.mark.parametrize(
    ("other", "status", "line"),
    [
        (ROWS, 0, "bits       equal in every number of every update"),
        (ROWS, 0, "grad_norm  equal"),
        (ROWS[:2], 1, "two ends after update 2"),
        ([ROWS[0], ROWS[2]], 1, "manifest.jsonl lacks 1 updates, first 2"),
        ([*ROWS, ROWS[1]], 1, "manifest.jsonl has more than one row of 1 updates, first 2"),
        (changed(2, loss=2.001), 0, "loss       differs by at most 0.0005, relative, at update 2: 2.0 and 2.001"),
        (changed(2, samples="f" * 32), 1, f"samples    differs from update 2 on: {2:032x} and {'f' * 32}"),
        (changed(3, weight=41.0), 1, "weight     differs from update 3 on: 40.0 and 41.0"),
        (changed(1, lr=0.1 + 1e-16), 1, f"lr         differs from update 1 on: 0.1 and {0.1 + 1e-16}"),
        (changed(2, loss=2.5), 1, "loss       differs by at most 0.2, relative, at update 2: 2.0 and 2.5"),
        (changed(2, loss=None), 1, "loss       differs by at most inf, relative, at update 2: 2.0 and None"),
        (changed(2, grad_norm=0.0), 1, "grad_norm  differs by at most 1, relative, at update 2: 1.0 and 0.0"),
    ],
)
def test_two_runs_are_compared(tmp_path, capsys, other, status, line):
    one, two = write(tmp_path / "one", ROWS), write(tmp_path / "two", other)
    found, text = report(capsys, "--compare", "--same", one, two)
    assert found == status
    assert line in text
    assert len(text.splitlines()) in (6, 7)


def test_bad_input_is_one_line(tmp_path, capsys):
    one = write(tmp_path / "one", ROWS)
    no_lr = write(tmp_path / "two", [{"step": 1, "samples": "0"}])
    (tmp_path / "three").mkdir()
    later = write(tmp_path / "four", changed(1)[2:])
    torn = write(tmp_path / "five", ROWS)
    (torn / FILE_NAME).write_text("{}\n" + (torn / FILE_NAME).read_text())
    cases = [
        (("--compare", "--same", one, no_lr), "is damaged (update 1 has not all of samples, weight, lr, num_samples"),
        (("--compare", "--same", one, tmp_path / "three"), f"has no {FILE_NAME}; train with --run.manifest=true"),
        (("--compare", "--same", write(tmp_path / "six", ROWS[:1]), later), "have no update in common"),
        (("--compare", "--same", torn, one), "line 1 is no row with a step"),
        (("--compare", "--same", one), "write: megabatch report RUN"),
        ((one, one, one), "write: megabatch report RUN"),
    ]
    for arguments, line in cases:
        status, text = report(capsys, *arguments)
        assert status == 2
        assert line in text
        assert len(text.splitlines()) == 1


def test_what_the_bits_depend_on_is_said(tmp_path, capsys):
    folders = write(tmp_path / "one", ROWS), write(tmp_path / "two", changed(2, loss=2.001))
    for folder, threads in zip(folders, ([1], [2]), strict=True):
        (folder / "environment.json").write_text(json.dumps({"starts": [{"threads": threads, "devices": {"cpu": 1}}]}))
    _, text = report(capsys, "--compare", "--same", *folders)
    assert text.splitlines()[-1] == "bits       threads was [1] and is [2]"


def sample(ids: list[int], **values: object) -> dict[str, object]:
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} | values


@pytest.mark.parametrize(
    "other",
    [
        sample([1, 3]),
        sample([1, 2], labels=torch.tensor([1, -100])),
        sample([1, 2], weight=torch.tensor(2.0)),
        sample([1, 2], input_ids=torch.tensor([1, 2], dtype=torch.int32)),
        sample([1, 2], input_ids=torch.tensor([[1, 2]])),
        sample([1, 2], name="b"),
    ],
)
def test_a_hash_is_of_all_content_and_knows_no_order(other: dict[str, object]):
    one = sample([1, 2])
    assert sum_of_hashes([one, other]) == sum_of_hashes([other]) + sum_of_hashes([sample([1, 2])])
    assert sum_of_hashes([one]) != sum_of_hashes([other])
    assert sum_of_hashes([one, one]) not in (sum_of_hashes([one, other]), sum_of_hashes([one]))


@pytest.mark.parametrize("value", ["b", torch.tensor(2.0)])
def test_a_hash_is_of_the_names_of_values_too(value: object):
    assert sum_of_hashes([sample([1, 2], one=value)]) != sum_of_hashes([sample([1, 2], other=value)])


def test_a_deferred_sample_is_hashed_where_it_is_loaded_and_once():
    samples, loads, hashes = [sample([1, 2]), sample([3])], [], {}
    batch = noting_hashes(Deferred(lambda index: loads.append(index) or samples[index], [2, 1]), hashes)
    assert [batch[1], batch[0], batch[0]] == [samples[1], samples[0], samples[0]]
    assert loads == [1, 0, 0]
    assert hashes == {index: sum_of_hashes([each]) for index, each in enumerate(samples)}


@pytest.mark.full
def test_the_same_run_on_other_ranks_and_after_a_stop_is_the_same(bench: Bench, tmp_path, capsys):
    folders = [tmp_path / name for name in ("one", "two", "stopped", "other")]
    values = {"run__manifest": True, "run__max_steps": 6, **NO_DROPOUT}
    bench.train(run__folder=folders[0], **values)
    bench.train(run__folder=folders[1], ranks=2, **values)
    bench.train(run__folder=folders[2], **values | {"run__max_steps": 4, "run__save_every": 2})
    (folders[2] / "checkpoints" / "latest").write_text("step-2")  # as if it had been killed before the next
    bench.train(run__folder=folders[2], **values, run__resume=True)
    bench.train(run__folder=folders[3], run__seed=1, **values)
    rows = [json.loads(line) for line in (folders[2] / FILE_NAME).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for other in folders[1:3]:
        status, text = report(capsys, "--compare", "--same", folders[0], other)
        assert status == 0
        assert text.count(" equal") == (6 if other is folders[2] else 3), text
    status, text = report(capsys, "--compare", "--same", folders[0], folders[3])
    assert status == 1
    assert "samples    differs from update 1 on" in text

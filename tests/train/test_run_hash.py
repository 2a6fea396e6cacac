"""run_hash: one hash of code, settings, model and data in each row of metrics.jsonl."""

import zipfile
from pathlib import Path
from typing import Any

import pytest

from megabatch.train.records.metrics import source_of
from tests.train.conftest import NO_DROPOUT, Bench

OWN_LOSS = (
    "from megabatch import losses\n\ndef loss(model, microbatch):\n    return losses.next_token(model, microbatch)\n"
)


def hashes(bench: Bench, name: str, ranks: int = 1, **values: Any) -> set[str]:
    """The hashes in the rows of a run of two updates."""
    folder = bench.path / name
    bench.train(ranks=ranks, run__folder=folder, run__max_steps=2, **NO_DROPOUT, **values)
    return {row["run_hash"] for row in bench.rows(folder)}


@pytest.mark.slow
def test_it_is_of_code_settings_and_data_and_not_of_folders_and_ranks(bench: Bench) -> None:
    own = bench.path / "own_loss.py"
    own.write_text(OWN_LOSS)
    loss: dict[str, Any] = {"loss__function": f"{own}:loss"}
    one = hashes(bench, "one", **loss)
    assert len(one) == 1
    assert hashes(bench, "two", ranks=2, **loss) == one
    assert hashes(bench, "other-rate", optim__lr=0.5, **loss).isdisjoint(one)
    own.write_text(OWN_LOSS.replace("return", "microbatch = dict(microbatch)\n    return"))
    assert hashes(bench, "other-code", ranks=2, **loss).isdisjoint(one)  # other processes read the file anew
    own.write_text(OWN_LOSS)
    data = bench.path / "data.jsonl"
    data.write_text(data.read_text().replace("ab", "zz"))
    assert hashes(bench, "other-data", ranks=2, **loss).isdisjoint(one)


def test_the_source_of_a_module_inside_a_zip_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "own.zip", "w") as archive:
        archive.writestr("loss_in_a_zip.py", OWN_LOSS)
    monkeypatch.syspath_prepend(str(tmp_path / "own.zip"))
    assert source_of("loss_in_a_zip:loss") == OWN_LOSS

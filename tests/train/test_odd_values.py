"""Odd values of keys and full disks end in a line that names the key, or are warned of once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megabatch import MegabatchError
from megabatch.planning import best_fit
from megabatch.train.checkpoints import writer as writing
from megabatch.train.checkpoints.tensor_files import write_problem
from megabatch.train.checkpoints.writer import CheckpointRequest, Writer
from megabatch.train.config import ModelConfig, OptimConfig
from megabatch.train.data.samples import pack_samples
from megabatch.train.model.architecture import architecture_of, construct, refused
from megabatch.train.model.build import try_forward
from megabatch.train.model.optimizer import too_long_warmup, too_small_steps
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.signals import StopSignal
from tests.train.contexts import ALONE, config_of

LARGEST = 2**63 - 1
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4,
}  # fmt: skip


@pytest.mark.parametrize("row_tokens", [10**12, LARGEST])
def test_a_row_of_any_size_holds_all(row_tokens: int) -> None:
    lengths = [3, 9, 1]
    assert best_fit(lengths, row_tokens) == best_fit(lengths, 13) == [[1, 0, 2]]
    samples = [{"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in lengths]
    (row,) = pack_samples(samples, row_tokens)
    assert len(row["input_ids"]) == 13
    assert best_fit([], row_tokens) == []
    assert best_fit(np.array(lengths).tolist(), 10) == [[1, 2], [0]]


def test_experts_that_do_not_compute_in_float64_name_the_key() -> None:
    config = ModelConfig(config=MIXTRAL, dtype="float64")
    architecture = architecture_of(config)
    model = construct(config, architecture)
    with pytest.raises(MegabatchError, match=r"in model\.dtype = 'float64' .*set model\.dtype to another"):
        try_forward(model, config, torch.device("cpu"))
    other = str(refused(config, ValueError("hidden_size must be even")))
    assert other == "transformers refuses model.config (ValueError: hidden_size must be even); change it there"


def test_a_warmup_beyond_the_run_is_warned_of() -> None:
    config = OptimConfig(lr=1e-3, warmup_steps=10**12)
    (line,) = too_long_warmup(config, 24)
    assert line.startswith(
        "the warmup of 1000000000000 updates is longer than the run of 24, whose learning rate rises"
    )
    assert too_long_warmup(config, None) == []
    assert too_long_warmup(OptimConfig(lr=1e-3, warmup_steps=24), 24) == []


@pytest.mark.parametrize(
    ("dtype", "lr", "is_small"),
    [
        (torch.float64, 1e-320, True), (torch.float64, 1e-15, False), (torch.float32, 1e-12, True),
        (torch.float32, 1e-6, False), (torch.bfloat16, 1e-6, True), (torch.bfloat16, 1e-2, False),
    ],
)  # fmt: skip
def test_a_learning_rate_that_moves_no_weight_is_warned_of(dtype: torch.dtype, lr: float, is_small: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 16).to(dtype)
    config = OptimConfig(lr=lr, master=None)
    lines = too_small_steps(torch.optim.AdamW(model.parameters(), lr=lr), config)
    assert [("most weights will not move" in line, f"optim.lr is {lr:g}" in line) for line in lines] == [
        (True, True)
    ] * is_small


@pytest.mark.parametrize("size", [10, 10_000])
def test_a_full_disk_is_told_as_one_whoever_writes(size: int) -> None:
    """torch's own writer reports the place where its file ends."""
    with pytest.raises(RuntimeError) as raised:
        torch.save(torch.ones(size), "/dev/full")
    assert write_problem(raised.value).startswith("a file was cut off while it was written: the disk is full")
    assert write_problem(OSError(27, "File too large")) == "File too large"
    assert write_problem(RuntimeError("other")) == "RuntimeError: other"


def test_a_last_checkpoint_that_can_never_be_written_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SECONDS_BETWEEN_TRIES", (0.0,))
    monkeypatch.setattr(writing, "SECONDS_BETWEEN_LATE_TRIES", 0.0)
    monkeypatch.setattr(writing, "MOST_TRIES", 4)
    (tmp_path / "checkpoints").write_text("a file")
    config = config_of(tmp_path, checkpoint={"background": False})
    writer = Writer(config, ALONE, Console(enabled=True, loss_digits=4), lambda: None)
    request = CheckpointRequest(1, {"x": torch.ones(1)}, {"step": 1}, is_best=False, in_turn=True)
    with pytest.raises(MegabatchError, match=r"cannot write .*; it was tried 4 times, and the run ends without it"):
        writer.write_last(request, StopSignal(speaks=False))
    assert capsys.readouterr().out.count("a signal ends the run, 4 times at most") == 1

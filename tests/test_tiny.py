"""The README's diff and the tutorial are true: the new loop gives the exact gradient, and the old one does not."""

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import GradientAccumulator, losses
from megabatch.batching import pad_right
from tests.test_docs import PAGES, READ, blocks
from tests.train.processes import Run

((_, DIFF),) = blocks(READ["README.md"], "diff")
HAND_WRITTEN, TWO_PROCESSES = (block for mark, block in blocks(PAGES["docs/tutorial.md"], "python") if mark)
Sample = dict[str, Tensor]


def side(sign: str) -> str:
    """The code before ("-") or after ("+") the diff."""
    return "\n".join(line[1:] for line in DIFF.splitlines() if line[:1] in (sign, " "))


class Bigrams(nn.Module):
    """A model in float64 that answers as transformers' models do: logits, and the mean loss of labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64)).double()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.layers(input_ids)
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(logits=logits, loss=loss)


def samples() -> list[Sample]:
    """64 samples of uneven lengths, some labels masked."""
    torch.manual_seed(1)
    made: list[Sample] = []
    for length in range(3, 67):
        ids = torch.randint(64, (length,))
        made.append({"input_ids": ids, "labels": torch.where(torch.arange(length) < length // 3, -100, ids)})
    return made


def gradient_of(code: str, **names: Any) -> Tensor:
    """Run a loop for one update of all samples; return the gradient that the optimizer saw."""
    model = Bigrams()
    seen: list[Tensor] = []

    class Recorder(torch.optim.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> None:
            seen.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))

    optimizer = Recorder(model.parameters(), lr=0.1)
    exec(
        code, {"model": model, "optimizer": optimizer, "samples": samples(), "pad": pad_right, "torch": torch, **names}
    )
    (found,) = seen
    return found


def uncut() -> Tensor:
    """By plain torch, all samples at once; clipped as the loops clip."""
    model = Bigrams()
    model(**pad_right(samples())).loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def error(found: Tensor) -> float:
    return float((found - uncut()).norm() / uncut().norm())


def test_the_loop_after_the_diff_is_exact_and_the_one_before_is_not() -> None:
    assert error(gradient_of(side("+"))) < 1e-14
    assert error(gradient_of(side("-"))) > 1e-3


def test_the_diff_is_short_and_complete() -> None:
    assert sum(line.startswith("+") for line in DIFF.splitlines()) <= 8
    compile(side("+"), "README.md", "exec")


def test_the_loop_by_hand_of_the_tutorial_is_exact(group_of_one: None) -> None:
    targets = {"targets": lambda microbatch: (microbatch["labels"][:, 1:] != -100).sum()}
    code = HAND_WRITTEN.replace("model.no_sync()", "contextlib.nullcontext()").replace(
        'model(microbatch["input_ids"])', 'model(microbatch["input_ids"]).logits'
    )
    microbatches = [pad_right(samples()[start : start + 8]) for start in range(0, 64, 8)]
    run = f"{code}\nhand_written(model, optimizer, microbatches, 1)"
    assert error(gradient_of(run, **targets, cross_entropy=F.cross_entropy, microbatches=microbatches)) < 1e-14
    model = Bigrams()
    gradient = GradientAccumulator(model, micro_batch_size=8)
    gradient.forward_backward(samples(), losses.next_token)
    gradient.finalize(max_norm=1.0)
    assert error(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])) < 1e-14


@pytest.mark.full
def test_the_tutorial_has_the_same_losses_on_two_processes(group_of_one: None, tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES)
    first, second = Run([], tmp_path, 2, script).wait(300)
    assert first.status == second.status == 0, first.err
    alone = re.sub(r"^dist\.(init|destroy)_process_group.*$", "", TWO_PROCESSES, flags=re.MULTILINE)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(alone, {})
    one, two = (re.findall(r"loss (\d\.\d+), (\d+) samples", text) for text in (printed.getvalue(), first.out))
    assert one == two
    assert len(one) >= 2

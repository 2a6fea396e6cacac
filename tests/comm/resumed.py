"""Runs docs/checkpoints.md: a run that was stopped and resumed, from other weights, beside a whole one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.comm.document import snippets
from tests.exact.tiny import tiny

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
LENGTHS = [3 + (7 * number) % 11 for number in range(14)]  # 4 updates an epoch, the last of 2 samples
STOPPED, UNTIL = 3, 9


def samples() -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(4)
    texts = [torch.randint(1, 60, (length,), generator=drawn) for length in LENGTHS]
    return [{"input_ids": text, "labels": text} for text in texts]


def language_model(seed: int) -> nn.Module:
    model = tiny("gpt2", attn_pdrop=0.1, embd_pdrop=0.0, resid_pdrop=0.0)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval() if dist.is_initialized() else model  # of ranks, each would have to save its random state


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each.detach().clone()
        for name, each in model.named_parameters()
    }


def difference(train: Callable[..., Any], path: str) -> float:
    """The largest difference of a weight between the whole run and the one that was resumed."""
    models = [language_model(seed) for seed in (0, 0, 1)]
    torch.manual_seed(5)
    train(models[0], samples(), UNTIL, f"{path}-whole")
    torch.manual_seed(5)
    train(models[1], samples(), STOPPED, path)
    torch.manual_seed(6)
    train(models[2], samples(), UNTIL, path)
    found, expected = whole(models[2]), whole(models[0])
    return max(float((found[name] - each).abs().max()) for name, each in expected.items())


def run_job(job: str) -> float:
    """The job "name of the page's function:path"."""
    name, path = job.split(":")
    names: dict[str, Any] = {}
    for snippet in snippets(PAGE.read_text()):
        exec(compile(snippet, str(PAGE), "exec"), names)
    return difference(names[name], path)

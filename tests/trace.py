"""Files, functions and depth of a call in the library; python -m tests.trace prints them."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import megabatch
from megabatch import GradientAccumulator, losses

ROOT = os.path.dirname(megabatch.__file__) + os.sep
NOT_NAMED = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")  # read where they stand


@dataclass
class Trace:
    """The functions below megabatch/ that a call entered."""

    functions: dict[CodeType, int] = field(default_factory=dict[CodeType, int])  # by their depth when first entered
    depth: int = 0

    @property
    def files(self) -> list[str]:
        return sorted({code.co_filename.removeprefix(ROOT) for code in self.functions})

    def note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not _is_counted(frame):
            return
        depth, above = 0, frame
        while above is not None:
            depth += _is_counted(above)
            above = above.f_back
        self.functions.setdefault(frame.f_code, depth)
        self.depth = max(self.depth, depth)

    def __str__(self) -> str:
        named = [
            f"{'  ' * depth}{code.co_filename.removeprefix(ROOT)} {code.co_qualname}"
            for code, depth in self.functions.items()
        ]
        return "\n".join([*named, f"{len(self.files)} files, {len(self.functions)} functions, depth {self.depth}"])


def _is_counted(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(ROOT) and frame.f_code.co_name not in NOT_NAMED


def trace(call: Callable[[], Any]) -> Trace:
    """Run ``call`` and return what it entered."""
    found = Trace()
    sys.setprofile(found.note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def traces(name: str) -> dict[str, Trace]:
    """Trace a constructor, a `forward_backward` and a `finalize` on a small model; ``name``: "plain" or "ddp".

    A first update runs before, so that checks of a new model and a new loss are not counted.
    """
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    model = DistributedDataParallel(model) if name == "ddp" else model
    batch = [{"input_ids": torch.arange(length), "labels": torch.arange(length)} for length in (9, 7, 8, 5)]
    made: list[GradientAccumulator] = []
    found = {"constructor": trace(lambda: made.append(GradientAccumulator(model, micro_batch_size=2)))}
    gradient = made[0]
    gradient.forward_backward(batch, losses.next_token)
    gradient.finalize(max_norm=1.0)
    found["forward_backward"] = trace(lambda: gradient.forward_backward(batch, losses.next_token))
    found["finalize"] = trace(lambda: gradient.finalize(max_norm=1.0))
    return found


if __name__ == "__main__":
    for call, entered in traces("plain").items():
        print(call, entered, sep="\n")

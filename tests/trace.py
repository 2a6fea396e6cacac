"""Files, functions and depth of a call in the library; python -m tests.trace prints them."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import megabatch

ROOT = os.path.dirname(megabatch.__file__) + os.sep
NOT_NAMED = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")  # read where they stand


@dataclass
class Trace:
    """What a call entered below megabatch/."""

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


def main() -> None:
    """Print the trace of a constructor, a `forward_backward` and a `finalize` for a plain model of transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from megabatch import GradientAccumulator, losses

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    batch = [{"input_ids": torch.arange(length), "labels": torch.arange(length)} for length in (9, 7, 8, 5)]
    made: list[GradientAccumulator] = []
    print("constructor", trace(lambda: made.append(GradientAccumulator(model, micro_batch_size=2))), sep="\n")
    gradient = made[0]
    gradient.forward_backward(batch, losses.next_token)  # what is asked of a model and a loss once is asked here
    gradient.finalize(max_norm=1.0)
    print("forward_backward", trace(lambda: gradient.forward_backward(batch, losses.next_token)), sep="\n")
    print("finalize", trace(lambda: gradient.finalize(max_norm=1.0)), sep="\n")


if __name__ == "__main__":
    main()

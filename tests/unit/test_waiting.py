"""An update never waits for the device. Meta tensors have no numbers, so that whoever asks for one is found at once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from megabatch import GradientAccumulator, Learner, losses

META = torch.device("meta")
SETTINGS: dict[str, dict[str, Any]] = {
    "samples": {"micro_batch_size": 2},
    "tokens": {"max_microbatch_tokens": 12},
    "one microbatch": {"micro_batch_size": 8},
    "wider": {"micro_batch_size": 2, "accumulate_dtype": torch.float32},
}


def model_of(dtype: torch.dtype) -> nn.Module:
    """With a cache: without one transformers itself asks the device whether a row holds several texts."""
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).to(META, dtype)


def samples() -> list[dict[str, Tensor]]:
    texts = [torch.arange(1, length) for length in (3, 6, 9, 7, 4)]
    return [{"input_ids": each, "attention_mask": torch.ones_like(each), "labels": each} for each in texts]


@pytest.mark.parametrize("name", SETTINGS)
def test_an_update_asks_the_device_for_nothing(name: str) -> None:
    settings = SETTINGS[name]
    model = model_of(torch.bfloat16 if "accumulate_dtype" in settings else torch.float32)
    gradient = GradientAccumulator(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    for _ in range(2):
        gradient.forward_backward(samples()[:3], losses.next_token)
        gradient.forward_backward(samples()[3:], losses.next_token)
        update = gradient.finalize(max_norm=1.0)
        optimizer.step()
    assert update.grad_norm is not None
    assert update.grad_norm.device == META
    with pytest.raises(RuntimeError, match="item"):  # so would the first who asked before
        bool(update.finite)


def test_nor_does_a_loop_of_ones_own() -> None:
    model = model_of(torch.float32)
    gradient = GradientAccumulator(model, micro_batch_size=2)
    texts = [{name: each[name][None].to(META) for name in ("input_ids", "labels")} for each in samples()]
    for index, microbatch in enumerate(texts):
        with gradient.microbatch(index, of=len(texts), sum_over=microbatch["labels"].numel() - 1) as part:
            part.scale(losses.next_token(model, microbatch).total).backward()
    assert gradient.finalize().num_microbatches == len(texts)


def test_a_loss_that_asks_is_found() -> None:
    model = model_of(torch.float32)

    def asks(model: nn.Module, microbatch: Any) -> Any:
        total, weight = losses.next_token(model, microbatch)
        return total * float(total > 0), weight

    learner = Learner(model, torch.optim.SGD(model.parameters()), GradientAccumulator(model, micro_batch_size=2))
    with pytest.raises(RuntimeError, match="item"):
        learner.forward_backward(samples(), asks)

"""Samples that cannot be padded, losses whose gradient is not that of their total, and updates that were lost."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForTokenClassification,
    FNetConfig,
    FNetForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

from megabatch import GradientAccumulator, LossContractError, MegabatchError, loss, losses
from megabatch.batching import OneRow, Padded
from megabatch.batching.padding import Padding
from tests.unit.failures.table import SAMPLES, Failure, accumulator, squares, weighed_squares

LOST = "an update was lost"


def gpt2(**settings: Any) -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(**{"vocab_size": 11, "n_embd": 4, "n_layer": 1, "n_head": 1} | settings))


def bert() -> nn.Module:
    return BertForTokenClassification(
        BertConfig(vocab_size=11, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    )


def fnet() -> nn.Module:
    torch.manual_seed(0)
    return FNetForTokenClassification(
        FNetConfig(vocab_size=11, hidden_size=4, num_hidden_layers=1, intermediate_size=4)
    )


def texts(*lengths: int, token: int = 1) -> list[dict[str, Tensor]]:
    ids = [torch.full((length,), token) for length in lengths]
    return [{"input_ids": each, "labels": each} for each in ids]


def bool_labels() -> None:
    labels = [{"x": torch.ones(n, 1).double(), "labels": torch.ones(n, dtype=torch.bool)} for n in (1, 2)]
    accumulator().forward_backward(labels, losses.mse)


def unmasked() -> None:
    def classes(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
        return model(microbatch["input_ids"]).logits.sum(), 1

    GradientAccumulator(bert(), micro_batch_size=2).forward_backward(texts(3, 4), classes)


def own_backward() -> None:
    def differentiated(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
        total, weight = squares(model, microbatch)
        total.backward(retain_graph=True)
        return total, weight

    accumulator().forward_backward(SAMPLES, differentiated)


class Eager(torch.autograd.Function):
    """A scalar whose backward hands on what it was multiplied by, and no more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Tensor:
        return 2 * ctx.saved_tensors[0]


def unscaled() -> None:
    accumulator().forward_backward(
        SAMPLES, lambda model, microbatch: (Eager.apply(model(microbatch["x"])), len(microbatch["x"]))
    )


@loss(weigh=lambda microbatch: len(microbatch["x"]))
def detached(model: nn.Module, microbatch: Any, divisor: float) -> tuple[Tensor, int]:
    total, weight = squares(model, microbatch)
    return total.detach() / divisor, weight


def two_pad_tokens() -> None:
    models = [gpt2(pad_token_id=1), gpt2(pad_token_id=2)]
    Padding(models)(texts(3, 4))


def after_a_lost_update(verb: str) -> None:
    """The second call fails, and its error is caught."""

    def fail(*_: Any) -> Any:
        raise ArithmeticError

    gradient = accumulator()
    gradient.forward_backward(SAMPLES, weighed_squares)
    with contextlib.suppress(ArithmeticError):
        gradient.forward_backward(SAMPLES, fail)
    {"finalize": gradient.finalize, "call": lambda: gradient.forward_backward(SAMPLES, weighed_squares)}[verb]()


FAILURES = {
    "labels that cannot hold -100": Failure("'labels' … torch.bool … value -100", bool_labels),
    "padding beside collate": Failure(
        "collate= … batching=", lambda: accumulator(collate=list, batching=Padded({"x": 0}))
    ),
    "an object as collate": Failure("collate= … OneRow … batching=OneRow", lambda: accumulator(collate=OneRow())),
    "a class as collate": Failure(
        "collate= is the class OneRow … batching=OneRow()", lambda: accumulator(collate=OneRow)
    ),
    "a class as batching": Failure("batching is the class OneRow … OneRow()", lambda: accumulator(batching=OneRow)),
    "padding that is a number": Failure("Padded got -1 … {key: value}", lambda: Padded(-1)),
    "a batching that is none": Failure("batching is … Padded, OneRow", lambda: accumulator(batching=len)),
    "padding with a text": Failure("Padded … '0' … 'x'", lambda: Padded({"x": "0"})),
    "a token beyond the vocabulary": Failure(
        "input_ids … token 11 and … has 11",
        lambda: GradientAccumulator(gpt2(), micro_batch_size=2).forward_backward(texts(3, token=11), losses.next_token),
    ),
    "two pad tokens": Failure("[1, 2]", two_pad_tokens),
    "padding that a model mixes into tokens": Failure(
        "input_ids … fnet takes no attention_mask … micro_batch_size=1",
        lambda: GradientAccumulator(fnet(), micro_batch_size=2).forward_backward(texts(3, 4), losses.classification),
    ),
    "a mask that the loss keeps": Failure("BertForTokenClassification … attention_mask", unmasked, LossContractError),
    "a backward in the loss": Failure("its own backward", own_backward, LossContractError),
    "a backward that does not scale": Failure("is multiplied by", unscaled, LossContractError),
    "a total that is detached, of a loss that takes the divisor": Failure(
        "of the model", lambda: accumulator().forward_backward(SAMPLES, detached), LossContractError
    ),
    "a call after a lost update": Failure(LOST, lambda: after_a_lost_update("call"), MegabatchError),
    "finalize after a lost update": Failure(LOST, lambda: after_a_lost_update("finalize"), MegabatchError),
}

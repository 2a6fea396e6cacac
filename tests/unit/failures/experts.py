"""Errors of mixtures of experts."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from transformers import MixtralConfig, MixtralForCausalLM

from megabatch import GradientAccumulator, LossContractError, MegabatchError, experts
from tests.exact.experts import samples, sparse_lm, unbalanced
from tests.unit.failures.pipeline import pipeline
from tests.unit.failures.table import Failure, linear

LOGITS = torch.zeros(1, 5, 4)


def bias_of(model: nn.Module, **settings) -> tuple[GradientAccumulator, experts.ExpertBias]:
    gradient = GradientAccumulator(model, micro_batch_size=2)
    return gradient, experts.ExpertBias(gradient, **settings)


def balance(logits: object, tokens: int = 5, scores: str = "softmax") -> Tensor:
    return experts.sequence_balance(logits, torch.ones(1, tokens), top_k=2, scores=scores)


def trained(model: nn.Module, batch: object = None, **settings: Callable[..., object]) -> None:
    gradient, _ = bias_of(model, **settings)
    gradient.forward_backward(batch or samples(0, 2), unbalanced)


def mask_of_others() -> None:
    ids = torch.arange(6)
    trained(sparse_lm(), [{"input_ids": ids, "labels": ids, "attention_mask": torch.ones(9, dtype=torch.long)}])


def frozen() -> nn.Module:
    model = sparse_lm()
    model.embedding.requires_grad_(False)
    model.blocks[0].router.requires_grad_(False)
    return model


def sharded() -> nn.Module:
    model = sparse_lm()
    router = model.blocks[0].router
    mesh = init_device_mesh("cpu", (1,))
    router.e_score_correction_bias = distribute_tensor(router.e_score_correction_bias, mesh, [Replicate()])
    return model


def mixtral() -> nn.Module:
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads)).train()


def next_token_with_balance(model: nn.Module, *coefficient: float, **settings: int) -> object:
    ids = torch.arange(6)[None]
    return experts.next_token_with_balance(*coefficient, **settings)(model, {"input_ids": ids, "labels": ids})


def head_alone() -> nn.Module:
    model = mixtral()
    model.model.requires_grad_(False)
    return model


class Plain(nn.Linear):
    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=super().forward(input_ids[..., None].float()))


FAILURES = {
    "a coefficient below 0": Failure("is -1", lambda: experts.next_token_with_balance(-1)),
    "a router loss without a coefficient": Failure(
        "router_aux_loss_coef", lambda: next_token_with_balance(Plain(1, 9))
    ),
    "a model without router logits": Failure(
        "SimpleNamespace … router_logits", lambda: next_token_with_balance(Plain(1, 9), 0.1, top_k=2)
    ),
    "router logits without gradient": Failure(
        "router_logits", lambda: next_token_with_balance(head_alone(), 0.1), LossContractError
    ),
    "experts without biases": Failure("'e_score_correction_bias'", lambda: bias_of(linear())),
    "biases that do not move": Failure(
        "rate is 0.0; expected a positive number", lambda: bias_of(sparse_lm(), rate=0.0)
    ),
    "a choice that is not told": Failure("'blocks.0.router'", lambda: trained(sparse_lm(), chosen=lambda output: None)),
    "a mask of other tokens": Failure("'blocks.0.router' … saw 6 tokens … attention_mask … (1, 9)", mask_of_others),
    "a router without gradient": Failure("'blocks.0.router'", lambda: trained(frozen()), MegabatchError),
    "unknown scores": Failure("'relu'", lambda: balance(LOGITS, scores="relu")),
    "a balance of no layers": Failure("router_logits", lambda: balance(())),
    "a balance of other tokens": Failure(
        "router_logits … 1 … 5 … 4 … attention_mask … (1, 4)", lambda: balance(LOGITS, tokens=4)
    ),
}
IN_A_GROUP = {
    "biases in a pipeline": Failure("ExpertBias", lambda: bias_of(pipeline(linear()))),
    "a bias that is sharded": Failure("'e_score_correction_bias' … 'blocks.0.router'", lambda: bias_of(sharded())),
}

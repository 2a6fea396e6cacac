"""Small models of every known family with a head, and its loss by plain torch and by `losses.next_token`."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from megabatch import losses
from megabatch.losses.chunked_cross_entropy import FAMILIES

V, D, B, T = 97, 16, 4, 11
SIZES = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
MORE = {
    "gemma": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "qwen3": {"head_dim": 8},
    "gpt2": {"n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "seed_oss": {"head_dim": 8, "residual_dropout": 0.0},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": D, "dropout": 0.0, "pad_token_id": 1},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"},
    "qwen2_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
                  "shared_expert_intermediate_size": 8, "experts_implementation": "eager"},
    "qwen3_moe": {"head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
                  "experts_implementation": "eager"},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
    "gemma2": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8, "head_dim": 8},
}  # fmt: skip
DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
KNOWN = sorted(name.split(".")[2] for name in FAMILIES)
TOUCHING = ("cohere", "gemma2", "granite")  # logits are scaled or capped after the head


class Sizes(TorchDispatchMode):
    """How many numbers the tensors have that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    @property
    def had_logits(self) -> bool:
        return max(self.seen) >= B * (T - 1) * V

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.seen.add(result.numel())
        return result


def causal(family: str = "llama", dtype: torch.dtype = torch.float64, **changes) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **DROPOUT, **MORE.get(family, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    for parameter in model.parameters():  # so that no gradient is too small to be compared
        nn.init.normal_(parameter, std=0.3)
    return model


def microbatch(rows: int = B) -> dict[str, Tensor]:
    """Prompts of half the length, padding in one row, and a row without a target."""
    ids = torch.randint(2, V, (rows, T), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, : T // 2] = -100
    labels[0, -2:] = -100
    labels[1] = -100
    return {"input_ids": ids, "labels": labels}


def plain(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """By plain torch."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def gradients(model: nn.Module, total: Tensor, factor: float = 1.0) -> dict[str, Tensor | None]:
    model.zero_grad()
    (total * factor).backward()
    return {name: each.grad for name, each in model.named_parameters()}


def summed(model: nn.Module, batch: dict[str, Tensor], *, fused: bool = True) -> Tensor:
    """`losses.next_token`, and whether it had logits."""
    with Sizes() as sizes:
        total = losses.next_token(model, batch).total
    assert sizes.had_logits is not fused
    return total


def error(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> float:
    """The largest of a parameter, relative to its own size; that of a key's bias is nothing but rounding."""
    assert {name for name in found if found[name] is None} == {name for name in expected if expected[name] is None}
    pairs = [(found[name].double(), each.double()) for name, each in expected.items() if each is not None]
    size = max(float(each.norm()) for _, each in pairs)
    return max(float((a - b).norm()) / max(float(b.norm()), 1e-4 * size, 1e-300) for a, b in pairs)


def compare(model: nn.Module, batch: dict[str, Tensor], tolerance: float = 1e-12, *, fused: bool = True) -> None:
    expected = plain(model, batch)
    of_plain = gradients(model, expected, 0.37)
    total = summed(model, batch, fused=fused)
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=tolerance)
    assert error(gradients(model, total, 0.37), of_plain) <= tolerance

"""Documents that are packed into a row see nothing of each other, or it is said."""

from typing import Any

import pytest
import torch

from megabatch.train.model.build import ParallelModel, build
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from tests.train.model_recipes import FAMILIES, recipe

ALONE = Ranks(0, 1, torch.device("cpu"))
SILENT = Console(enabled=False, loss_digits=4)
TOKENS = torch.arange(24).view(2, 12)


def laid(model: dict[str, Any] | None = None, **keys: Any) -> ParallelModel:
    return build(recipe(model, **keys), ALONE, SILENT, None, None)


def crossing(family: str, attention: str) -> bool:
    """By gradients: whether logits of second documents depend on the first ones' embeddings, in any of two rows."""
    base = laid({"attention": attention, "config": FAMILIES[family]}).base.eval()
    inputs = base.get_input_embeddings()(TOKENS).detach().requires_grad_()
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]).expand(2, -1)
    base(inputs_embeds=inputs, position_ids=positions).logits[:, 5:].logsumexp(-1).sum().backward()
    assert inputs.grad is not None
    return bool(inputs.grad[:, :5].any())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "gpt_neox"])
def test_packed_documents_are_isolated(family: str, attention: str) -> None:
    words = laid({"attention": attention}, family=family, data={"pack_tokens": 32}).words
    assert words[-1] == f"documents are isolated by their position_ids ({attention})"
    assert not crossing(family, attention)


def test_documents_that_see_each_other_are_spoken_of() -> None:
    config = {"model_type": "opt", "vocab_size": 385, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    warnings = laid({"config": config}, data={"pack_tokens": 32}).warnings
    assert warnings[-1].startswith(
        "attention crosses documents: those of a packed row see each other (sdpa); set model.att"
    )
    assert not any("documents" in line for line in laid({"config": config}).warnings)

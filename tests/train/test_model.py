"""What transformers would build and the trainer could not run: the line that it gets, before anything is written."""

import logging

import pytest
import torch

from megabatch import MegabatchError
from megabatch.train.config import ModelConfig
from megabatch.train.model import build_model

SIZES: dict[str, dict[str, object]] = {
    "gpt2": {"vocab_size": 32, "n_embd": 8, "n_layer": 1, "n_head": 2},
    "llama": {
        "vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4,
    },
}  # fmt: skip
REFUSED = "transformers refuses model.config ({}); change it there"
AT_LEAST = "it must be at least 1: change it there"
OWNED = "is not the recipe's to set;"
CASES: list[tuple[str, str, object, str]] = [
    ("llama", "pad_token_id", 9999, REFUSED.format("AssertionError: Padding_idx must be within num_embeddings")),
    ("llama", "hidden_act", "foo", REFUSED.format("KeyError: 'foo'")),
    ("llama", "num_key_value_heads", 3, "transformers refuses model.config (RuntimeError: The size of tensor a (4) "),
    ("llama", "num_hidden_layers", 0, f"model.config.num_hidden_layers is 0; {AT_LEAST}"),
    ("llama", "vocab_size", 0, f"model.config.vocab_size is 0; {AT_LEAST}"),
    ("gpt2", "n_layer", 0, f"model.config.n_layer is 0; {AT_LEAST}"),
    ("gpt2", "use_cache", True, f"model.config.use_cache {OWNED} the trainer sets it (false while it trains)"),
    ("gpt2", "dtype", "float16", f"model.config.dtype {OWNED} set model.dtype"),
    ("gpt2", "torch_dtype", "float16", f"model.config.torch_dtype {OWNED} set model.dtype"),
]


@pytest.mark.parametrize(("model_type", "key", "value", "line"), CASES)
def test_a_bad_model_gets_its_line(
    capfd: pytest.CaptureFixture[str], model_type: str, key: str, value: object, line: str
) -> None:
    with pytest.raises(MegabatchError) as caught:
        build_model(ModelConfig(config={"model_type": model_type, **SIZES[model_type], key: value}), 0)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_transformers_is_silent_only_while_it_builds(capfd: pytest.CaptureFixture[str]) -> None:
    """A vocabulary without GPT-2's own end token is worth a warning there, and is what every recipe here has."""
    level = logging.getLogger("transformers").level
    model = build_model(ModelConfig(config={"model_type": "gpt2", **SIZES["gpt2"]}), 0)
    assert capfd.readouterr().err == ""
    assert logging.getLogger("transformers").level == level
    assert model.training


def test_the_trial_changes_no_weight() -> None:
    one, two = (build_model(ModelConfig(config={"model_type": "gpt2", **SIZES["gpt2"]}), 5) for _ in range(2))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.grad is None

"""Small models of several families, and recipes of them."""

from typing import Any

from megabatch.train.config import Config

LLAMA = {
    "model_type": "llama", "vocab_size": 385, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied llama": {**LLAMA, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "vocab_size": 385, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "gpt_neox": {**{key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"}, "model_type": "gpt_neox"},
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4},
}


def recipe(
    model: dict[str, Any] | None = None, *, family: str = "llama", wrapper: str | None = None, seed: int = 7,
    data: dict[str, Any] | None = None, update: dict[str, Any] | None = None,
) -> Config:  # fmt: skip
    """A recipe of a small model: of a family, unless ``model`` names another; ``model`` has further keys."""
    keys = dict(model or {})
    if not keys.keys() & {"name", "config", "function"}:
        keys["config"] = FAMILIES[family]
    return Config.model_validate(
        {
            "model": keys,
            "data": data or {},
            "update": {"global_batch_size": 4, "micro_batch_size": 2, **(update or {})},
            "run": {"folder": "unused", "seed": seed},
            "parallel": {"wrapper": wrapper},
        }
    )

"""Tiny models of transformers by family, from configs alone: no weights are downloaded."""

from typing import Any

import torch
from torch import nn

VOCABULARY = 64
PAD = 63  # of the families that have a pad token; their text does not use it
WIDTHS: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
TEXT: dict[str, Any] = WIDTHS | {
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GROUPED = TEXT | {"num_key_value_heads": 1, "head_dim": 8}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "n_inner": 24,
        "bos_token_id": None, "eos_token_id": None}  # fmt: skip
ENCODER_DECODER = {"vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
                   "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
                   "decoder_ffn_dim": 24, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
                   "pad_token_id": 0, "decoder_start_token_id": 2, "forced_eos_token_id": None}  # fmt: skip
IMAGE = WIDTHS | {"image_size": 8, "patch_size": 4, "num_channels": 3}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "t5": {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2,
           "pad_token_id": 0, "decoder_start_token_id": 0},
    "bart": ENCODER_DECODER,
    "vit": IMAGE,
    **{kind: {} for kind in ("clip", "convnext", "resnet", "swin", "wav2vec2", "whisper")},
}  # fmt: skip
GROUPED_KINDS = ("mistral", "qwen3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe", "granite", "cohere", "olmo2")


def tiny(kind: str, task: str = "CausalLM", **config: Any) -> nn.Module:
    """A model of one family in float64, without dropout of its config's own saying."""
    import transformers

    sizes = SIZES.get(kind, GROUPED if kind in GROUPED_KINDS else TEXT)
    torch.manual_seed(3)
    made = transformers.AutoConfig.for_model(kind, **(sizes | config))
    factory = getattr(transformers, f"AutoModelFor{task}" if task else "AutoModel")
    return factory.from_config(made).double().train()

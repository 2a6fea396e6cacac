"""The model, its optimizer, and the batches of those who make their own: plain PyTorch and transformers."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from benchmarks.speed.setting import VOCABULARY, Setting

Sample = dict[str, Tensor]
PADDING, NO_TARGET = 0, -100


def build(setting: Setting) -> PreTrainedModel:
    """A Llama from a config, the same each time."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCABULARY, hidden_size=setting.hidden, intermediate_size=setting.intermediate,
        num_hidden_layers=setting.layers, num_attention_heads=setting.heads, use_cache=False, bos_token_id=None,
        eos_token_id=None, pad_token_id=PADDING, attn_implementation="sdpa",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    return in_double(model) if setting.dtype == "float64" else model


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float64 throughout: transformers' RMSNorm and its loss would go down to float32."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, LlamaRMSNorm):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                norm.load_state_dict(child.state_dict())
                setattr(parent, name, norm)
    model.loss_function = causal_loss
    return model.double()


def causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Tensor:
    """transformers' ForCausalLMLoss without its cast: a mean, or a sum over a number of targets."""
    targets = F.pad(labels, (0, 1), value=NO_TARGET)[..., 1:].flatten()
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits.view(-1, vocab_size), targets, ignore_index=NO_TARGET, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def optimizer_of(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=setting.learning_rate, fused=True)


def sample_of(ids: Sequence[int]) -> Sample:
    """Every token is a target but the first."""
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)}


def collate(samples: Sequence[Sample]) -> Sample:
    """Padded on the right, with an attention mask, as transformers' collators give it: [B, T] each."""
    ids = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=PADDING),
        "attention_mask": pad_sequence([torch.ones_like(each) for each in ids], batch_first=True),
        "labels": pad_sequence([each["labels"] for each in samples], batch_first=True, padding_value=NO_TARGET),
    }

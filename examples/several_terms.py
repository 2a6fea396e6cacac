"""Two losses, one a mean over bytes and one over samples, and a metric. python examples/several_terms.py"""

import calendar
import inspect

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import GradientAccumulator, Learner, loss, losses

config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
learner = Learner(model, torch.optim.AdamW(model.parameters(), lr=4e-3), GradientAccumulator(model, micro_batch_size=4))
texts = inspect.getsource(calendar).encode().split(b"\n\n")
samples = [{"labels": torch.tensor(list(text)), "code": torch.tensor(int(b"def " in text))} for text in texts]


@loss(weigh=lambda m: {"text": losses.count_targets(m), "code": len(m["code"])})  # each term has its own weight
def text_and_code(model, m):
    labels, logits = m["labels"], model(m["labels"].clamp(0)).logits  # [B, T], [B, T, V]
    text = cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="sum")
    guess = logits[torch.arange(len(labels)), (labels != -100).sum(1) - 1, :2]  # [B, 2], after the last byte
    code, right = cross_entropy(guess, m["code"], reduction="sum"), (guess.argmax(1) == m["code"]).sum()
    return {"text": (text, losses.count_targets(m)), "code": (code, len(guess)), "right": (right, len(guess))}


for first in range(0, 96, 16):
    learner.forward_backward(samples[first : first + 16], text_and_code)
    print({name: round(value.item(), 3) for name, value in learner.optim_step().terms.items()})

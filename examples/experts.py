"""A mixture of experts, balanced within each sequence: exact under every cut. python examples/experts.py"""

import calendar
import inspect

import torch
from torch.nn.functional import cross_entropy
from transformers import MixtralConfig, MixtralForCausalLM

from megabatch import GradientAccumulator, Learner, experts, loss, losses

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = MixtralForCausalLM(MixtralConfig(vocab_size=256, num_key_value_heads=4, output_router_logits=True, **sizes))
learner = Learner(model, torch.optim.AdamW(model.parameters(), lr=4e-3), GradientAccumulator(model, micro_batch_size=4))
texts = [torch.tensor(list(part)) for part in inspect.getsource(calendar).encode().split(b"\n\n") if len(part) < 400]
samples = [{"input_ids": text, "labels": text, "attention_mask": torch.ones_like(text)} for text in texts]


@loss(weigh=lambda m: {"text": losses.count_targets(m), "balance": len(m["labels"])})  # per byte, and per sequence
def text_and_balance(model, m):
    output = model(input_ids=m["input_ids"], attention_mask=m["attention_mask"])
    text = cross_entropy(output.logits[:, :-1].transpose(1, 2), m["labels"][:, 1:], reduction="sum")
    balance = experts.sequence_balance(output.router_logits, m["attention_mask"], top_k=2)
    return {"text": (text, losses.count_targets(m)), "balance": (0.2 * balance, len(m["labels"]))}


for first in range(0, 80, 16):
    learner.forward_backward(samples[first : first + 16], text_and_balance)
    print({name: round(value.item(), 3) for name, value in learner.optim_step().terms.items()})

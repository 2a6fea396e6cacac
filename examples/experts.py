"""A mixture of experts, balanced within each sequence: exact under every cut. python examples/experts.py"""

import calendar
import inspect

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from megabatch import GradientAccumulator, Learner, experts

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = MixtralForCausalLM(MixtralConfig(vocab_size=256, num_key_value_heads=4, **sizes))
learner = Learner(model, torch.optim.AdamW(model.parameters(), lr=4e-3), GradientAccumulator(model, micro_batch_size=4))
texts = [torch.tensor(list(part)) for part in inspect.getsource(calendar).encode().split(b"\n\n") if len(part) < 400]
samples = [{"input_ids": text, "labels": text, "attention_mask": torch.ones_like(text)} for text in texts]
text_and_balance = experts.next_token_with_balance(0.1)  # per byte, and per sequence

for first in range(0, 80, 16):
    learner.forward_backward(samples[first : first + 16], text_and_balance)
    print({name: round(value.item(), 3) for name, value in learner.optim_step().terms.items()})

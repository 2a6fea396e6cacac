"""The loop: the batch you want, its exact gradient, a step. python examples/loop.py"""

import calendar
import inspect

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import GradientAccumulator, UpdateSampler, losses

torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
texts = [torch.tensor(list(part.encode())) for part in inspect.getsource(calendar).split("\n\n")]
samples = [{"input_ids": text, "labels": text} for text in texts if len(text) > 20]  # of any length

sampler = UpdateSampler([len(sample["labels"]) for sample in samples], global_batch_size=16)  # the batch you want
loader = DataLoader(samples, batch_sampler=sampler, collate_fn=list)
gradient = GradientAccumulator(model, max_microbatch_tokens=2048)  # what your hardware takes at once
for _ in range(2):
    for batch in loader:
        gradient.forward_backward(batch, losses.next_token)
        update = gradient.finalize(max_norm=1.0)
        if update.finite:
            optimizer.step()
        print(f"loss {update.loss:.3f}  {update.num_samples} samples in {update.num_microbatches} microbatches")

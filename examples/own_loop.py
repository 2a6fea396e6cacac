"""The loop over microbatches is yours, the reduction and the division are not. python examples/own_loop.py"""

import calendar
import inspect

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import GradientAccumulator, losses

torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
texts = [torch.tensor(list(part.encode())) for part in inspect.getsource(calendar).split("\n\n") if len(part) > 20]
batch = [{"input_ids": text, "labels": text} for text in texts[:16]]
gradient = GradientAccumulator(model, max_microbatch_tokens=2048)
for _ in range(10):
    hardest = 0.0
    for microbatch in gradient.microbatches(batch, losses.count_targets):  # counted beforehand, over all ranks
        logits, targets = model(microbatch["input_ids"]).logits[:, :-1], microbatch["labels"][:, 1:]
        each = cross_entropy(logits.transpose(1, 2), targets, reduction="none")  # [B, T]
        hardest = max(hardest, each.max().item())  # whatever a loss function has no place for
        gradient.backward(each.sum())  # once in the body
    update = gradient.finalize(max_norm=1.0)
    if update.finite:
        optimizer.step()
    print(f"loss {update.loss:.3f}  hardest byte {hardest:.1f}  in {update.num_microbatches} microbatches")

"""A loss of your own sums and counts; here every sample counts the same, however long. python examples/own_loss.py"""

import calendar
import inspect

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megabatch

torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
texts = [torch.tensor(list(part.encode())) for part in inspect.getsource(calendar).split("\n\n") if len(part) > 20]
batch = [{"input_ids": text, "labels": text} for text in texts[:16]]


@megabatch.loss(weigh=lambda microbatch: len(microbatch["labels"]))  # the weight it will return, counted beforehand
def every_sample_the_same(model, microbatch):
    logits, targets = model(microbatch["input_ids"]).logits[:, :-1], microbatch["labels"][:, 1:]  # [B, T, V], [B, T]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")  # [B, T]
    return (losses.sum(1) / (targets != -100).sum(1)).sum(), len(targets)  # never a mean over the microbatch


print(megabatch.verify(model, every_sample_the_same, batch[-4:]))  # cut against uncut, on your model and loss
learner = megabatch.Learner(model, optimizer, megabatch.GradientAccumulator(model, max_microbatch_tokens=2048))
for _ in range(10):
    learner.forward_backward(batch, every_sample_the_same)
    print(f"loss {learner.optim_step().loss:.3f}")

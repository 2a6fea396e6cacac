"""A batching of your own: every microbatch is a multiple of 8 tokens wide. python examples/batching.py"""

import calendar
import inspect

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import GradientAccumulator, losses
from megabatch.batching import pad_right


def pad_to_eights(samples):
    microbatch = pad_right(samples)
    missing, fills = -microbatch["input_ids"].shape[1] % 8, {"input_ids": 0, "labels": -100}
    return {name: torch.nn.functional.pad(value, (0, missing), value=fills[name]) for name, value in microbatch.items()}


def loss_and_width(model, microbatch):
    widths.append(microbatch["input_ids"].shape[1])
    return losses.next_token(model, microbatch)


texts = [torch.tensor(list(part.encode())) for part in inspect.getsource(calendar).split("\n\n") if len(part) > 20]
samples, widths = [{"input_ids": text, "labels": text} for text in texts[:16]], []
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2))
gradient = GradientAccumulator(model, micro_batch_size=4, collate=pad_to_eights)
gradient.forward_backward(samples, loss_and_width)
print(gradient.finalize(), f"widths {widths}", sep="\n")

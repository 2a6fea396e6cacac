"""A planner of your own: one sample of each source in a microbatch. python examples/planner.py"""

import calendar
import inspect
import json.decoder
from itertools import zip_longest

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import GradientAccumulator, Planner, losses

SOURCES = [calendar, json.decoder]


class OneOfEachSource(Planner):
    def cut(self, lengths, samples):
        of_sources = [[row for row in range(len(samples)) if samples[row]["source"] == number] for number in (0, 1)]
        return [[row for row in rows if row is not None] for rows in zip_longest(*of_sources)]


samples = []
for number, module in enumerate(SOURCES):
    for part in inspect.getsource(module).split("\n\n")[:12]:
        text = torch.tensor(list(part.encode()))
        samples.append({"input_ids": text, "labels": text, "source": torch.tensor(number)})
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2))
gradient = GradientAccumulator(model, planner=OneOfEachSource())
gradient.forward_backward(samples, losses.next_token)
print(gradient.finalize(), gradient.last_plan.microbatches, sep="\n")

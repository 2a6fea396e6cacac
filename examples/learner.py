"""Two verbs for all of training; what was saved goes on as if never stopped. python examples/learner.py"""

import calendar
import copy
import inspect

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import GradientAccumulator, Learner, losses

texts = [torch.tensor(list(part.encode())) for part in inspect.getsource(calendar).split("\n\n") if len(part) > 20]
samples = [{"input_ids": text, "labels": text} for text in texts]
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
learner = Learner(model, torch.optim.AdamW(model.parameters(), lr=4e-3), GradientAccumulator(model, micro_batch_size=4))


def train(until):
    for first in range(16 * learner.step, 16 * until, 16):
        learner.forward_backward(samples[first : first + 6], losses.next_token)  # as often as data comes
        learner.forward_backward(samples[first + 6 : first + 16], losses.next_token)
        print(f"update {learner.step}  loss {learner.optim_step().loss:.9f}")


train(until=3)
saved = copy.deepcopy(learner.state_dict())  # or torch.save, or torch.distributed.checkpoint: model, optimizer, step
train(until=6)
learner.load_state_dict(saved)
train(until=6)  # the same three losses

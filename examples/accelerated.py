"""A loop of Accelerate's with exact updates; or run by accelerate launch. python examples/accelerated.py"""

import calendar
import inspect

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import UpdateSampler, losses
from megabatch.integrations.accelerate import learner

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)  # in updates, however many processes
texts = [torch.tensor(list(part.encode())) for part in inspect.getsource(calendar).split("\n\n") if len(part) > 20]
samples = [{"input_ids": text, "labels": text} for text in texts]
sampler = UpdateSampler([len(text) for text in texts], global_batch_size=16)  # each process its share
loader = DataLoader(samples, batch_sampler=sampler, collate_fn=list)  # not prepared: the sampler deals
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
exact = learner(accelerator, model, optimizer, scheduler=schedule, max_norm=1.0, max_microbatch_tokens=4096)
for _ in range(2):
    for batch in loader:
        exact.forward_backward(batch, losses.next_token)
        accelerator.print(f"loss {exact.optim_step().loss:.3f}  lr {schedule.get_last_lr()[0]:.5f}")

"""The loop with FSDP2: the same losses. torchrun --nproc-per-node 2 examples/fsdp2.py"""

import calendar
import inspect
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import GradientAccumulator, Learner, UpdateSampler, losses

dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
for module in [*model.model.layers, model]:  # a layer at a time is whole
    fully_shard(module)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
texts = [torch.tensor(list(part.encode())) for part in inspect.getsource(calendar).split("\n\n") if len(part) > 20]
sampler = UpdateSampler([len(text) for text in texts], global_batch_size=16)  # each rank its share
learner = Learner(model, optimizer, GradientAccumulator(model, max_microbatch_tokens=2048), max_norm=1.0)
for batch in DataLoader([{"input_ids": t, "labels": t} for t in texts], batch_sampler=sampler, collate_fn=list):
    learner.forward_backward(batch, losses.next_token)
    update = learner.optim_step()
    if rank == 0:
        print(f"loss {update.loss:.3f}  {update.num_samples} samples on {num_ranks} ranks")
time.sleep(0.1)  # a thread of gloo that holds the last all-reduce aborts a process that ends before it
dist.destroy_process_group()

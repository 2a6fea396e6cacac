"""The loop with DDP: the same losses. torchrun --nproc-per-node 2 examples/ddp.py"""

import calendar
import inspect
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import GradientAccumulator, UpdateSampler, losses

dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = DistributedDataParallel(LlamaForCausalLM(config))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
texts = [torch.tensor(list(part.encode())) for part in inspect.getsource(calendar).split("\n\n") if len(part) > 20]
sampler = UpdateSampler([len(text) for text in texts], global_batch_size=16)  # each rank its share
gradient = GradientAccumulator(model, max_microbatch_tokens=2048)
for batch in DataLoader([{"input_ids": t, "labels": t} for t in texts], batch_sampler=sampler, collate_fn=list):
    gradient.forward_backward(batch, losses.next_token)
    update = gradient.finalize(max_norm=1.0)
    if update.finite:
        optimizer.step()
    if rank == 0:
        print(f"loss {update.loss:.3f}  {update.num_samples} samples on {num_ranks} ranks")
time.sleep(0.1)  # a thread of gloo that holds the last all-reduce aborts a process that ends before it
dist.destroy_process_group()

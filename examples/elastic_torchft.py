"""The loop on replicas that may be killed and come back: the same losses. See docs/elastic.md.

torchft_lighthouse --min_replicas 1 --heartbeat_timeout_ms 1000
TORCHFT_LIGHTHOUSE=http://localhost:29510 torchrun --nproc-per-node 1 --master-port 29601 examples/elastic_torchft.py
TORCHFT_LIGHTHOUSE=http://localhost:29510 torchrun --nproc-per-node 1 --master-port 29602 examples/elastic_torchft.py
"""

import calendar
import inspect
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchft import Manager, ProcessGroupGloo
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import GradientAccumulator, MegabatchError, UpdateSampler, losses
from megabatch.integrations.torchft import Replicas

num_updates = int(sys.argv[1]) if len(sys.argv) > 1 else 14
torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
dist.init_process_group("gloo")  # the ranks of this replica
if dist.get_world_size() > 1:
    for module in [*model.model.layers, model]:
        fully_shard(module)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
texts = [torch.tensor(list(part.encode())) for part in inspect.getsource(calendar).split("\n\n") if len(part) > 20]
samples = [{"input_ids": text, "labels": text} for text in texts]
sampler = UpdateSampler([len(text) for text in texts], global_batch_size=16, dp_rank=0, dp_degree=1)

group = ProcessGroupGloo(timeout=timedelta(seconds=30))
if dist.get_rank() > 0:  # rank 0 says where its manager listens
    dist.barrier()
manager = Manager(group, None, None, min_replica_size=1, use_async_quorum=False, timeout=timedelta(seconds=30))
if dist.get_rank() == 0:
    dist.barrier()
replicas = Replicas(manager, group, sampler, optimizer)
gradient = GradientAccumulator(model, max_microbatch_tokens=2048, extensions=[replicas])
status = 0
try:
    for update in replicas.updates(
        gradient, lambda ids: [samples[each] for each in ids], losses.next_token, num_updates=num_updates, max_norm=1.0
    ):
        if update.finite:
            optimizer.step()
        if dist.get_rank() == 0:
            loss, number = float(update.loss), manager.current_step()
            print(f"update {number}  loss {loss:.3f}  {update.num_samples} samples on {replicas.num_replicas} replicas")
except MegabatchError as error:  # the Lighthouse is gone, say
    print(f"elastic_torchft: {error}", file=sys.stderr)
    status = 1
sys.stdout.flush()
os._exit(status)  # the threads of the manager would hold the process

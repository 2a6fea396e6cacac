"""Dtypes of gradients that cannot be."""

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.unit.failures.pipeline import pipeline
from tests.unit.failures.table import SAMPLES, Failure, accumulator, linear, squares
from tests.unit.failures.wrappers import fsdp1, mesh

HALF = {"accumulate_dtype": torch.float32}
OF_FLOAT16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)


def hooked_ddp() -> nn.Module:
    model = DistributedDataParallel(bfloat16())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return model


def bfloat16() -> nn.Module:
    return linear().bfloat16()


def half_total() -> None:
    accumulator().forward_backward(SAMPLES, lambda model, batch: (squares(model, batch)[0].half(), 1))


FAILURES = {
    "accumulate in float16": Failure(
        "accumulate_dtype is torch.float16", lambda: accumulator(bfloat16(), accumulate_dtype=torch.float16)
    ),
    "parameters in float16": Failure("'weight' … torch.float16", lambda: accumulator(linear().half())),
    "a total in float16": Failure("'loss' … torch.float16", half_total),
}
IN_A_GROUP = {
    "wider than DDP with a static graph": Failure(
        "accumulate_dtype … torch.float32 … DDP … static_graph=True",
        lambda: accumulator(DistributedDataParallel(bfloat16(), static_graph=True), **HALF),
    ),
    "wider than DDP with a hook": Failure(
        "accumulate_dtype … torch.float32 … DDP … hook", lambda: accumulator(hooked_ddp(), **HALF)
    ),
    "FSDP2 that computes in float16": Failure(
        "FSDP2 … param_dtype … torch.float16",
        lambda: accumulator(fully_shard(linear(), mesh=mesh("dp"), mp_policy=OF_FLOAT16)),
    ),
    "wider than FSDP1": Failure(
        "accumulate_dtype … torch.float32 … FSDP1", lambda: accumulator(fsdp1(bfloat16()), **HALF)
    ),
    "wider than FSDP2 reduces": Failure(
        "accumulate_dtype … torch.float32 … FSDP2 … torch.bfloat16",
        lambda: accumulator(fully_shard(bfloat16(), mesh=mesh("dp")), **HALF),
    ),
    "FSDP2 in float16": Failure(
        "FSDP2 … reduce_dtype … torch.float16",
        lambda: accumulator(
            fully_shard(bfloat16(), mesh=mesh("dp"), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
        ),
    ),
    "FSDP1 in float16": Failure(
        "FSDP1 … MixedPrecision … torch.float16",
        lambda: accumulator(fsdp1(bfloat16(), mixed_precision=MixedPrecision(reduce_dtype=torch.float16))),
    ),
    "wider than a pipeline": Failure(
        "accumulate_dtype … torch.float32", lambda: accumulator(pipeline(bfloat16()), **HALF)
    ),
}

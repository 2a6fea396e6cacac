"""Real updates of small Llamas on the CPU, measured, and the same ones simulated."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import GradientAccumulator, losses
from megabatch.batching.context_parallel import stretch
from megabatch.simulate import QUANTIZED_OPTIMIZERS, QuantizedAdam, Replica, Simulated, simulate
from megabatch.simulate.ledger import Ledger, tagging_shards
from megabatch.train.model.build import checkpoint_activations
from megabatch.train.parallel.tensor_parallel import spread
from megabatch.train.parallel.wrap import attend_over, reduced_mesh
from megabatch.train.plan.simulation import AttentionCost

SIZES = {  # hidden, layers, heads, vocabulary
    "toy": (64, 2, 2, 256),
    "flat": (768, 2, 12, 8_000),  # 26M parameters in few operations
    "wide": (64, 1, 2, 8_192),  # whose head sums its cross-entropy
    "25m": (512, 4, 8, 12_000),
    "100m": (1024, 4, 16, 24_000),
}
AXES = {"plain": {}, "ddp": {"dp": 2}, "fsdp2": {"dp_shard": 2}, "offload": {"dp_shard": 2},
        "hsdp": {"dp_replicate": 2, "dp_shard": 2},
        "cp": {"dp_shard": 1, "cp": 2}, "tp": {"dp_shard": 1, "tp": 2}}  # fmt: skip
MAX_NORM = 1.0
# glibc gives back what is freed, so that what is resident is what is allocated.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Run:
    """One update: the model, its wrapper, what is cut, and what moves it."""

    size: str = "25m"
    wrapper: str = "plain"
    rows: int = 4  # of a microbatch
    tokens: int = 128
    microbatches: int = 1
    sync: str = "last"
    optimizer: str = "adamw-foreach"
    precision: str = "float32"  # or "bfloat16", or "mixed": FSDP2 computes in bfloat16 and reduces in float32
    recompute: str = "no"  # or "yes", or "selective"

    def __str__(self) -> str:
        return ":".join(str(getattr(self, field.name)) for field in fields(self))

    @classmethod
    def parse(cls, name: str) -> "Run":
        parts = zip(fields(cls), name.split(":"), strict=True)
        return cls(**{field.name: int(part) if field.type is int else part for field, part in parts})

    @property
    def axes(self) -> dict[str, int]:
        return AXES[self.wrapper]

    @property
    def world(self) -> int:
        return 4 if self.wrapper == "hsdp" else 2 if self.axes else 1

    @property
    def steady_after(self) -> int:
        """Updates: the first makes the optimizer's states; in the second DDP makes its buckets anew."""
        return 2 if self.wrapper == "ddp" else 1


def llama(run: Run) -> nn.Module:
    """On the default device."""
    hidden, layers, heads, vocabulary = SIZES[run.size]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_hidden_layers=layers, num_attention_heads=heads,
        vocab_size=vocabulary, tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if run.precision == "bfloat16":
        model = model.bfloat16()
    if run.recompute != "no":
        checkpoint_activations(model, selective=run.recompute == "selective")
    return model.train()


def wrapped(model: nn.Module, run: Run, mesh: DeviceMesh | None, ddp: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The model in its wrapper."""
    if run.wrapper == "ddp":
        return ddp(model)
    if run.wrapper == "cp":
        assert mesh is not None
        # The bias of the trainer's own attention is a tensor that a ledger cannot watch.
        attend_over(model, AttentionCost(mesh.get_group("cp")))
        mesh = reduced_mesh(mesh)
    if run.wrapper == "tp":
        assert mesh is not None
        spread(model, mesh["tp"], sequence_parallel=True, loss_parallel=False)
        mesh = mesh["dp_shard"]
    if run.wrapper in ("fsdp2", "offload", "hsdp", "cp", "tp"):
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = mixed if run.precision == "mixed" else MixedPrecisionPolicy()
        offload = CPUOffloadPolicy(pin_memory=False) if run.wrapper == "offload" else OffloadPolicy()
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    return model


def optimizer_of(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    if run.optimizer in QUANTIZED_OPTIMIZERS:
        return QuantizedAdam(model.parameters(), run.optimizer)
    kind, way = run.optimizer.split("-")
    options: dict[str, Any] = {"lr": 1e-4, "foreach": way == "foreach", "fused": way == "fused"}
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=0.0, **options)
    return torch.optim.AdamW(model.parameters(), **options)


def batch_of(run: Run, microbatches: int) -> dict[str, Tensor]:
    ids = torch.zeros(run.rows * microbatches, run.tokens, dtype=torch.long)  # [B, T]
    return {"input_ids": ids, "labels": ids}


def predicted(run: Run, **options: Any) -> Simulated:
    """The simulation of a run."""

    def make_model(mesh: DeviceMesh | None) -> nn.Module:
        with torch.device("meta"):
            model = llama(run)
        return wrapped(model, run, mesh, Replica)

    part = stretch(batch_of(run, 1), 0, 2) if run.wrapper == "cp" else None  # a stretch reads the values of a batch

    def microbatch() -> dict[str, Tensor]:  # made where tensors are fake
        if part is None:
            return batch_of(run, 1)
        return type(part)({name: torch.zeros_like(value) for name, value in part.items()})

    return simulate(
        make_model, lambda model: optimizer_of(model, run), microbatch, losses.next_token,
        **{
            "axes": run.axes, "num_microbatches": run.microbatches, "sync": run.sync, "max_norm": MAX_NORM,
            "device": "cpu",
        } | options,
    )  # fmt: skip


class Real:
    """A run with its memory."""

    def __init__(self, run: Run) -> None:
        names = tuple(run.axes)
        mesh = init_device_mesh("cpu", tuple(run.axes.values()), mesh_dim_names=names) if names else None
        torch.manual_seed(0)
        self.model = wrapped(llama(run), run, mesh, DistributedDataParallel)
        self.optimizer = optimizer_of(self.model, run)
        self.gradient = GradientAccumulator(self.model, micro_batch_size=run.rows, sync=run.sync, mesh=mesh)
        self.batch = batch_of(run, run.microbatches)

    def update(self) -> None:
        self.gradient.forward_backward(self.batch, losses.next_token)
        assert self.gradient.finalize(max_norm=MAX_NORM).finite
        self.optimizer.step()


def measured(name: str) -> dict[str, Any]:
    """The job of a run: the high-water mark of resident memory in one update, above what was there before."""
    run = Run.parse(name)
    Real(replace(run, size="toy", rows=1, tokens=8, microbatches=2)).update()  # loads what code and libraries need
    before = memory_bytes("VmRSS")
    real = Real(run)
    for _ in range(run.steady_after):
        real.update()
    Path("/proc/self/clear_refs").write_text("5")
    real.update()
    high = memory_bytes("VmHWM")
    return {"before_bytes": before, "high_bytes": high, "peak_bytes": high - before}


def counted(name: str) -> dict[str, Any]:
    """The job of a run: what the ledger counts of it, on real tensors."""
    run = Run.parse(name)
    on_host = ("parameters", "gradients", "optimizer states") if run.wrapper == "offload" else ()
    with Ledger(axes=run.axes, on_host=on_host) as ledger, tagging_shards(ledger):
        real = Real(run)
        ledger.tag(real.model.parameters(), "parameters")
        for _ in range(run.steady_after):
            real.update()
        seen, on_host = [], []
        for _ in range(3):  # a thread of gloo may hold what it has sent a moment longer: the least is what is needed
            ledger.begin()
            ledger.enter_phase("update", "activations")
            real.update()
            ledger.enter_phase("after", "activations")
            seen.append(ledger.log.phases["update"])
            on_host.append(ledger.log.host_peak_bytes)
    sent = seen[0].sent
    return {
        "peak_bytes": min(phase.peak_bytes for phase in seen),
        "host_bytes": min(on_host),
        "sent": {f"{kind}:{axis}": [each.calls, each.buffer_bytes, each.sent_bytes]
                 for (kind, axis, _), each in sent.items()},
    }  # fmt: skip


def job(name: str) -> dict[str, Any]:
    """The job "measured/..." or "counted/..."; its process is thrown away, so that each begins with the same memory."""
    kind, _, run = name.partition("/")
    return {"measured": measured, "counted": counted}[kind](run)


def memory_bytes(key: str) -> int:
    """A line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


@contextlib.contextmanager
def honest_malloc() -> Iterator[None]:
    """Let processes that start inside give back the memory that they free."""
    before = {key: os.environ.get(key) for key in MALLOC}
    os.environ.update(MALLOC)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)

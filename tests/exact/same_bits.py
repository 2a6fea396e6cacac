"""Runs of some updates with ``same_bits=True``, and the hash of all that they leave: jobs for `test_same_bits`."""

import hashlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import megabatch
from megabatch import GradientAccumulator, UpdateSampler, losses
from megabatch.planners import Rows, SameBits, Tokens

MODELS = ("gpt2", "llama", "conv")
DTYPES = ("float32", "bfloat16")
LIMITS: dict[str, dict[str, int]] = {"tokens": {"max_microbatch_tokens": 64}, "count": {"micro_batch_size": 2}}
PLANNERS = {"tokens": Tokens(64), "count": Rows(2)}
WORLDS = {"plain": (1, 2, 3, 4), "ddp": (1, 2, 3, 4), "fsdp2": (1, 2, 3, 4), "hsdp": (4,)}
SYNCS = {"plain": ("last",), "ddp": ("last", "every"), "fsdp2": ("last", "every"), "hsdp": ("last", "every")}
GLOBAL_BATCH_SIZE = 7  # of 38 samples: the last update of an epoch has three, fewer than ranks
NUM_SAMPLES = 38
MAX_NORM, SMALLER_MAX_NORM = 0.2, {"late": 0.15}  # below every norm of these runs


class ConvNet(nn.Module):
    """Three channels in, ten classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 5, 3, stride=2), nn.ReLU()
        )
        self.head = nn.Linear(5 * 3 * 3, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.body(pixels).flatten(1))


class Branched(nn.Module):
    """A layer that only some samples use, one that none uses, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.rare, self.unused, self.frozen = nn.Linear(5, 7), nn.Linear(5, 7), nn.Linear(5, 7)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, *, rare: bool) -> Tensor:
        hidden = self.first(x) + self.frozen(x)
        return self.second(torch.relu(hidden + self.rare(x) if rare else hidden))


def new_model(name: str) -> nn.Module:
    """Sizes that neither two nor three nor four ranks divide."""
    torch.manual_seed(0)
    if name == "gpt2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=53, n_positions=32, n_embd=30, n_layer=2, n_head=3, **dropout))
    if name == "llama":
        sizes = {"hidden_size": 28, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=53, max_position_embeddings=32, **sizes))
    return ConvNet() if name == "conv" else Branched()


def samples_of(name: str) -> list[dict[str, Tensor]]:
    """Samples, ragged but for the images, with many ties in length."""
    made = torch.Generator().manual_seed(1)
    if name == "conv":
        classes = torch.randint(0, 10, (NUM_SAMPLES,), generator=made)
        return [{"pixels": torch.randn(3, 8, 8, generator=made), "label": each} for each in classes]
    lengths: list[int] = torch.randint(2, 25, (NUM_SAMPLES,), generator=made).tolist()
    if name == "branched":
        return [{"x": torch.randn(length, 5, generator=made)} for length in lengths]
    ids = [torch.randint(0, 53, (length,), generator=made) for length in lengths]
    return [{"input_ids": each, "labels": each} for each in ids]


def of_dtype(model: nn.Module, values: Tensor) -> Tensor:
    return values.to(next(model.parameters()).dtype)


@megabatch.loss(weigh=lambda microbatch: float(len(microbatch["label"])))
def classify(model: nn.Module, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = model(of_dtype(model, microbatch["pixels"]))
    return nn.functional.cross_entropy(logits.float(), microbatch["label"], reduction="sum"), len(logits)


def late(model: nn.Module, microbatch: dict[str, Tensor]) -> dict[str, Any]:
    """The weight, a broken number, is known after the forward; a metric comes with it."""
    x = of_dtype(model, microbatch["x"])  # [B, T, 5]
    outputs = model(x, rare=x.shape[1] > 20)
    return {
        "loss": (outputs.square().sum(), 0.1 * x.shape[1]),
        "metric": (outputs.detach().abs().sum(), outputs.numel()),
    }


@megabatch.loss(weigh=lambda microbatch: {"square": 0.1 * len(microbatch["x"]), "first": 7 * len(microbatch["x"])})
def several(model: nn.Module, microbatch: dict[str, Tensor]) -> dict[str, Any]:
    x = of_dtype(model, microbatch["x"])
    outputs = model(x, rare=x.shape[1] > 20)
    return {"square": (outputs.square().sum(), 0.1 * len(x)), "first": (outputs[..., 0].sum(), 7 * len(x))}


LOSSES: dict[str, Any] = {
    "gpt2": losses.next_token, "llama": losses.next_token, "conv": classify, "late": late, "several": several,
}  # fmt: skip


def wrap(model: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if wrapper == "plain":
        return model
    world = dist.get_world_size()
    axes = {"dp_replicate": 2, "dp_shard": 2} if wrapper == "hsdp" else {"dp": world}
    mesh: DeviceMesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    for part in [*(part for each in model.modules() if isinstance(each, nn.ModuleList) for part in each), model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest(tensors: Iterator[Tensor]) -> str:
    """Hash the bits."""
    found = hashlib.sha256()
    for each in tensors:
        found.update(each.detach().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def run_job(name: str) -> dict[str, Any]:
    """The job "loss:dtype:wrapper:limit:sync:updates:world:": what the run leaves, in a few hashes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about gloo and about one rank
        loss, dtype, wrapper, limit, sync, num_updates, *_ = name.split(":")
        kind = loss if loss in MODELS else "branched"
        samples = samples_of(kind)
        model = wrap(new_model(kind).to(getattr(torch, dtype)), wrapper)
        gradient = GradientAccumulator(model, sync=sync, planner=SameBits(PLANNERS[limit]))
        sampler = UpdateSampler(
            [len(next(iter(each.values()))) for each in samples], global_batch_size=GLOBAL_BATCH_SIZE, same_bits=True,
            **LIMITS[limit],
        )  # fmt: skip
        return train(model, gradient, sampler, samples, loss, int(num_updates))


def train(
    model: nn.Module, gradient: GradientAccumulator, sampler: UpdateSampler, samples: list[dict[str, Tensor]],
    loss: str, num_updates: int,
) -> dict[str, Any]:  # fmt: skip
    """Run the updates."""
    max_norm = SMALLER_MAX_NORM.get(loss, MAX_NORM)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    shares = itertools.chain.from_iterable(iter(lambda: list(sampler), None))
    reports, num_empty, num_clipped = [], 0, 0
    for share in itertools.islice(shares, num_updates):
        gradient.forward_backward([samples[each] for each in share], LOSSES[loss])
        update = gradient.finalize(max_norm=max_norm)
        assert update.grad_norm is not None
        assert bool(update.finite)
        optimizer.step()
        num_empty += not share
        num_clipped += bool(update.grad_norm > max_norm)
        reports += [update.loss, update.weight, update.grad_norm, *update.terms.values()]
    weights = digest(whole(each) for each in model.parameters())
    return {"weights": weights, "reports": digest(iter(reports)), "clipped": num_clipped, "empty": num_empty}

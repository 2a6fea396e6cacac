"""Models, samples and the oracle of the sections. The oracle is plain torch and imports nothing from megabatch."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface, GPT2Config, GPT2LMHeadModel

from benchmarks import llama as llamas
from benchmarks.llama import Shape

IGNORED = -100
MAX_TOKENS = 4096
SMALL = Shape(384, 64, 192, 2, 4, 2)  # flex attention needs heads of 16 at least
SHAPES = {
    "0.1B": Shape(32_000, 768, 2048, 12, 12, 12),
    "0.6B": Shape(32_000, 1536, 4096, 18, 16, 8),
    "1.2B": Shape(128_256, 2048, 8192, 16, 32, 8, tied=True),  # Llama 3.2 1B
}
Sample = dict[str, Tensor]
Gradients = dict[str, Tensor]


def shape_of(name: str, *, small: bool) -> Shape:
    return SMALL if small else SHAPES[name]


def llama(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    small: bool,
    recompute: bool = False,
    attention: str = "sdpa",
) -> Any:
    """Return a Llama with fresh weights, the same each time."""
    model: Any = llamas.llama(shape_of(name, small=small), MAX_TOKENS, dtype, device)
    model.set_attn_implementation(attention)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def register_varlen_attention() -> None:
    """Give transformers torch's attention over sequences that lie in one row, under the name "varlen"."""
    AttentionInterface.register("varlen", _varlen_attention)
    AttentionMaskInterface.register("varlen", lambda *_, **__: None)


def _varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence of the rows: query [B, H, S, D], key and value with fewer heads."""
    from torch.nn.attention.varlen import varlen_attn

    if "cu_seq_lens_q" in more:
        ends, longest = more["cu_seq_lens_q"], more["max_length_q"]
    else:
        positions = more["position_ids"].expand(len(query), -1).flatten()  # [B * S]
        ends = F.pad((positions == 0).nonzero().flatten(), (0, 1), value=len(positions)).to(torch.int32)
        longest = int(ends.diff().max())
    groups = query.shape[1] // key.shape[1]
    key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
    rows = [heads.transpose(1, 2).flatten(0, 1).contiguous() for heads in (query, key, value)]  # [B * S, H, D]
    output = varlen_attn(*rows, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0))
    return output.unflatten(0, (len(query), -1)), None


def gpt2(dtype: torch.dtype, device: torch.device) -> Any:
    """Return a GPT-2, all of which computes in its dtype. Llama's RMSNorm computes in float32."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=96, n_positions=256, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(device, dtype).train()


def texts(count: int, *, vocabulary: int = 96, seed: int = 0) -> list[Sample]:
    """Return samples of 4 to 160 tokens, most of them short. Every third has no target in its first half."""
    generator = torch.Generator().manual_seed(seed)
    samples: list[Sample] = []
    for index in range(count):
        length = 4 + int(156 * torch.rand((), generator=generator).item() ** 2)
        ids = torch.randint(vocabulary, (length,), generator=generator)  # [T]
        labels = ids.clone()
        if index % 3 == 0:
            labels[: length // 2] = IGNORED
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def gsm8k_lengths(count: int, seed: int) -> list[int]:
    """Return lengths like those of GSM8K in Llama's tokens: log-normal, median 165, 48 to 600."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.exp(0.42 * torch.randn(count, generator=generator) + math.log(165))
    return [int(length) for length in lengths.clamp(48, 600)]


def long_tailed_lengths(count: int, seed: int) -> list[int]:
    """Return lengths of rollouts: log-normal, median 300, a tenth of them above 950, 32 to 4,000."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.exp(0.9 * torch.randn(count, generator=generator) + math.log(300))
    return [int(length) for length in lengths.clamp(32, 4000)]


LENGTHS = {"GSM8K": gsm8k_lengths, "long tail": long_tailed_lengths}


def updates_of(data: str, size: int, count: int, *, vocabulary: int, small: bool) -> list[list[Sample]]:
    """Return updates of random tokens. All tokens but the first of a sample are targets."""
    generator = torch.Generator().manual_seed(1)
    shrink = 12 if small else 1
    updates: list[list[Sample]] = []
    for number in range(count):
        lengths = [max(4, length // shrink) for length in LENGTHS[data](size, seed=number)]
        rows = [torch.randint(1, vocabulary, (length,), generator=generator) for length in lengths]
        updates.append([{"input_ids": ids, "labels": ids} for ids in rows])
    return updates


def num_targets(samples: Sequence[Sample]) -> int:
    return sum(int((sample["labels"][1:] != IGNORED).sum()) for sample in samples)


def num_tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample["input_ids"]) for sample in samples)


def padded(samples: Sequence[Sample], *, mask: bool = True) -> Sample:
    """Pad on the right, as transformers' collators do."""
    ids = [torch.as_tensor(sample["input_ids"]) for sample in samples]
    labels = [torch.as_tensor(sample["labels"]) for sample in samples]
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True),  # [B, T]
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }
    if mask:
        batch["attention_mask"] = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    return batch


def moved(batch: Sample, device: torch.device) -> Sample:
    """Copy a batch to the device, as a loop at its best does: from pinned memory, without a wait."""
    if device.type != "cuda":
        return batch
    return {key: value.pin_memory().to(device, non_blocking=True) for key, value in batch.items()}


def sum_of_losses(model: nn.Module, batch: Sample) -> Tensor:
    """Return the sum of cross-entropies over targets, in float32 at least."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**inputs).logits[:, :-1]  # [B, T - 1, V]
    wide = logits if logits.dtype.itemsize >= 4 else logits.float()
    targets = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(wide.flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum")


def oracle(model: nn.Module, samples: Sequence[Sample]) -> Gradients:
    """Return the gradient of the whole update in one backward of plain torch, in float64 on the CPU."""
    device = next(model.parameters()).device
    model.zero_grad(set_to_none=True)
    total = sum_of_losses(model, moved(padded(samples, mask=False), device))
    (total / num_targets(samples)).backward()
    return gradients(model)


def gradients(model: nn.Module) -> Gradients:
    """Return whole gradients by the names that parameters have without a wrapper, in float64 on the CPU."""
    whole: Gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        whole[name.removeprefix("module.")] = full.detach().double().cpu()
    return whole


def errors(found: Gradients, expected: Gradients) -> dict[str, float]:
    """Return the largest relative error of a parameter's gradient, and that of all as one vector."""
    if found.keys() != expected.keys():
        return {"worst": math.inf, "whole": math.inf}
    apart = {name: float((found[name] - value).norm()) for name, value in expected.items()}
    sizes = {name: float(value.norm()) for name, value in expected.items()}
    worst = max(apart[name] / max(sizes[name], 1e-300) for name in apart)
    return {"worst": worst, "whole": math.hypot(*apart.values()) / math.hypot(*sizes.values())}


def join_one_rank(device: torch.device) -> None:
    """Begin a process group of one rank: NCCL on a GPU, gloo on a CPU."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def wrapped(model: Any, wrapper: str, **options: Any) -> nn.Module:
    """Wrap a model over one rank."""
    if wrapper == "plain":
        return model
    device = next(model.parameters()).device
    join_one_rank(device)
    if wrapper == "ddp":
        return DistributedDataParallel(model, **options)
    shard = partial(fully_shard, mesh=dist.device_mesh.init_device_mesh(device.type, (1,)), **options)
    blocks = model.model.layers if hasattr(model, "model") else model.transformer.h
    for block in blocks:
        shard(block)
    return shard(model)

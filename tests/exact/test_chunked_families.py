"""Every causal family of transformers in chunks: exact, or refused in one line; and kinds of layers x wrappers."""

import functools
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, PlanError, losses
from megabatch.batching import InsideSamples
from megabatch.batching.inside_samples import inner_decoder
from megabatch.verification.float64_copy import Float64WithoutDropout
from tests.exact import padded
from tests.exact.launch import of_ranks
from tests.exact.test_inside_samples import BOUND, LENGTHS, error, gradients, shares, texts, uncut
from tests.tiers import full_unless

LIMITS = (7, 32)
KINDS = [case.split()[1] for case in padded.CASES if case.startswith("CausalLM ")]
QUICK = ("qwen3_next", "mamba2", "falcon_h1", "lfm2", "deepseek_v32", "opt", "mamba", "bart", "rwkv", "minimax")
NOT_BUILT = {
    case.removeprefix("CausalLM ")
    for cases in padded.NOT_BUILT.values()
    for case in cases
    if case.startswith("CausalLM ")
} | {"reformer"}
REFUSED: dict[str, tuple[str, ...]] = {  # by what the error says; all others are exact
    "layers in which tokens read later ones": (
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "gemma3", "git", "marian", "mbart",
        "moss_transcribe_diarize", "pegasus", "plbart", "whisper",
    ),
    "does not keep all that tokens read|has other logits .* LinearAttentionLayer": (
        "falcon_mamba", "jamba", "mamba", "zamba",
    ),
    "does not keep all that tokens read": ("openai-gpt", "recurrent_gemma", "rwkv", "xlm", "xlnet"),
    "does not run in chunks": ("minimax", "mllama", "xlstm"),
    "has layers of DeepseekV4": ("deepseek_v4",),
    "of which a chunk sees a part": ("big_bird", "cpmant", "prophetnet"),
}  # fmt: skip


def make(kind: str) -> nn.Module:
    return padded.make(f"CausalLM {kind}").train()


def run(model: nn.Module, samples: Any, limit: int, **options: Any) -> None:
    gradient = GradientAccumulator(model, max_microbatch_tokens=limit, batching=InsideSamples(), **options)
    gradient.forward_backward(samples, losses.next_token)
    gradient.finalize()


@pytest.mark.slow
@pytest.mark.parametrize("kind", full_unless(KINDS, lambda _, kind: kind in QUICK))
def test_a_family_is_exact_or_refused(kind: str) -> None:
    why = next((why for why, kinds in REFUSED.items() if kind in kinds), None)
    with padded._in_float64():
        if kind in NOT_BUILT:
            pytest.skip("a tiny model cannot be made of its config")
        model = make(kind)
        if why is not None:
            with pytest.raises(PlanError, match=why) as raised:
                run(model, texts(), 8)
            assert "\n" not in str(raised.value)
            return
        expected = uncut(model, texts())
        for limit in LIMITS:
            model.zero_grad()
            run(model, texts(), limit)
            assert error(gradients(model), expected) < BOUND, limit


def test_each_refused_family_is_one_of_transformers() -> None:
    refused = {kind for kinds in REFUSED.values() for kind in kinds}
    assert refused | {*QUICK} <= {*KINDS}
    assert not refused & NOT_BUILT


# Kinds of layers x wrappers x ranks, each in chunks of both sizes.

TABLE = {  # a model of each kind of layers
    "full attention": "llama", "sliding windows": "gemma3_text", "latent, sparse attention": "deepseek_v32",
    "linear attention": "qwen3_next", "state space": "mamba2", "attention and state space": "falcon_h1",
    "convolutions": "lfm2",
}  # fmt: skip
WRAPPERS = (
    "plain:1", "plain:2", "ddp:2", "ddp:3", "fsdp2:1", "fsdp2:2", "fsdp2:3", "gather_once:2", "gather_once:3", "hsdp:2",
)  # fmt: skip
JOBS = [f"{wrapper}:{kind}" for kind in TABLE.values() for wrapper in WRAPPERS]


@functools.cache
def _hsdp(_: Any) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))


def run_job(name: str) -> float:
    """Return the largest error of the gradients of both chunk sizes."""
    wrapper, world, kind = name.split(":")
    samples = texts((*LENGTHS, 5, 70))
    share = shares(int(world), samples)[dist.get_rank()]
    errors: list[float] = []
    with padded._in_float64(), Float64WithoutDropout():
        for limit in LIMITS:
            plain = make(kind)
            expected = uncut(plain, samples)
            model: nn.Module = plain
            if wrapper == "ddp":  # the indexer of sparse attention has no gradient
                model = DistributedDataParallel(plain, find_unused_parameters=kind == "deepseek_v32")
            if wrapper in ("fsdp2", "gather_once", "hsdp"):
                mesh = _hsdp(dist.group.WORLD) if wrapper == "hsdp" else None
                layers = next(part for part in inner_decoder(plain).children() if isinstance(part, nn.ModuleList))
                for layer in layers:
                    fully_shard(layer, mesh=mesh)
                model = fully_shard(plain, mesh=mesh)
            run(model, share, limit, **({"sync": wrapper} if wrapper == "gather_once" else {}))
            found = [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients(plain)]
            errors.append(error(found, expected))
    return max(errors)


found = of_ranks("tests.exact.test_chunked_families:run_job", JOBS)


@pytest.mark.slow
@pytest.mark.parametrize("job", full_unless(JOBS, lambda number, _: number % (len(WRAPPERS) + 3) == 5))
def test_each_wrapper_is_exact(job: str, found: Any) -> None:
    worst = max(found(job))
    print(f"{job} {worst:.1e}")
    assert worst < BOUND

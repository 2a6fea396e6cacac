"""What every rank does in the tests of tensor parallelism: a gradient through megabatch, against plain torch's."""

import contextlib
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from transformers import AutoConfig, AutoModelForCausalLM

from megabatch import GradientAccumulator, losses
from megabatch.train.config.parallel_layout import Layout
from megabatch.train.model.build import build
from megabatch.train.model.tensor_parallel import plain_terms, spread
from megabatch.train.model.wrap import blocks_of
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from tests.exact.oracle import answer, collate, relative_error, whole_error, worst_error
from tests.train.model_recipes import recipe

LENGTHS = ((9, 4, 13, 7), (5, 12, 3, 8, 6))  # of the samples of two calls
VOCABULARY = 61  # which two ranks do not divide
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 0,
    "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "tied": (
        "llama",
        {**SIZES, "tie_word_embeddings": True, "pad_token_id": 4, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("qwen2", SIZES),
    "qwen3": ("qwen3", {**SIZES, "head_dim": 8}),
    "gpt2": ("gpt2", GPT2),
    "dropout": ("gpt2", {**GPT2, "resid_pdrop": 0.2, "embd_pdrop": 0.2}),
}


def new_model(family: str, dtype: torch.dtype) -> nn.Module:
    """The same weights at every call, none at 0 or 1; norms compute in the weights' type."""
    kind, keys = MODELS[family]
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **keys)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(exact_norm, module)
    return model.to(dtype)


def exact_norm(norm: Any, hidden: Tensor) -> Tensor:
    """RMSNorm without transformers' detour over float32."""
    return norm.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))


def samples(call: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(call)
    found = [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS[call]]
    return [{"input_ids": ids, "labels": ids.where(torch.arange(len(ids)) > len(ids) // 3, -100)} for ids in found]


def sums(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The loss in plain torch."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    targets = batch["labels"][:, 1:].flatten()
    return {"loss": (F.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum())}


def wrapped(model: nn.Module, wrapper: str, mesh: DeviceMesh) -> nn.Module:
    wrap = {"fsdp2": fully_shard, "replicate": replicate}.get(wrapper)
    if wrap is not None:
        data = mesh["dp_shard" if wrapper == "fsdp2" else "dp_replicate"]
        for block in blocks_of(model).values():
            wrap(block, mesh=data)
        wrap(model, mesh=data)
    return model


def run_job(name: str) -> Any:
    """The job "kind ..."."""
    kind, _, rest = name.partition(" ")
    return {"gradient": gradient_job, "slope": slope_job, "weights": weights_job}[kind](rest)


def gradient_job(name: str) -> dict[str, Any]:
    """What is wrong with the gradient of "family wrapper stream logits dtype sync"."""
    family, wrapper, sequence, cut, dtype, sync = name.split()
    axes = ("dp_shard" if wrapper == "fsdp2" else "dp_replicate", "tp")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=axes)
    model = new_model(family, getattr(torch, dtype))
    spread(model, mesh["tp"], sequence_parallel=sequence == "sequence", loss_parallel=cut == "cut")
    model = wrapped(model, wrapper, mesh)
    gradient = GradientAccumulator(model, mesh=mesh, micro_batch_size=2, sync=sync)
    rank, degree = mesh.get_local_rank(0), mesh.size(0)
    around = loss_parallel if cut == "cut" else contextlib.nullcontext
    cuts: list[list[list[dict[str, Tensor]]]] = []  # samples of the microbatches of the calls
    torch.manual_seed(11)
    for call in range(len(LENGTHS)):
        with around():
            gradient.forward_backward(samples(call)[rank::degree], plain_terms(losses.next_token))
            cuts.append([[samples(call)[row] for row in rows] for rows in gradient.last_plan.microbatches])
    update = gradient.finalize(max_norm=1e9)
    expected = reference(family, getattr(torch, dtype), [each for cut in cuts for each in cut])
    found = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    error, worst = worst_error(found, expected)
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in expected.values()]))
    return {
        "error": error,
        "parameter": worst,
        "whole": whole_error(found, expected),
        "norm": relative_error(update.grad_norm, norm),
        "placed": all(placed_alike(parameter) for parameter in model.parameters()),
    }


def reference(family: str, dtype: torch.dtype, microbatches: list[list[dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Plain torch's gradient of both calls; with dropout, cut as it was on the one data rank, to draw the same."""
    model = new_model(family, dtype)
    if family != "dropout":
        return answer(model, sums, [*samples(0), *samples(1)]).gradients
    torch.manual_seed(11)
    terms = [sums(model, collate(each))["loss"] for each in microbatches]
    (sum(total for total, _ in terms) / sum(int(weight) for _, weight in terms)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_alike(parameter: Any) -> bool:
    """Whether a gradient lies as its parameter does, so that an optimizer sends nothing."""
    return isinstance(parameter, DTensor) and parameter.grad.placements == parameter.placements


def slope_job(family: str) -> float:
    """By how much the gradient along a direction is not the loss's slope there, by differences; with dropout, which
    ranks must draw alike wherever they hold the same, and lengths that they do not divide."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = new_model(family, torch.float64)
    spread(model, mesh, sequence_parallel=True, loss_parallel=False)
    batches = [collate(samples(call)[:3]) for call in (0, 1)]  # of 13 and 12 tokens
    parameters = list(model.parameters())
    torch.manual_seed(1)  # the same direction on both ranks, of which each holds its part
    directions = [distribute_like(torch.randn(each.shape, dtype=each.dtype), each) for each in parameters]

    def loss_at(distance: float, *, differentiate: bool = False) -> float:
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=distance)
        torch.manual_seed(3)
        loss = sum((sums(model, batch)["loss"][0] for batch in batches), torch.zeros(()))
        if differentiate:
            loss.backward()
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.sub_(direction, alpha=distance)
        return float(loss.detach())

    loss_at(0.0, differentiate=True)
    slope = sum(float((whole(p.grad) * whole(d)).sum()) for p, d in zip(parameters, directions, strict=True))
    measured = (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6
    return abs(slope - measured) / abs(slope)


def distribute_like(tensor: Tensor, parameter: Any) -> Tensor:
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def weights_job(name: str) -> list[str]:
    """Which tensors of "family wrapper dp_replicate dp_shard tp" do not have the bits of the plain model's."""
    family, wrapper, dp_replicate, dp_shard, tp = name.rsplit(maxsplit=4)
    layout = Layout(int(dp_replicate), int(dp_shard), tp=int(tp))
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), layout)
    config = recipe(family=family, wrapper=None if wrapper == "plain" else wrapper)
    parallel = config.parallel.model_copy(update={"tp": layout.tp})
    plain, here = (
        build(each, its, Console(enabled=False, loss_digits=4), 10, None).base
        for each, its in (
            (recipe(family=family), Ranks(0, 1, torch.device("cpu"))),
            (config.model_copy(update={"parallel": parallel}), ranks),
        )
    )
    expected = dict(plain.named_parameters())
    return [name for name, each in here.named_parameters() if not torch.equal(whole(each), expected[name])]

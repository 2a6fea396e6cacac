"""Experts on ranks of their own: updates by the library beside the samples one by one in plain torch, in one process.

Layouts of ranks:

    plain      every rank has all other weights; mesh (dp, ep)
    sharded    FSDP2 over all ranks around them, as transformers and torchtitan lay out their meshes
    hybrid     the same in two replicas

Families are of transformers, with its own dispatch of tokens; "sparse" is `tests.exact.sparse` with one of its own.
"""

import copy
import gc
import math
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from megabatch import GradientAccumulator, JointLoss, Term, loss, losses, verify
from megabatch.inspection.mesh_axes import is_expert
from megabatch.torch_private.dtensors import clear_mesh_caches
from megabatch.verification.float64_copy import Float64WithoutDropout
from tests.comm.counting import Collectives
from tests.exact import experts, families, oracle
from tests.exact.sparse import EXPERTS, TOP_K, WIDTH, Block, SparseLM, sparse_lm
from tests.exact.tiny import tiny
from tests.exact.wrappers import full

CLIP = 0.05
SIZES: dict[str, Any] = {
    "num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 12, "pad_token_id": None,
}  # fmt: skip
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
          "head_dim": 4, "first_k_dense_replace": 1}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "olmoe": {},
    "gpt_oss": {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4},
    "deepseek_v3": LATENT,
}
# What each rank gives to each call of three updates: fewer than others, none, and several calls.
SHARES = (
    (((0,), (1, 2, 3), (4, 5, 6), ()),),
    (((0,), (1, 2, 3), (4, 5, 6), ()), ((2, 3, 4, 5), (), (0, 1), (4,))),
    (((2, 3, 4, 5), (), (0, 1), (4,)),),
)


class Cell(NamedTuple):
    """A row of the table."""

    family: str
    layout: str
    sync: str
    way: str  # how several calls make an update: "calls" or "open"
    dtype: str
    world: int
    degree: int  # ranks along ep

    @property
    def name(self) -> str:
        return ":".join(map(str, self))

    @classmethod
    def parse(cls, name: str) -> "Cell":
        *words, world, degree = name.split(":")
        return cls(*words, int(world), int(degree))


# Models.


class DispatchedBlock(Block):
    """A block of `tests.exact.sparse` whose experts are a DTensor over ``ep``, reached by all-to-alls."""

    group: dist.ProcessGroup

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

        length = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype)
        hidden = hidden + hidden.cumsum(1) / length[:, None]  # [B, T, D]
        logits, weights, chosen = self.router(hidden)
        order = chosen.flatten().argsort(stable=True)
        to_send = hidden.reshape(-1, WIDTH)[order // TOP_K]
        sent = chosen.flatten().bincount(minlength=EXPERTS)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        sizes = [each.view(self.group.size(), -1).sum(1).tolist() for each in (received, sent)]
        rows = wait_tensor(all_to_all_single_autograd(to_send, *sizes, self.group))
        own = self.experts.to_local()
        experts_of_rows = torch.arange(len(own)).repeat(self.group.size()).repeat_interleave(received)
        made = torch.einsum("nd,ndf->nf", rows, own[experts_of_rows]).tanh()
        returned = wait_tensor(all_to_all_single_autograd(made, *sizes[::-1], self.group))
        outputs = torch.empty_like(returned)
        outputs[order] = returned
        mixed = (weights[:, :, None] * outputs.view(-1, TOP_K, WIDTH)).sum(1)
        return hidden + mixed.view_as(hidden), logits


class SummedBlock(Block):
    """The same for ranks that share samples: each runs its experts on all tokens, and the outputs are summed."""

    group: dist.ProcessGroup

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        from transformers.distributed.parallel_utils import _AllReduceBackward, _AllReduceForward

        length = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype)
        hidden = hidden + hidden.cumsum(1) / length[:, None]  # [B, T, D]
        logits, weights, chosen = self.router(hidden)
        inputs, weights = (_AllReduceBackward.apply(each, self.group) for each in (hidden, weights))
        own = self.experts.to_local()
        outputs = torch.einsum("btd,edf->btef", inputs, own).tanh().flatten(0, 1)  # [B * T, E, D]
        kept = torch.zeros_like(logits).scatter(1, chosen, weights).chunk(self.group.size(), 1)[self.group.rank()]
        mixed = _AllReduceForward.apply((kept[:, :, None] * outputs).sum(1), self.group)
        return hidden + mixed.view_as(hidden), logits


def spread(model: SparseLM, mesh: DeviceMesh, kind: type[Any] = DispatchedBlock) -> SparseLM:
    """Give each rank along an axis its experts."""
    for block in model.blocks:
        block.__class__ = kind
        block.group = mesh.get_group()
        block.experts = nn.Parameter(distribute_tensor(block.experts.detach(), mesh, [Shard(0)], src_data_rank=None))
    return model


def shard_sparse(
    model: SparseLM, degree: int, replicas: int = 1, axis: str = "ep", kind: type[Any] = DispatchedBlock
) -> SparseLM:
    """torchtitan's layout: FSDP2 over all ranks, with another mesh for the experts of each block."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    ranks = dist.get_world_size() // replicas
    dense = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp_replicate", "fsdp"))
    mesh = init_device_mesh("cpu", (replicas, ranks // degree, degree), mesh_dim_names=("dp_replicate", "efsdp", axis))
    spread(model, mesh[axis], kind)
    if replicas == 1:
        data, info = dense["fsdp"], FSDPMeshInfo(mesh=mesh["efsdp"], shard_mesh_dim=0)
    else:
        data = dense
        info = HSDPMeshInfo(mesh=mesh["dp_replicate", "efsdp"], shard_mesh_dim=1, replicate_mesh_dim=0)
    for block in model.blocks:
        fully_shard(
            block, mesh=data,
            shard_placement_fn=lambda each, block=block: (
                ShardPlacementResult(Shard(0), info) if each is block.experts else None
            ),
        )  # fmt: skip
    return fully_shard(model, mesh=data)


def reference_of(family: str, dtype: torch.dtype) -> nn.Module:
    """The model in one process, as it is loaded from a folder that all ranks see."""
    if family == "sparse":
        return sparse_lm(dtype=dtype)
    folder = os.path.abspath(family)
    if dist.get_rank() == 0 and not os.path.exists(folder):
        tiny(family, **SIZES | FAMILIES[family]).save_pretrained(folder)
    dist.barrier()
    return _class_of(family).from_pretrained(folder, dtype=dtype).train()


def _class_of(family: str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM


def wrapped(family: str, layout: str, degree: int, reference: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model on all ranks, with the weights of the reference."""
    world, replicas = dist.get_world_size(), 2 if layout == "hybrid" else 1
    if layout == "plain":
        mesh = init_device_mesh("cpu", (world // degree, degree), mesh_dim_names=("dp", "ep"))
        model: Any = copy.deepcopy(reference)
        return spread(model, mesh["ep"]) if family == "sparse" else dispatched(model, mesh["ep"])
    if family == "sparse":
        return shard_sparse(sparse_lm(dtype=dtype), degree, replicas)
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(fsdp_size=world // replicas, dp_replicate_size=replicas, ep_size=degree)
    folder = os.path.abspath(family)
    return _class_of(family).from_pretrained(folder, dtype=dtype, distributed_config=config).train()


def dispatched(model: Any, mesh: DeviceMesh, exchange: str = "auto", sharing: DeviceMesh | None = None) -> nn.Module:
    """A model of transformers with its own dispatch of tokens, and without a wrapper.

    `sharing` are ranks that see the same samples.
    """
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    if sharing is None:
        sharing = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))["tp"]
    return apply_expert_parallelism(model, mesh, sharing, model._expand_parallel_plan(model.ep_plan), exchange)


# The table.


def expected(model: nn.Module, samples: list[oracle.Sample], max_norm: float = CLIP) -> tuple[float, float]:
    """Leave the gradient of the update in plain torch, each sample alone; its loss and its norm before the clip."""
    model.zero_grad()
    weight = sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)
    found = 0.0
    for sample in samples:
        output = model(input_ids=sample["input_ids"][None])
        logits = output[0] if isinstance(output, tuple) else output.logits
        total = F.cross_entropy(logits[0, :-1], sample["labels"][1:], reduction="sum") / weight
        total.backward()
        found += float(total.detach())
    return found, float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))


def loss_of(family: str) -> Any:
    return experts.unbalanced if family == "sparse" else losses.next_token


def given(call: tuple[tuple[int, ...], ...]) -> list[list[oracle.Sample]]:
    """Samples by rank."""
    samples = families.masked_text()
    for sample in samples:
        sample["input_ids"] %= 32
        sample["labels"] = torch.where(sample["labels"] < 0, sample["labels"], sample["labels"] % 32)
    return [[samples[number] for number in numbers] for numbers in call[: dist.get_world_size()]]


def run_cell(name: str) -> dict[str, Any]:
    """The worst relative error of a gradient, of loss, norm and weight, and of all gradients as one vector."""
    cell = Cell.parse(name)
    dtype = getattr(torch, cell.dtype)
    with warnings.catch_warnings(), Float64WithoutDropout() if cell.dtype == "float64" else nullcontext():
        warnings.simplefilter("ignore")
        reference = reference_of(cell.family, dtype)
        model = wrapped(cell.family, cell.layout, cell.degree, reference, dtype)
        accumulator = GradientAccumulator(model, micro_batch_size=1, sync=cell.sync)
        found: list[tuple[float, str]] = []
        whole: list[float] = []
        for calls in SHARES:
            if cell.way == "open":
                accumulator.open()
            for call in calls:
                accumulator.forward_backward(given(call)[dist.get_rank()], loss_of(cell.family))
            update = accumulator.finalize(max_norm=CLIP)
            flat = [sample for call in calls for share in given(call) for sample in share]
            quotient, norm = expected(reference, flat)
            assert update.finite
            assert update.num_samples == len(flat)
            found.append((abs(float(update.loss) / quotient - 1), "loss"))
            found.append((abs(float(update.grad_norm) / norm - 1), "norm"))
            gradients, of_one = gradients_of(model), {name: each.grad for name, each in reference.named_parameters()}
            found.append(oracle.worst_error(gradients, of_one))
            whole.append(oracle.whole_error(gradients, of_one))
        return {"error": max(found)[0], "of": max(found)[1], "whole": max(whole)}


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if each.grad is None else full(each.grad) for name, each in model.named_parameters()}


def errors_of(model: nn.Module, reference: nn.Module) -> tuple[float, str]:
    return oracle.worst_error(gradients_of(model), {name: each.grad for name, each in reference.named_parameters()})


# Other ways to make an update.

OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {"max_microbatch_tokens": "auto"},
    "evaluate": {"micro_batch_size": 1},
    "loop": {"micro_batch_size": 1},
    "joint": {"micro_batch_size": 1},
    "list": {"micro_batch_size": 1},
    "mesh": {"micro_batch_size": 1},
}


def looped(accumulator: GradientAccumulator, samples: list[oracle.Sample]) -> None:
    for index, sample in enumerate(samples):
        weight = int((sample["labels"][1:] != -100).sum())
        with accumulator.microbatch(index, of=len(samples), sum_over=weight) as part:
            logits, _ = accumulator.model(sample["input_ids"][None])
            part.scale(experts.cross_entropy(logits, sample["labels"][None])).backward()


def encode(model: nn.Module, batch: oracle.Sample) -> dict[str, Tensor]:
    logits, _ = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    last = batch["attention_mask"].sum(1) - 1
    return {"codes": logits[torch.arange(len(last)), last]}


def contrast(encoded: dict[str, Tensor]) -> tuple[Tensor, int]:
    scores = encoded["codes"] @ encoded["codes"].T
    return -scores.log_softmax(1).diagonal().sum(), len(scores)


def of_both(models: list[nn.Module], batch: oracle.Sample) -> tuple[Tensor, Tensor]:
    """The loss of a model and of another whose logits are added."""
    found = [each(batch["input_ids"], attention_mask=batch["attention_mask"])[0] for each in models]
    return experts.cross_entropy(found[0] + found[1], batch["labels"]), experts.weights(batch)["loss"]


def with_option(name: str) -> dict[str, Any]:
    """The job "option:layout:2:2": the worst relative error of a gradient in two updates."""
    option, layout, *_ = name.split(":")
    reference = sparse_lm()
    model = wrapped("sparse", layout, 2, reference, torch.float64)
    models = [model, wrapped("sparse", layout, 2, reference, torch.float64)] if option == "list" else [model]
    settings = dict(OPTIONS[option])
    if option == "mesh":
        axes = {"plain": ("dp", "ep"), "sharded": ("tp", "fsdp")}[layout]  # "fsdp" is the name in transformers
        settings["mesh"] = init_device_mesh("cpu", (1, 2), mesh_dim_names=axes)
    accumulator = GradientAccumulator(models if option == "list" else model, **settings)
    found: list[tuple[float, str]] = []
    for shares in (((0, 1, 2), (3, 4, 6)), ((5, 2, 1), (0, 3, 4))):
        samples = given(shares)[dist.get_rank()]
        everyone = [each for share in given(shares) for each in share]
        reference.zero_grad()
        if option == "loop":
            looped(accumulator, samples)
        elif option == "joint":
            accumulator.forward_backward(samples[: 2 - dist.get_rank()], JointLoss(encode, contrast))
            everyone = [each for share, size in zip(given(shares), (2, 1), strict=True) for each in share[:size]]
            total, weight = contrast(
                {"codes": torch.cat([encode(reference, oracle.collate([s]))["codes"] for s in everyone])}
            )
            (total / weight).backward()
        elif option == "list":
            accumulator.forward_backward(samples, loss(weigh=experts.unbalanced.weigh)(of_both))
            total, weight = of_both([reference, reference], oracle.collate(everyone))
            (total / weight / 2).backward()  # each of the two has half of the gradient of both
        else:
            if option == "evaluate":
                accumulator.evaluate(samples[dist.get_rank() :], experts.unbalanced)
            accumulator.forward_backward(samples[dist.get_rank() :], experts.unbalanced)
            everyone = [each for rank, share in enumerate(given(shares)) for each in share[rank:]]
        assert accumulator.finalize().finite
        if option not in ("joint", "list"):
            expected(reference, everyone, math.inf)
        found += [errors_of(one, reference) for one in models]
    return {"error": max(found)[0], "of": max(found)[1]}


def with_shared_samples(name: str) -> dict[str, Any]:
    """The job "family:exchange:world:2", whose ranks along "tp" have their experts and see the same samples."""
    family, exchange, world, _ = name.split(":")
    mesh = init_device_mesh("cpu", (int(world) // 2, 2), mesh_dim_names=("dp", "tp"))
    with warnings.catch_warnings(), Float64WithoutDropout():
        warnings.simplefilter("ignore")
        reference = reference_of(family, torch.float64)
        if family == "sparse":
            model: nn.Module = spread(sparse_lm(), mesh["tp"], SummedBlock)
        else:
            model = dispatched(copy.deepcopy(reference), mesh["tp"], exchange, mesh["tp"])
        accumulator = GradientAccumulator(model, micro_batch_size=1, mesh=mesh)
        found: list[tuple[float, str]] = []
        for shares in (((0, 1, 2), (3, 4, 6)), ((5, 2, 1), (0,))):
            accumulator.forward_backward(given(shares)[mesh.get_local_rank("dp")], loss_of(family))
            update = accumulator.finalize(max_norm=CLIP)
            flat = [sample for share in given(shares)[: mesh["dp"].size()] for sample in share]
            _, norm = expected(reference, flat)
            found += [(abs(float(update.grad_norm) / norm - 1), "norm"), errors_of(model, reference)]
        return {"error": max(found)[0], "of": max(found)[1]}


# Verification.


def divided(model: nn.Module, microbatch: Any) -> Term:
    """A loss that divides by the number of microbatches."""
    total, weight = losses.next_token(model, microbatch)
    return Term(total * len(microbatch["labels"]) / 8, weight)


def returning_half() -> str:
    """Register an exchange of tokens whose backward returns half of the gradient; its name."""
    from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface

    class ReturningHalf(AllToAllEP):
        def __call__(self, *given: Tensor) -> Tensor:
            output = super().__call__(*given)
            return output / 2 + output.detach() / 2

    EPImplementationInterface.register("returning_half", ReturningHalf)
    return "returning_half"


def run_verify(name: str) -> dict[str, Any]:
    """The job "family:layout:what:world:degree": the verdict of ``verify``, with the worst error of a gradient."""
    family, layout, what, _, degree = name.split(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = wrapped(family, layout, int(degree), reference_of(family, torch.float32), torch.float32)
        if what == "exchange":
            mesh = init_device_mesh("cpu", (1, int(degree)), mesh_dim_names=("dp", "ep"))
            model = dispatched(reference_of(family, torch.float32), mesh["ep"], returning_half())
        elif what == "shared":
            mesh = init_device_mesh("cpu", (1, int(degree)), mesh_dim_names=("dp", "tp"))
            model = dispatched(reference_of(family, torch.float32), mesh["tp"], "all_reduce", mesh["tp"])
        before = [full(each.detach()).clone() for each in model.parameters()]
        loss_fn = divided if what == "divided" else losses.next_token
        share = 0 if what == "shared" else dist.get_rank()
        found = verify(model, loss_fn, given(((0, 1, 2), (3, 4, 6), (5,), ()))[share])
        same = all(torch.equal(full(each), copied) for each, copied in zip(model.parameters(), before, strict=True))
    return {"error": found.worst, "ok": found.ok, "causes": found.causes, "same": same}


# Counts.


def count(name: str) -> dict[str, int]:
    """The job "family:layout:sync:world:degree": collectives of one update of three microbatches.

    With the bytes of a rank's gradients before they are reduced, of experts and of other weights.
    """
    family, layout, sync, _, degree = name.split(":")
    with warnings.catch_warnings(), Float64WithoutDropout():
        warnings.simplefilter("ignore")
        reference = reference_of(family, torch.float64)
        model = wrapped(family, layout, int(degree), reference, torch.float64)
        accumulator = GradientAccumulator(model, micro_batch_size=1, sync=sync)
        samples = given(((0, 1, 2),) * 4)[0]
        counts: dict[str, int] = {}
        for _ in range(2):  # the first call compares the order of collectives
            with Collectives() as seen:
                accumulator.forward_backward(samples, loss_of(family))
                accumulator.finalize()
            counts = seen.table()
        own = {"expert_bytes": 0, "dense_bytes": 0}
        for parameter in model.parameters():
            own["expert_bytes" if is_expert(parameter) else "dense_bytes"] += parameter.nbytes
        return counts | own | {"expert_bytes": own["expert_bytes"] // int(degree)}


JOBS: dict[str, Callable[[str], Any]] = {
    "cell": run_cell, "option": with_option, "shared": with_shared_samples, "verify": run_verify, "count": count,
}  # fmt: skip


def run_job(name: str) -> Any:
    """The job "kind/what it says"."""
    kind, _, rest = name.partition("/")
    try:
        return JOBS[kind](rest)
    finally:
        # Every job makes meshes of its own, whose threads and sockets end with the last reference to their groups.
        dist.destroy_process_group()
        clear_mesh_caches()
        gc.collect()

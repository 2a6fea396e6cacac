"""Gradients that are added wider than the parameters: jobs whose sums need more bits than bfloat16 has.

Every microbatch's gradient is of integers below 256, which bfloat16 holds; their sum is not, so adding in bfloat16
rounds again and again. Added in float32 it is exact, and the gradient is the one rounding of the exact quotient.
"""

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import megabatch
from megabatch import GradientAccumulator, loss
from tests.exact import models
from tests.exact.oracle import whole_error

NUM_SAMPLES = 256  # of an update, a power of two: the division is exact
WORLDS = {"plain": 1, "summed": 2, "ddp": 2, "fsdp2": 2, "hsdp": 4, "replicate": 2, "tensor": 2}
SYNCS = {"fsdp2": ("every", "last"), "hsdp": ("every", "replica_last", "last"), "replicate": ("every", "last")}
CASES = ("one-call", "late-weights", "abandoned", "weightless-between", "unused")
SUMMED = ("summed", "ddp")  # the gradient stays on its rank, and only one rank has one of the parameters


class Counter(nn.Module):
    """Gradients of small integers; the last layer is used by rows that say so."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2, bias=False)
        self.extra = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor, extra: bool = True) -> Tensor:
        hidden = x
        for block in self.blocks:
            hidden = block(hidden)
        outputs = self.head(hidden)
        return (outputs + self.extra(x) if extra else outputs).sum(-1)  # [B]


def new_model(dtype: torch.dtype) -> nn.Module:
    model, generator = Counter().to(dtype), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    return model


def wrap(model: nn.Module, wrapper: str) -> tuple[nn.Module, DeviceMesh | None]:
    if wrapper == "ddp":
        return DistributedDataParallel(model), None
    if wrapper in ("plain", "summed"):
        return model, None
    axes = {"hsdp": {"dp_replicate": 2, "dp_shard": 2}, "tensor": {"tp": 2}}.get(wrapper, {"dp": WORLDS[wrapper]})
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    if wrapper == "tensor":
        parallelize_module(model, mesh, {"blocks.0": ColwiseParallel(), "blocks.1": RowwiseParallel()})
        return model, mesh
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    shard: Callable[..., nn.Module] = replicate if wrapper == "replicate" else fully_shard
    for block in model.blocks:
        shard(block, mesh=mesh, mp_policy=policy)
    return shard(model, mesh=mesh, mp_policy=policy), mesh


def shares(wrapper: str) -> list[list[dict[str, Tensor]]]:
    """The samples of each data rank; ranks have different numbers of them, so that some run dummy microbatches."""
    generator = torch.Generator().manual_seed(5)
    samples = [{"x": torch.randint(0, 4, (4,), generator=generator)} for _ in range(NUM_SAMPLES)]
    degree = 1 if wrapper == "tensor" else WORLDS[wrapper]
    edges = [NUM_SAMPLES * rank // degree - 6 * (rank % 2) for rank in range(degree)] + [NUM_SAMPLES]
    return [samples[start:end] for start, end in pairwise(edges)]


def oracle(wrapper: str, case: str) -> dict[str, Tensor]:
    """The exact quotient, in float64."""
    model = new_model(torch.float64)
    for rank, share in enumerate(shares(wrapper)):
        x = torch.stack([sample["x"] for sample in share]).double()
        (model(x, uses_extra(case, rank)).sum() / NUM_SAMPLES).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def uses_extra(case: str, rank: int) -> bool:
    return case != "unused" or rank == 0


class Job:
    """One model under one wrapper, through the updates of a case."""

    def __init__(self, name: str) -> None:
        wrapper, self.sync, self.case, self.dtype = name.split(":")
        self.wrapper, self.rank = wrapper, dist.get_rank()
        if wrapper == "plain":
            dist.destroy_process_group()
        self.data_rank = 0 if wrapper == "tensor" else self.rank
        self.begin()
        self.share = shares(wrapper)[self.data_rank]
        self.fails_at: int | None = None
        self.widths: set[torch.dtype] = set()

    def begin(self) -> None:
        self.model, mesh = wrap(new_model(torch.bfloat16), self.wrapper)
        accumulate = torch.float32 if self.dtype == "float32" else None
        self.gradient = GradientAccumulator(
            self.model, mesh=mesh, micro_batch_size=4, sync=self.sync, accumulate_dtype=accumulate
        )

    def total(self, model: nn.Module, microbatch: dict[str, Tensor]) -> tuple[Tensor, float]:
        if self.fails_at is not None:
            self.fails_at -= 1
            if self.fails_at < 0:
                raise InterruptedError
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self.widths.add(parameter.grad.dtype)
        x = microbatch["x"].bfloat16()
        return model(x, uses_extra(self.case, self.data_rank)).float().sum(), float(len(x))

    def run(self, share: list[dict[str, Tensor]]) -> None:
        def loss(model: nn.Module, microbatch: dict[str, Tensor]) -> tuple[Tensor, float]:
            return self.total(model, microbatch)

        if self.case != "late-weights":
            loss = megabatch.loss(weigh=lambda microbatch: len(microbatch["x"]))(loss)
        self.gradient.forward_backward(share, loss)

    def update(self, max_norm: float | None = None) -> megabatch.Update:
        half = len(self.share) // 2 if self.case == "late-weights" else 0  # two calls
        for part in (self.share[:half], self.share[half:]) if half else (self.share,):
            self.run(part)
        return self.gradient.finalize(max_norm=max_norm)

    def disturb(self) -> None:
        if self.case == "abandoned":
            self.fails_at = 20
            try:
                self.run(self.share)
            except InterruptedError:
                self.fails_at = None
        if self.case == "weightless-between":
            self.run([])
            assert not self.gradient.finalize().finite


def run_job(name: str) -> dict[str, Any]:
    """The job "wrapper:sync:case:dtype": two updates of the same samples, and steps of two optimizers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about gloo and about one rank
        job = Job(name)
        expected = oracle(job.wrapper, job.case)
        different: dict[str, float] = {}
        for _ in range(2):
            job.disturb()
            update = job.update()
            assert update.finite
            found = gradients(job.model)
            for parameter, exact in expected.items():
                rounded = exact.bfloat16()
                assert (exact == exact.float()).all(), "the data is not exact"
                if not torch.equal(found[parameter], rounded):
                    different[parameter] = float((found[parameter] - rounded).abs().max())
        norm = job.update(max_norm=1e-3).grad_norm
        exact_norm = torch.stack([each.norm() for each in expected.values()]).norm()
        dtypes = {str(each.dtype) for each in gradients(job.model).values()}
        clipped = torch.stack([each.double().norm() for each in gradients(job.model).values()]).norm()
        steps = [_moves(job.model, foreach=True), _moves(job.model, fused=True)] if job.wrapper != "tensor" else []
    return {
        "different": different,
        "norm": float((norm.double() - exact_norm).abs() / exact_norm),
        "clipped": float(abs(clipped - 1e-3) / 1e-3),
        "dtypes": sorted(dtypes),
        "widths": sorted(map(str, job.widths)),
        "steps": steps,
    }


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients on every rank."""
    found = {name.removeprefix("module."): parameter.grad for name, parameter in model.named_parameters()}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


def _moves(model: nn.Module, **options: bool) -> bool:
    """Return True if AdamW takes a step with the gradients that are there."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    torch.optim.AdamW(model.parameters(), lr=0.5, **options).step()
    return all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def language_error(num_microbatches: int, accumulate: torch.dtype | None) -> tuple[float, float]:
    """Errors against float64 of a bfloat16 GPT-2's gradient: cut, and uncut in one plain backward."""
    model, reference = models.gpt2(torch.bfloat16), models.gpt2(torch.bfloat16).double()
    ids = torch.randint(0, models.VOCABULARY, (num_microbatches, 12), generator=torch.Generator().manual_seed(0))
    num_targets = ids[:, 1:].numel()
    _token_sum(reference, ids).div(num_targets).backward()
    uncut = models.gpt2(torch.bfloat16)
    _token_sum(uncut, ids).div(num_targets).backward()
    gradient = GradientAccumulator(model, micro_batch_size=1, accumulate_dtype=accumulate)
    gradient.forward_backward({"input_ids": ids}, _language)
    assert gradient.finalize().finite
    expected = gradients(reference)
    return whole_error(gradients(model), expected), whole_error(gradients(uncut), expected)


@loss(weigh=lambda microbatch: microbatch["input_ids"][:, 1:].numel())
def _language(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
    ids = microbatch["input_ids"]
    return _token_sum(model, ids), ids[:, 1:].numel()


def _token_sum(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

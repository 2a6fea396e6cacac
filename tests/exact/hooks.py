"""DDP with communication hooks: torch's own that average, and others, which are refused."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, PlanError, loss
from tests.exact import functions, models, oracle

SYNCS = ("last", "every")
NUM_UPDATES = 2
Made = Future[Tensor]


def _reduced(tensor: Tensor) -> Made:
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])


def sums(state: object, bucket: dist.GradBucket) -> Made:
    return _reduced(bucket.buffer())


def divides_before(state: object, bucket: dist.GradBucket) -> Made:
    return _reduced(bucket.buffer().div_(dist.get_world_size()))


class Remembers:
    """Its hook averages; what it would do in the next update, its code does not say."""

    def hook(self, state: object, bucket: dist.GradBucket) -> Made:
        return divides_before(state, bucket)


def _world() -> Any:
    return dist.group.WORLD


def _own_rank() -> Any:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


ACCEPTED = {  # name -> hook and its state
    "allreduce": lambda: (default_hooks.allreduce_hook, None),
    "allreduce, over the world": lambda: (default_hooks.allreduce_hook, _world()),
}
UNKNOWN = (
    "which is not known to average over its ranks; leave it out, or register allreduce_hook or bf16_compress_hook of "
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
)
ELSEWHERE = "which reduces over other ranks than DDP does; register it with ddp.process_group as its state"
REFUSED = {  # name -> hook, its state, and the reason
    "sums": (lambda: (sums, None), UNKNOWN),
    "divides_before": (lambda: (divides_before, None), UNKNOWN),
    "hook, a method": (lambda: (Remembers().hook, None), UNKNOWN),
    "fp16_compress_hook": (lambda: (default_hooks.fp16_compress_hook, None), UNKNOWN),
    "fp16_compress_wrapper_hook": (lambda: (default_hooks.fp16_compress_wrapper(divides_before), None), UNKNOWN),
    "quantization_pertensor_hook": (lambda: (quantization_hooks.quantization_pertensor_hook, _world()), UNKNOWN),
    "powerSGD_hook": (lambda: (powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None)), UNKNOWN),
    "allreduce_hook, with a state": (lambda: (default_hooks.allreduce_hook, object()), UNKNOWN),
    "allreduce_hook, over its own rank": (lambda: (default_hooks.allreduce_hook, _own_rank()), ELSEWHERE),
}


def _samples(update: int) -> list[oracle.Sample]:
    """Samples of uneven lengths, 64 targets in all."""
    generator = torch.Generator().manual_seed(update)

    def draw(low: int, high: int, targets: int) -> Tensor:
        return torch.randint(low, high, (targets + 1,), generator=generator)

    sizes = (3, 20, 1, 9, 14, 2, 11, 4)
    return [{"input_ids": draw(0, models.VOCABULARY, n), "labels": draw(-3, 4, n)} for n in sizes]


def _with_hook(hook: Callable[..., Any], state: object) -> DistributedDataParallel:
    ddp = DistributedDataParallel(models.integer_model("tokens"))
    ddp.register_comm_hook(state, hook)
    return ddp


@loss(weigh=lambda batch: functions.tokens_weights(batch)["loss"])
def _squares(model: Any, batch: oracle.Sample) -> tuple[Tensor, Tensor]:
    return functions.tokens_sums(model, batch)["loss"]


def accepted(name: str, sync: str) -> float:
    """The largest relative error of a gradient, over some updates."""
    ddp, reference = _with_hook(*ACCEPTED[name]()), models.integer_model("tokens")
    gradient = GradientAccumulator(ddp, micro_batch_size=1, sync=sync)
    worst = 0.0
    for update in range(NUM_UPDATES):
        samples = _samples(update)
        shares = [samples[:3], samples[3:], []]
        gradient.forward_backward(shares[dist.get_rank()], _squares)
        gradient.finalize()
        expected = oracle.answer(reference, lambda *given: {"loss": functions.tokens_sums(*given)["loss"]}, samples)
        found = {name: parameter.grad for name, parameter in ddp.module.named_parameters()}
        worst = max(worst, oracle.worst_error(found, expected.gradients)[0])
    return worst


def refused(name: str) -> str:
    """The error of the accumulator about a hook."""
    make, _ = REFUSED[name]
    try:
        GradientAccumulator(_with_hook(*make()), micro_batch_size=1)
    except PlanError as error:
        return str(error)
    return "nothing"


def registered_late() -> str:
    """The error about a hook that comes after the accumulator."""
    ddp = DistributedDataParallel(models.integer_model("tokens"))
    gradient = GradientAccumulator(ddp, micro_batch_size=1)
    ddp.register_comm_hook(None, sums)
    try:
        gradient.forward_backward(_samples(0), _squares)
    except PlanError as error:
        return str(error)
    return "nothing"


def run_job(name: str) -> Any:
    """The job "accepted/hook/sync", "refused/hook" or "registered late"."""
    kind, *rest = name.split("/")
    return {"accepted": accepted, "refused": refused, "registered late": registered_late}[kind](*rest)

"""DDP with communication hooks of the user: those that average, and those that must be refused."""

from collections.abc import Callable
from itertools import count
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


def _reduced(tensor: Tensor, then: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Made:
    future = dist.all_reduce(tensor, async_op=True).get_future()
    return future.then(lambda done: then(done.value()[0]))


def _done(tensor: Tensor) -> Made:
    future: Made = Future()
    future.set_result(tensor)
    return future


def divides_before(state: object, bucket: dist.GradBucket) -> Made:
    return _reduced(bucket.buffer().div_(dist.get_world_size()))


def divides_after(state: object, bucket: dist.GradBucket) -> Made:
    return _reduced(bucket.buffer(), lambda total: total.div_(dist.get_world_size()))


def gathers(state: object, bucket: dist.GradBucket) -> Made:
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, bucket.buffer())
    return _done(torch.stack(parts).mean(0))


def rounds(state: object, bucket: dist.GradBucket) -> Made:
    mean = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    return _reduced(mean, lambda found: bucket.buffer().copy_(found))


def sums(state: object, bucket: dist.GradBucket) -> Made:
    return _reduced(bucket.buffer())


def stays_here(state: object, bucket: dist.GradBucket) -> Made:
    return _done(bucket.buffer())


def takes_signs(state: object, bucket: dist.GradBucket) -> Made:
    return _reduced(bucket.buffer().sign().div_(dist.get_world_size()))


def drops_small(state: object, bucket: dist.GradBucket) -> Made:
    large = bucket.buffer().abs() >= bucket.buffer().abs().median()
    return _reduced((bucket.buffer() * large).div_(dist.get_world_size()))


def clips(state: object, bucket: dist.GradBucket) -> Made:
    return _reduced(bucket.buffer().clamp_(-100, 100).div_(dist.get_world_size()))


def weighs_ranks(state: object, bucket: dist.GradBucket) -> Made:
    size = dist.get_world_size()
    return _reduced(bucket.buffer().mul_(2 * (dist.get_rank() + 1) / (size * (size + 1))))


def fails(state: object, bucket: dist.GradBucket) -> Made:
    raise ValueError("no such codec")


BUCKETS = count()


def changes_its_mind(state: object, bucket: dist.GradBucket) -> Made:
    return (divides_before if next(BUCKETS) < 8 else sums)(state, bucket)


class Remembers:
    """Adds what the last time left over."""

    def hook(self, state: object, bucket: dist.GradBucket) -> Made:
        return divides_before(state, bucket)


def _remembering() -> Callable[..., Made]:
    left: list[Tensor] = []

    def hook(state: object, bucket: dist.GradBucket) -> Made:
        left.append(bucket.buffer())
        return divides_before(state, bucket)

    return hook


def _with_a_default() -> Callable[..., Made]:
    def hook(state: object, bucket: dist.GradBucket, seen: list[Tensor] | None = None) -> Made:
        return divides_before(state, bucket)

    hook.__defaults__ = ([],)  # a list that every call shares, as one written in the signature would be
    return hook


def _world() -> Any:
    return dist.group.WORLD


def _own_rank() -> Any:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


ACCEPTED = {  # name -> hook, its state, and the error that its rounding may leave
    "divides_before": (lambda: (divides_before, None), 0.0),
    "divides_after": (lambda: (divides_after, None), 0.0),
    "gathers": (lambda: (gathers, None), 0.0),
    "torch's, over the world": (lambda: (default_hooks.allreduce_hook, _world()), 0.0),
    "an own one in bfloat16": (lambda: (rounds, None), 4 * 2.0**-8),
}
STATE = (
    "which keeps a state, so what it does to one update may depend on others; leave the hook out, or give one "
    "without state that averages"
)
OTHERWISE = "which does not average over the ranks of DDP; sum over all of them, divide by their number, and change "
OTHERWISE += "nothing else (float16 loses small gradients)"
FAILS = "which failed when it was tried on a small module{}; mend the hook, or leave it out"
SUMS = "which sums over ranks; divide by the number of ranks as DDP does"
REFUSED = {  # name -> hook, its state, and the reason
    "sums": (lambda: (sums, None), SUMS),
    "stays_here": (lambda: (stays_here, None), OTHERWISE),
    "takes_signs": (lambda: (takes_signs, None), OTHERWISE),
    "drops_small": (lambda: (drops_small, None), OTHERWISE),
    "fp16_compress_hook": (lambda: (default_hooks.fp16_compress_hook, None), OTHERWISE),
    "fp16_compress_wrapper_hook": (lambda: (default_hooks.fp16_compress_wrapper(divides_before), None), OTHERWISE),
    "clips": (lambda: (clips, None), OTHERWISE),
    "weighs_ranks": (lambda: (weighs_ranks, None), OTHERWISE),
    "changes_its_mind": (lambda: (changes_its_mind, None), OTHERWISE),
    "allreduce_hook": (lambda: (default_hooks.allreduce_hook, _own_rank()), OTHERWISE),
    "quantization_pertensor_hook": (lambda: (quantization_hooks.quantization_pertensor_hook, _world()), None),
    "fails": (lambda: (fails, None), FAILS.format(": ValueError: no such codec")),
    "powerSGD_hook": (lambda: (powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None)), STATE),
    "hook": (lambda: (_remembering(), None), STATE),
    "hook, a method": (lambda: (Remembers().hook, None), STATE),
    "hook, a default": (lambda: (_with_a_default(), None), STATE),
}


def _samples(update: int) -> list[oracle.Sample]:
    """Of uneven lengths, 64 targets in all."""
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
    make, _ = ACCEPTED[name]
    ddp, reference = _with_hook(*make()), models.integer_model("tokens")
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
    """What the accumulator says of a hook."""
    make, _ = REFUSED[name]
    try:
        GradientAccumulator(_with_hook(*make()), micro_batch_size=1)
    except PlanError as error:
        return str(error)
    return "nothing"


def registered_late() -> str:
    """What is said of a hook that comes after the accumulator."""
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

"""Counts of one update on a rank, in the steady state: after as many calls as a wrapper needs to settle."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from megabatch import GradientAccumulator, loss
from tests.comm import document
from tests.comm.counting import Collectives
from tests.exact import models
from tests.exact.wrappers import WRAPPERS, Wrapped, mesh_of, parameters_of, wrap
from tests.unit.small import unseen

WIDTH, LENGTH, ROWS = 48, 8, 2  # the smallest thing that is gathered is larger than a message
BUCKET_MB = 0.05  # so that DDP makes several buckets
NUM_GROUPS = 3  # two blocks and the root
SETTLED = 2  # calls; DDP sends its order of buckets before the second


class Counted(models.SmallLM):
    """A language model with a buffer, as batch norm has one."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.register_buffer("running", torch.zeros(WIDTH))


@loss(weigh=lambda microbatch: len(microbatch["input_ids"]))
def squares(model: Wrapped, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
    outputs = models.called(model)(microbatch["input_ids"]).logits
    return (outputs**2).sum(), len(microbatch["input_ids"])


def wrapped(wrapper: str) -> Wrapped:
    torch.manual_seed(0)
    options = {"bucket_cap_mb": BUCKET_MB} if "ddp" in wrapper and not WRAPPERS[wrapper].several else {}
    return wrap(Counted().double(), wrapper, **options)


def batch(num_samples: int) -> dict[str, Tensor]:
    return {"input_ids": torch.arange(num_samples * LENGTH).reshape(num_samples, LENGTH) % models.VOCABULARY}


def accumulator(wrapper: str, sync: str) -> tuple[Wrapped, GradientAccumulator]:
    model = wrapped(wrapper)
    mesh = mesh_of(wrapper, dist.get_world_size()) if WRAPPERS[wrapper].needs_mesh else None
    return model, GradientAccumulator(model, mesh=mesh, micro_batch_size=ROWS, sync=sync)


def _counted(update: Callable[[], None], calls: int = 1) -> dict[str, int]:
    for _ in range(-(-SETTLED // calls)):
        update()
    with Collectives() as collectives:
        update()
    return collectives.table()


def of_megabatch(name: str) -> dict[str, int]:
    """The job "wrapper:sync:microbatches:calls"."""
    wrapper, sync = name.split(":", 1)
    sync, microbatches, calls = sync.rsplit(":", 2)
    _, gradient = accumulator(wrapper, sync)

    def update() -> None:
        for _ in range(int(calls)):
            gradient.forward_backward(batch(ROWS * int(microbatches)), squares)
        assert gradient.finalize().num_microbatches == int(microbatches) * int(calls)

    return _counted(update, int(calls))


def of_opened(name: str) -> dict[str, int]:
    """The job "opened:wrapper:sync:microbatches:calls": the same of an update that `open` begins."""
    _, wrapper, sync, microbatches, calls = name.split(":")
    _, gradient = accumulator(wrapper, sync)
    many, several = int(microbatches), int(calls)

    def update() -> None:
        gradient.open(weights=ROWS * many * several)
        for _ in range(several):
            gradient.forward_backward(batch(ROWS * many), squares)
        gradient.finalize()

    return _counted(update)


def of_tuned(name: str) -> dict[str, int]:
    """The job "tuned:wrapper:calls": the same where the limit is measured, in the updates after."""
    _, wrapper, calls = name.split(":")
    gradient = GradientAccumulator(wrapped(wrapper), max_microbatch_tokens="auto")

    def update() -> None:
        for _ in range(int(calls)):
            gradient.forward_backward(batch(ROWS), squares)
        gradient.finalize()

    update()
    assert gradient.fit is not None
    return _counted(update, int(calls))


def of_pytorch(name: str) -> dict[str, int]:
    """The job "pytorch:wrapper": one microbatch of a loop without megabatch."""
    model = wrapped(name.split(":")[1])
    parameters = parameters_of(model).values()

    def update() -> None:
        for parameter in parameters:
            parameter.grad = None
        squares(model, batch(ROWS))[0].backward()

    return _counted(update)


def of_model(name: str) -> dict[str, int]:
    """The job "model:wrapper": what the formulas need to know of the model, as `Sizes` has it, and its axes."""
    wrapper = name.split(":")[1]
    axes = WRAPPERS[wrapper].axes(dist.get_world_size())
    alone = "tp-sp" if wrapper.endswith("-sp") else "tp" if "tp" in axes else "plain"
    parameters = {name: local(each) for name, each in parameters_of(wrapped(alone)).items()}
    root = [each for name, each in parameters.items() if not name.startswith("blocks.")]
    norms = [each for name, each in parameters.items() if "norm" in name] if wrapper.endswith("-sp") else []
    whole_embedding = models.VOCABULARY * WIDTH * parameters["embedding.weight"].itemsize
    return {
        "P": _nbytes(parameters.values()), "R": _nbytes(root), "Q": _nbytes(norms),
        "E": whole_embedding - parameters["embedding.weight"].nbytes,
        "T": len(parameters), "F": 1, "K": len(norms), "G": NUM_GROUPS,
        "S": axes.get("dp_shard", axes.get("dp", 1)),
        "axes": sum(size > 1 for size in axes.values()),
        "data_axes": sum(size > 1 for axis, size in axes.items() if axis != "tp"),
    }  # fmt: skip


def of_held(name: str) -> int:
    """The job "held:wrapper:sync": bytes of gradient on this rank between the second microbatch and the third."""
    _, wrapper, sync = name.split(":", 2)
    _, gradient = accumulator(wrapper, sync)
    found: list[int] = []

    @loss(weigh=lambda microbatch: len(microbatch["input_ids"]))
    def noting(model: Wrapped, microbatch: Any) -> Any:
        found.append(_nbytes(held(model)) if len(found) == 2 else 0)
        return squares(model, microbatch)

    for _ in range(2):  # the first call of a loss also checks it
        found.clear()
        gradient.forward_backward(batch(3 * ROWS), noting)
        gradient.finalize()
    return found[2]


def held(model: Wrapped) -> list[Tensor]:
    """Gradients, in p.grad or where a wrapper keeps those that are not yet reduced."""
    kept = [parameter.grad for parameter in parameters_of(model).values()]
    if isinstance(model, FullyShardedDataParallel):
        flat = [module._handle.flat_param for module in model.modules() if isinstance(module, type(model))]
        kept = [getattr(each, "_saved_grad_shard", None) for each in flat] + [each.grad for each in flat]
    for module in model.modules():
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
            kept += [group._partial_reduce_output]
            kept += [parameter.unsharded_accumulated_grad for parameter in group.fsdp_params]
            kept += [getattr(parameter, "_unsharded_param", parameter).grad for parameter in group.fsdp_params]
            if not group.is_sharded:  # the model shows other parameters
                kept += [parameter.sharded_param.grad for parameter in group.fsdp_params]
    return [local(gradient) for gradient in kept if gradient is not None]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def order_of_ddp(name: str) -> list[str]:
    """The job "order:ddp": what happens in the last backward of an update, in its order."""
    model, gradient = accumulator("ddp", "last")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(unseen(lambda _: collectives.seen.append(("gradient", 0))))
    for _ in range(2):
        with Collectives() as collectives:
            gradient.forward_backward(batch(3 * ROWS), squares)
        gradient.finalize()
    num_gradients = len(list(model.parameters()))
    events = [kind for kind, _ in collectives.seen if kind in ("gradient", "all_reduce")]
    return events[2 * num_gradients :]


def of_snippet(name: str) -> None:
    """The job "snippet:number": one of the page's, as it stands; it makes a process group's mesh of its own."""
    exec(document.snippets(document.PAGE.read_text())[int(name.split(":")[1])], {})


JOBS = {
    "opened": of_opened,
    "tuned": of_tuned,
    "pytorch": of_pytorch,
    "model": of_model,
    "held": of_held,
    "order": order_of_ddp,
    "snippet": of_snippet,
}


def run_job(name: str) -> Any:
    """The job by its name."""
    return JOBS.get(name.split(":")[0], of_megabatch)(name)

"""Microbatches that do not fit in memory and cannot run in parts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from megabatch import MegabatchError, experts, loss
from megabatch.batch import pad_right
from tests.exact.spikes import Spikes
from tests.unit.failures.table import SAMPLES, Failure, accumulator, linear, squares, weighed_squares

SEEN = "(OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.)"
MICROBATCH = "this process ran out of memory in microbatch 1 (2 samples, 2 tokens with padding), {}"
CHANGE = "; start again with micro_batch_size=1 or max_microbatch_tokens=1 {}"
AGAIN = MICROBATCH + ", so that it cannot run again in parts" + CHANGE.format(SEEN)
IN_PARTS = MICROBATCH.format("and failed when it ran again in parts") + CHANGE
SINGLE = (
    "this process ran out of memory in {}; shorten the sample, checkpoint activations, or shard the model over more "
    f"ranks {SEEN}"
)

REENTRANT = (  # as torch says it, cut
    "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or passing an `inputs` parameter to "
    ".backward(). To resolve this error, you can either set use_reentrant=Fals"
)


class Two(nn.Module):
    """Two layers; memory runs out in the backward of the first, when the second has its gradient."""

    def __init__(self, when: dict[int, tuple[str, int]]) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        Spikes(self, ("first", "second")).set(when)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Inside(torch.autograd.Function):
    """A layer whose backward runs a backward of its own, as checkpointing did before torch had hooks for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(x), gradients[0])
        return x.grad, None


class Nested(Two):
    """Its second layer, or both together, are run again in the backward."""

    def __init__(self, again: Callable[..., Tensor]) -> None:
        super().__init__({})
        self.again = again
        Spikes(self, ("first",)).set({1: ("backward", 0)})

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.first(x), self.second)


class Tied(nn.Module):
    """A weight used twice, then inside a checkpoint that runs a backward of its own; another may be unused."""

    def __init__(self, has_unused: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))
        self.middle = linear().requires_grad_(False)
        self.unused = linear() if has_unused else None
        Spikes(self, ("middle",)).set({1: ("backward", 0)})

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: x @ self.weight, self.middle(x @ self.weight), use_reentrant=True)


def tied(has_unused: bool) -> None:
    model = Tied(has_unused)
    gradient = accumulator(model)
    if has_unused:  # it has a gradient, so that it does not lack one of this microbatch that it could get
        gradient.forward_backward(SAMPLES[:2], lambda model, batch: (model.unused(batch["x"]).sum(), 2))
    gradient.forward_backward(SAMPLES, squares)


class Beside(nn.Module):
    """A router beside the way to the layer of which memory runs out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = linear(), Router()
        Spikes(self, ("first",)).set({1: ("backward", 0)})

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.router(x)[0]


class Router(nn.Module):
    """Chooses one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(1, 2).double()
        self.register_buffer("e_score_correction_bias", torch.zeros(2))

    def forward(self, x: Tensor) -> Any:
        return self.scores(x).softmax(-1).topk(1)


def beside_experts() -> None:
    gradient = accumulator(Beside())
    experts.ExpertBias(gradient)
    gradient.forward_backward(SAMPLES, squares)


def update(loss_fn: Callable[..., Any] = squares, phase: str = "backward", **settings: Any) -> None:
    """Memory runs out in the second of two microbatches, once."""
    accumulator(Two({1: (phase, 0)}), **settings).forward_backward(SAMPLES, loss_fn)


def single_sample() -> None:
    accumulator(Two({2: ("backward", 0)}), micro_batch_size=1).forward_backward(SAMPLES, squares)


def half_of_it() -> None:
    accumulator(Two({1: ("backward", 0), 3: ("forward", 1)})).forward_backward(SAMPLES, squares)


def no_part() -> None:
    """The collate of the user runs out of memory when a part is made."""
    made: list[int] = []

    def collate(samples: Any) -> Any:
        made.append(len(samples))
        if len(made) == 5:  # two microbatches, two halves that are weighed
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return pad_right(samples)

    accumulator(Two({1: ("backward", 0)}), collate=collate).forward_backward(SAMPLES, squares)


def several_devices() -> None:
    model = Two({1: ("backward", 0)})
    model.elsewhere = nn.Linear(1, 1, device="meta")  # after the others: the model reads on the CPU
    accumulator(model).forward_backward(SAMPLES, squares)


def stepping() -> None:
    gradient = accumulator(Two({1: ("forward", 0)}))
    gradient.step_in_backward(torch.optim.SGD(gradient.model.parameters(), lr=0.1))
    gradient.forward_backward(SAMPLES, weighed_squares)


def written() -> None:
    def doubling(model: nn.Module, microbatch: Any) -> Any:
        microbatch["x"].mul_(2)
        return squares(model, microbatch)

    rows = {"x": torch.stack([sample["x"] for sample in SAMPLES])}
    accumulator(Two({1: ("forward", 0)})).forward_backward(rows, doubling)


def written_to_samples() -> None:
    def doubling(model: nn.Module, samples: Any) -> Any:
        for sample in samples:
            sample["x"].mul_(2)
        return squares(model, {"x": torch.stack([sample["x"] for sample in samples])})

    own = [{"x": sample["x"].clone()} for sample in SAMPLES]
    accumulator(Two({1: ("forward", 0)}), collate=list).forward_backward(own, doubling)


def weighed_together() -> None:
    update(loss(weigh=lambda microbatch: len(microbatch["x"]) ** 2)(lambda *given: (squares(*given)[0], 4.0)))


def tensor_of_the_loss() -> None:
    scale = torch.ones(1, dtype=torch.float64, requires_grad=True)
    update(lambda model, microbatch: ((model(microbatch["x"]) * scale).sum(), 2))


def in_parts(again: Callable[..., Tensor]) -> None:
    accumulator(Nested(again)).forward_backward(SAMPLES, squares)


def reentrant(x: Tensor, layer: nn.Module) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def reducing() -> None:
    model = DistributedDataParallel(Two({1: ("backward", 0)}))
    accumulator(model).forward_backward(SAMPLES, squares)


def views_of_a_bucket() -> None:
    """From the second call on, DDP's gradients are such views."""
    model = Two({5: ("backward", 0)})
    gradient = accumulator(DistributedDataParallel(model, gradient_as_bucket_view=True))
    for _ in range(2):
        gradient.forward_backward(2 * SAMPLES, squares)


FAILURES = {
    "a sample that does not fit alone": Failure(
        MegabatchError, SINGLE.format("sample 2 of its batch alone (1 tokens)"), single_sample
    ),
    "a half of which a sample does not fit": Failure(
        MegabatchError, SINGLE.format("sample 3 of its batch alone (1 tokens)"), half_of_it
    ),
    "out of memory while an optimizer steps in backward": Failure(
        MegabatchError, AGAIN.format("and an optimizer steps in backward"), stepping
    ),
    "out of memory of which a part is not made": Failure(
        MegabatchError, SINGLE.format("sample 2 of its batch alone (1 tokens)"), no_part
    ),
    "out of memory with parameters on several devices": Failure(
        MegabatchError, AGAIN.format("whose parameters are on several devices"), several_devices
    ),
    "out of memory in a loss that writes to the batch": Failure(
        MegabatchError, AGAIN.format("and the loss has written to the batch"), written
    ),
    "out of memory in a loss that writes to samples": Failure(
        MegabatchError, AGAIN.format("and the loss has written to the batch"), written_to_samples
    ),
    "out of memory under a weight that does not add up": Failure(
        MegabatchError, AGAIN.format("whose weight is not the sum of its samples'"), weighed_together
    ),
    "out of memory with a parameter of the loss": Failure(
        MegabatchError,
        IN_PARTS.format("(PartError: the loss reaches a trainable tensor of shape (1,) that is not the model's)"),
        tensor_of_the_loss,
    ),
    "out of memory under a backward in a backward": Failure(
        MegabatchError,
        IN_PARTS.format("(PartError: a backward inside of its backward gives a parameter its gradient twice)"),
        lambda: in_parts(Inside.apply),
    ),
    "out of memory when a backward inside has begun all gradients": Failure(
        MegabatchError, AGAIN.format("in which every parameter had some gradient"), lambda: tied(False)
    ),
    "out of memory when a backward inside has begun a gradient": Failure(
        MegabatchError,
        IN_PARTS.format(
            "(PartError: CheckpointFunctionBackward is beside the way to the gradients that are still missing)"
        ),
        lambda: tied(True),
    ),
    "out of memory with a router that was counted": Failure(
        MegabatchError,
        IN_PARTS.format("(PartError: router 'router' is beside the way to the gradients that are still missing)"),
        beside_experts,
    ),
    "out of memory under reentrant checkpointing": Failure(
        MegabatchError,
        IN_PARTS.format(f"(RuntimeError: {REENTRANT})"),
        lambda: in_parts(reentrant),
    ),
}  # fmt: skip
IN_A_GROUP = {
    "out of memory in DDP's reducing backward": Failure(
        MegabatchError, AGAIN.format("in which DistributedDataParallel reduces"), reducing
    ),
    "out of memory with gradients that are views": Failure(
        MegabatchError, AGAIN.format("whose gradients are views of one tensor"), views_of_a_bucket
    ),
}

WAIT = "in which ranks wait for each other, so that it cannot run again in parts"
IN_VAIN = "and failed when it ran again in parts"
MESSAGES = "(PartError: it has messages between ranks, and another rank sends fewer)"
RANKS_WAIT = (
    "rank {} of 2 ran out of memory where ranks wait for each other; give smaller microbatches, or shard the model "
    f"over more ranks {SEEN}"
)

MEASURED = (
    "rank 1 of 2 ran out of memory when it measured a sample of 53 tokens, the longest; shorten it, checkpoint "
    f"activations, or shard the model over more ranks {SEEN}"
)


def of_rank(rank: int, world: int, index: int, tokens: int, longest: int, why: str = WAIT, seen: str = SEEN) -> str:
    return (
        f"rank {rank} of {world} ran out of memory in microbatch {index} (2 samples, {tokens} tokens with padding), "
        f"{why}; start again with micro_batch_size=1"
        + (f" or max_microbatch_tokens={longest}" if longest < tokens else "")
        + f" {seen}"
    )


def alone(sample: int, tokens: int) -> str:
    return SINGLE.replace("this process", "rank 1 of 2").format(f"sample {sample} of its batch alone ({tokens} tokens)")


LEAVING = {  # what all ranks say, by the job of `tests.exact.leaving`
    "fsdp2:2:auto:2:forward:1:1": of_rank(1, 2, 1, 28, 52),
    "fsdp2:2:last:2:backward:2:0": of_rank(0, 2, 2, 8, 53),
    "hsdp:4:auto:2:backward:1:2": of_rank(2, 4, 1, 26, 52),
    "ddp:2:last:2:backward:3:1": of_rank(1, 2, 3, 6, 52),
    "ddp:2:every:2:forward:0:0": of_rank(0, 2, 0, 106, 53),
    "tp:2:auto:2:backward:0:1": of_rank(1, 2, 0, 106, 53),
    "ddp:2:last:1:backward:2:1": alone(5, 14),
    "plain:2:last:1:forward:7:1": alone(6, 2),
    "messages-before:2:last:2:backward:1:0": of_rank(0, 2, 1, 26, 53),
    "messages-after:2:last:2:forward:1:0": of_rank(0, 2, 1, 26, 53, IN_VAIN, MESSAGES),
    "fsdp2:2:last:0:backward:3:1": MEASURED,
    "pp:2:auto:2:forward:0:1": RANKS_WAIT.format(1),
    "pp:2:auto:2:backward:0:0": RANKS_WAIT.format(0),
}

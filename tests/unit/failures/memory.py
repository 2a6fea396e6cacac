"""Microbatches that do not fit in memory and cannot run in parts."""

from megabatch import MegabatchError
from tests.unit.failures.shortages import (
    Inside,
    beside_experts,
    half_of_it,
    in_parts,
    no_part,
    reducing,
    reentrant,
    several_devices,
    single_sample,
    stepping,
    tensor_of_the_loss,
    tied,
    views_of_a_bucket,
    weighed_together,
)
from tests.unit.failures.table import Failure

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

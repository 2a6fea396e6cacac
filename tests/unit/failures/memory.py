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
    tensor_of_the_loss,
    tied,
    views_of_a_bucket,
    weighed_together,
)
from tests.unit.failures.table import Failure

SEEN = "(OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.)"
MICROBATCH = "this process … microbatch 1 (2 samples, 2 tokens with padding), {}"
CHANGE = " … micro_batch_size=1 … max_microbatch_tokens=1"
AGAIN = MICROBATCH + CHANGE + f" … {SEEN}"
IN_PARTS = MICROBATCH.format("") + CHANGE + " … {}"
SINGLE = "{} … {} … (1 tokens) … " + SEEN


FAILURES = {
    "a sample that does not fit alone": Failure(
        SINGLE.format("this process", "sample 2"), single_sample, MegabatchError
    ),
    "a half of which a sample does not fit": Failure(
        SINGLE.format("this process", "sample 3"), half_of_it, MegabatchError
    ),
    "out of memory of which a part is not made": Failure(
        SINGLE.format("this process", "sample 2"), no_part, MegabatchError
    ),
    "out of memory with parameters on several devices": Failure(
        AGAIN.format(" … several devices"), several_devices, MegabatchError
    ),
    "out of memory under a weight that does not add up": Failure(
        AGAIN.format(" … weight"), weighed_together, MegabatchError
    ),
    "out of memory with a parameter of the loss": Failure(
        IN_PARTS.format("PartError … (1,)"), tensor_of_the_loss, MegabatchError
    ),
    "out of memory under a backward in a backward": Failure(
        IN_PARTS.format("PartError … twice"), lambda: in_parts(Inside.apply), MegabatchError
    ),
    "out of memory when a backward inside has begun all gradients": Failure(
        AGAIN.format(" … every parameter"), lambda: tied(False), MegabatchError
    ),
    "out of memory when a backward inside has begun a gradient": Failure(
        IN_PARTS.format("PartError: CheckpointFunctionBackward"), lambda: tied(True), MegabatchError
    ),
    "out of memory with a router that was counted": Failure(
        IN_PARTS.format("PartError: router 'router'"), beside_experts, MegabatchError
    ),
    "out of memory under reentrant checkpointing": Failure(
        IN_PARTS.format("RuntimeError … use_reentrant=True"), lambda: in_parts(reentrant), MegabatchError
    ),
}
IN_A_GROUP = {
    "out of memory in DDP's reducing backward": Failure(
        AGAIN.format(" … DistributedDataParallel"), reducing, MegabatchError
    ),
    "out of memory with gradients that are views": Failure(AGAIN.format(" … views"), views_of_a_bucket, MegabatchError),
}

WAIT = "wait for each other"
MESSAGES = "PartError"


def of_rank(rank: int, world: int, index: int, tokens: int, longest: int, why: str = WAIT, seen: str = SEEN) -> str:
    change = f" … max_microbatch_tokens={longest}" if longest < tokens else ""
    return f"rank {rank} of {world} … microbatch {index} (2 samples, {tokens} tokens … {why} … =1{change} … {seen}"


LEAVING = {  # what all ranks say, by the job of `tests.exact.leaving`
    "fsdp2:2:auto:2:forward:1:1": of_rank(1, 2, 1, 28, 52),
    "fsdp2:2:last:2:backward:2:0": of_rank(0, 2, 2, 8, 53),
    "hsdp:4:auto:2:backward:1:2": of_rank(2, 4, 1, 26, 52),
    "ddp:2:last:2:backward:3:1": of_rank(1, 2, 3, 6, 52),
    "ddp:2:every:2:forward:0:0": of_rank(0, 2, 0, 106, 53),
    "tp:2:auto:2:backward:0:1": of_rank(1, 2, 0, 106, 53),
    "ddp:2:last:1:backward:2:1": f"rank 1 of 2 … sample 5 … (14 tokens) … {SEEN}",
    "plain:2:last:1:forward:7:1": f"rank 1 of 2 … sample 6 … (2 tokens) … {SEEN}",
    "messages-before:2:last:2:backward:1:0": of_rank(0, 2, 1, 26, 53),
    "messages-after:2:last:2:forward:1:0": of_rank(0, 2, 1, 26, 53, seen=MESSAGES, why="parts"),
    "fsdp2:2:last:0:backward:3:1": f"rank 1 of 2 … 53 tokens … {SEEN}",
    "pp:2:auto:2:forward:0:1": f"rank 1 of 2 … {WAIT} … {SEEN}",
    "pp:2:auto:2:backward:0:0": f"rank 0 of 2 … {WAIT} … {SEEN}",
}

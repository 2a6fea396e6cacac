"""How the processes divide the work."""

from typing import Literal

from megabatch.train.config.section import Count, Section


class ParallelConfig(Section):
    """How the processes divide the work: there are dp_replicate * dp_shard * cp * tp * pp of them."""

    wrapper: Literal["ddp", "fsdp2", "replicate"] | None = None
    """ddp: a copy of the model on each data rank; fsdp2: shards of it; replicate: copies, which go with tp and cp.
    None: what the degrees ask for; where they leave it open, copies below 1e9 parameters, else shards."""
    dp_replicate: Count | None = None
    """Copies of the model, each with samples of its own. With dp_shard > 1 too: shards within each copy (HSDP). None:
    the processes that the other degrees leave, for a wrapper that copies."""
    dp_shard: Count | None = None
    """Ranks over which fsdp2 shards the model, each with samples of its own. None: the processes that the other degrees
    leave, for fsdp2."""
    reshard_after_forward: bool = True
    """With fsdp2: let go of gathered layers after each forward. false: keep them until their backward, for fewer
    messages and more memory."""
    cp: Count = 1
    """Ranks over which each sequence is cut (context parallelism); they are given the same samples."""
    tp: Count = 1
    """Ranks over which each matrix is cut (tensor parallelism); they are given the same samples."""
    pp: Count = 1
    """Ranks over which the layers are dealt out (pipeline parallelism); they are given the same samples."""
    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """With pp: the order in which its ranks run microbatches. Each has one stage of the layers with GPipe and 1F1B, and
    two with any other."""
    sequence_parallel: bool = False
    """With tp: each of its ranks keeps a stretch of the sequence between matrices, not all of it."""
    loss_parallel: bool = False
    """With tp: logits stay cut by the vocabulary; for losses that are a cross-entropy of them."""

"""Choices: what a recipe leaves open, and a run may choose for speed and memory; the gradient is the same."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import product

from megabatch.train.config import Config
from megabatch.train.config.batch_size import sizes_of

FUSED_ON_GPUS = ("Adam", "AdamW", "SGD")  # torch's others are fused on CPUs only
REDUCTIONS = {  # how the model is wrapped → policies worth a run, and those that cost more and save nothing
    "plain": (("last",), ()),
    "ddp": (("last",), ("every",)),
    "replicate": (("last",), ("every",)),
    "fsdp2": (("every", "last"), ()),
    "hsdp": (("replica_last", "last"), ("every",)),
}


@dataclass(frozen=True)
class Choice:
    """One way to run an update."""

    micro_batch_size: int
    num_microbatches: int
    sync: str
    reshard: bool  # FSDP2 drops what it gathered after each forward, and gathers it again for the backward
    recompute: bool  # activations in backward
    fused: bool  # the optimizer

    def needs_as_much_as(self, other: "Choice") -> bool:
        """Whether this one needs no less memory than the other, whatever the model; but for gradients that the other
        keeps between microbatches."""
        return (
            self.micro_batch_size >= other.micro_batch_size
            and (self.sync == other.sync or self.num_microbatches == 1)
            and self.reshard <= other.reshard
            and self.recompute <= other.recompute
            and self.fused <= other.fused
        )


@dataclass(frozen=True)
class Grid:
    """The values of each axis, the better ones first."""

    samples_per_rank: int
    micro_batch_sizes: tuple[int, ...]
    syncs: tuple[str, ...]
    costlier_syncs: tuple[str, ...]  # that send more and save nothing
    reshards: tuple[bool, ...]
    recomputes: tuple[bool, ...]
    fuseds: tuple[bool, ...]

    def choices(self) -> list[Choice]:
        """All of them; what may make another needless comes before it."""
        syncs = self.syncs + self.costlier_syncs
        axes = product(self.micro_batch_sizes, syncs, self.reshards, self.recomputes, self.fuseds)
        return list(dict.fromkeys(self.choice(*values) for values in axes))

    def choice(self, size: int, sync: str, reshard: bool, recompute: bool, fused: bool) -> Choice:
        num_microbatches = -(-self.samples_per_rank // size)
        # A single microbatch is reduced when it ends, whatever the policy.
        return Choice(
            size, num_microbatches, self.syncs[0] if num_microbatches == 1 else sync, reshard, recompute, fused
        )

    def better(self, choice: Choice) -> Choice | None:
        """The choice that costs less and needs no more memory, whatever the model; None where there is none."""
        sync = self.syncs[0] if choice.sync in self.costlier_syncs else choice.sync
        found = replace(choice, sync=sync, fused=self.fuseds[0])
        return None if found == choice else found


def grid_of(
    config: Config, fixed: Collection[str], wrapped: str, dp_degree: int, length_tokens: int | None = None
) -> Grid:
    """What is open; a key that the command line states (``fixed``) is not.

    Args:
        config: The recipe, with the command line's overrides.
        fixed: Keys that the command line states.
        wrapped: A key of `REDUCTIONS`.
        dp_degree: Ranks that see different samples.
        length_tokens: Of the longest sample.
    """
    samples_per_rank = -(-sizes_of(config.update).largest // dp_degree)
    syncs, costlier = REDUCTIONS[wrapped]
    if config.update.sync != "auto" and ("update.sync" in fixed or config.update.sync not in syncs):
        syncs, costlier = (config.update.sync,), ()
    sizes = micro_batch_sizes(config, fixed, samples_per_rank)
    cap = config.update.max_microbatch_tokens
    if "update.max_microbatch_tokens" in fixed and isinstance(cap, int) and length_tokens is not None:
        sizes = tuple(size for size in sizes if size * length_tokens <= cap) or sizes[:1]
    recomputes = (False, True)
    if "model.activation_checkpointing" in fixed or config.model.function is not None:  # a module may not have it
        recomputes = (config.model.activation_checkpointing,)
    return Grid(
        samples_per_rank, sizes, syncs, costlier, reshards_of(config, fixed, wrapped), recomputes, fuseds_of(config)
    )


def reshards_of(config: Config, fixed: Collection[str], wrapped: str) -> tuple[bool, ...]:
    """Whether FSDP2 may keep what it has gathered."""
    if wrapped not in ("fsdp2", "hsdp"):
        return (True,)
    return (config.parallel.reshard_after_forward,) if "parallel.reshard_after_forward" in fixed else (True, False)


def micro_batch_sizes(config: Config, fixed: Collection[str], samples_per_rank: int) -> tuple[int, ...]:
    """Microbatches of 1, 2, 4, ... samples, of what the recipe says, and of all of a rank's samples."""
    said = config.update.micro_batch_size
    if said is not None and "update.micro_batch_size" in fixed:
        return (min(said, samples_per_rank),)
    powers = [2**power for power in range(samples_per_rank.bit_length())]
    return tuple(sorted({size for size in (*powers, said or 1, samples_per_rank) if size <= samples_per_rank}))


def fuseds_of(config: Config) -> tuple[bool, ...]:
    """Whether the optimizer is fused: as its options say, else where torch has it, which the trainer takes."""
    options, optim = config.optim.options, config.optim
    if optim.function is not None or optim.name not in FUSED_ON_GPUS or "foreach" in options:
        return (False,)
    return (bool(options["fused"]),) if "fused" in options else (True, False)

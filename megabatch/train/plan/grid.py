"""Grid: the configurations of one update that a plan compares. All of them compute the same gradient."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from statistics import mean
from typing import Any, NamedTuple

from megabatch import Plan, plan
from megabatch.batching import find_chunks
from megabatch.pipeline import plan_steps
from megabatch.planning import balance, best_fit
from megabatch.train.config import Config, ParallelConfig
from megabatch.train.config.batch_size import sizes_of
from megabatch.train.parallel.pipeline_stages import filled_up, per_rank

GATHER_ONCE = "gather_once"
# torch's other optimizers are fused on CPUs only.
FUSED_ON_GPUS = ("Adam", "AdamW", "SGD")
# Policies that send more and save nothing are left out.
SYNCS = {
    "plain": ("last",),
    "ddp": ("last",),
    "replicate": ("last",),
    "fsdp2": ("every", "last", GATHER_ONCE),
    "hsdp": ("replica_last", "last", GATHER_ONCE),
}
# These policies keep the least.
WRAPPERS_OWN = ("every", "replica_last")


@dataclass(frozen=True)
class Choice:
    """One configuration."""

    micro_batch_size: int
    num_microbatches: int
    sync: str
    reshard: bool  # FSDP2 frees what it gathered after each forward, and gathers again for the backward
    recompute: bool | str  # activations in the backward; "selective" keeps some
    fused: bool  # the optimizer; the same in all choices of a plan
    fill: float = 1.0  # mean tokens of a microbatch, by those of as many of the longest samples
    num_together: int = 0  # of a pipeline: microbatches of its largest schedule step; 0: all run together
    bubbles: float = 1.0  # of a pipeline: idle time of all its steps, divided by that of one step of mean microbatches
    limit_tokens: int | None = None  # of a microbatch; None: samples limit it

    @property
    def limit(self) -> "Limit":
        return Limit(self.micro_batch_size, self.limit_tokens)

    @property
    def largest_step(self) -> "Choice":
        """The same choice with the microbatches that a pipeline runs together, which its memory depends on."""
        return replace(self, num_microbatches=self.num_together, num_together=0) if self.num_together else self

    def most_tokens(self, length_tokens: int) -> int:
        """Return the limit of a microbatch's tokens, by those of the longest sample."""
        return self.limit_tokens or self.micro_batch_size * length_tokens

    @property
    def num_steps(self) -> float:
        """Microbatches of the update, by those of the largest schedule step."""
        return self.num_microbatches / self.largest_step.num_microbatches

    def differs_in_sync(self, choice: "Choice") -> bool:
        """Return True for choices that differ in the policy alone. What "gather_once" gathers is never freed early."""
        reshard = self.reshard if GATHER_ONCE in (self.sync, choice.sync) else choice.reshard
        return replace(choice, sync=self.sync, reshard=reshard) == self

    def needs_as_much_as(self, choice: "Choice") -> bool:
        """Return True if this needs at least the memory of ``choice`` for any model.

        Gradients that ``choice`` keeps between microbatches are not counted.
        """
        keeps_more = choice.sync in WRAPPERS_OWN and (self.sync == "last" or choice.reshard)
        return self._keeps_as_much_as(choice) and (self.sync == choice.sync or keeps_more)

    def _keeps_as_much_as(self, choice: "Choice") -> bool:
        is_as_large = self.micro_batch_size >= choice.micro_batch_size and self.reshard <= choice.reshard
        return is_as_large and self.recompute in (choice.recompute, False)

    def takes_no_longer_than(self, choice: "Choice") -> bool:
        """Return True if this computes and gathers at most what ``choice`` does, in at most as many microbatches."""
        is_full = self.fill == choice.fill == 1
        has_no_more = self.num_microbatches <= choice.num_microbatches and self.sync == choice.sync
        return self._keeps_as_much_as(choice) and has_no_more and (is_full or self._computed <= choice._computed)

    @property
    def _computed(self) -> float:
        """Tokens of an update with padding, by those of the longest sample."""
        return self.num_microbatches * self.micro_batch_size * self.fill


class Limit(NamedTuple):
    """The limit of a microbatch."""

    micro_batch_size: int  # samples; where tokens limit it, as many of the longest samples, of which a rank has enough
    tokens: int | None = None  # None: samples limit it

    def as_keys(self) -> dict[str, Any]:
        """Return the limit as an argument of `megabatch.plan`."""
        if self.tokens is None:
            return {"micro_batch_size": self.micro_batch_size}
        return {"max_microbatch_tokens": self.tokens}


class Split(NamedTuple):
    """The microbatches into which a rank splits an update, on average over a few updates."""

    num_microbatches: int
    fill: float = 1.0  # mean tokens of a microbatch, by those of as many of the longest samples
    num_together: int = 0  # of a pipeline: microbatches of its largest schedule step; 0: all run together
    bubbles: float = 1.0  # of a pipeline: idle time of all its steps, divided by that of one step of mean microbatches


class Balance(NamedTuple):
    """Padding and the busiest data rank of an update, on average over a few updates."""

    padding: float  # fraction of the computed tokens of all ranks that are padding, in [0, 1)
    busiest_over_ideal: float  # tokens that the busiest rank computes, by an even share without padding


@dataclass(frozen=True)
class UpdateLengths:
    """Lengths of the samples of a few updates, and how a recipe splits them."""

    updates: tuple[tuple[int, ...], ...]
    longest_tokens: int  # of all samples; longer ones are cut into chunks of as many
    one_row: bool  # the samples of a microbatch lie in one row, without padding
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @property
    def num_tokens(self) -> float:
        return mean(map(sum, self.updates))

    def split(self, limit: Limit, dp_degree: int) -> Split:
        shares = [self._deal(lengths, limit, dp_degree) for lengths in self.updates]
        most_tokens = limit.micro_batch_size * self.longest_tokens
        if self.parallel.pp > 1:
            return self._split_in_steps(shares, limit, most_tokens)
        counts = [self._count_microbatches(ranks, limit) for ranks in shares]
        num_microbatches = max(1, round(mean(num for num, _ in counts)))
        return Split(num_microbatches, mean(tokens for _, tokens in counts) / (num_microbatches * most_tokens))

    def balance(self, limit: Limit, dp_degree: int) -> Balance:
        """Return how evenly an update is dealt over the data ranks."""
        updates: list[list[int]] = []
        for lengths in self.updates:
            ranks = self._deal(lengths, limit, dp_degree)
            updates.append([rank.num_tokens if self.one_row else rank.padded_tokens for rank in ranks])
        padding = 1 - self.num_tokens / mean(map(sum, updates))
        return Balance(padding, mean(map(max, updates)) * dp_degree / self.num_tokens)

    def _deal(self, lengths: Sequence[int], limit: Limit, dp_degree: int) -> list[Plan]:
        """Return each rank's plan, dealt as a run deals: one by one in a row or in a pipeline, else in groups."""
        is_cut = max(lengths) > self.longest_tokens
        if not self.one_row and self.parallel.pp == 1 and not is_cut:
            return plan(lengths, dp_degree=dp_degree, **limit.as_keys())
        shares = [[lengths[sample] for sample in share] for share in balance(lengths, dp_degree)]
        if is_cut:
            chunks = [[find_chunks(0, length, self.longest_tokens) for length in share] for share in shares]
            shares = [[chunk.stop - chunk.start for part in share for chunk in part] for share in chunks]
        return [plan(share, **limit.as_keys())[0] for share in shares]

    def _count_microbatches(self, ranks: Sequence[Plan], limit: Limit) -> tuple[int, int]:
        """Return the microbatches of one update, and the tokens that the slowest rank computes."""
        num_microbatches = max(rank.num_microbatches for rank in ranks)
        if not self.one_row:
            return num_microbatches, max(rank.padded_tokens for rank in ranks)
        if limit.tokens is not None:
            num_microbatches = max(
                len(best_fit([max(1, length) for length in rank.lengths], limit.tokens)) for rank in ranks
            )
        return num_microbatches, max(rank.num_tokens for rank in ranks)

    def _split_in_steps(self, shares: Sequence[Sequence[Plan]], limit: Limit, most_tokens: int) -> Split:
        """Return the microbatches of a pipeline, dummy ones included, which all ranks run in the same steps."""
        order = self.parallel.schedule, self.parallel.pp, per_rank(self.parallel)
        updates = [plan_steps([rank.lengths for rank in ranks], *order, **limit.as_keys()) for ranks in shares]
        num_microbatches = max(1, round(mean(sum(step.num_microbatches for step in steps) for steps in updates)))
        num_together = min(num_microbatches, max(step.num_microbatches for steps in updates for step in steps))
        computed = mean(sum(step.num_microbatches * step.rows * step.length for step in steps) for steps in updates)
        fill = computed / (num_microbatches * most_tokens)
        filling = mean(sum(step.rows * step.length for step in steps) for steps in updates) / most_tokens
        return Split(num_microbatches, fill, num_together, filling / fill)


@dataclass(frozen=True)
class Grid:
    """The values of each axis, the better ones first."""

    samples_per_rank: int
    limits: tuple[Limit, ...]
    syncs: tuple[str, ...]
    reshards: tuple[bool, ...]
    recomputes: tuple[bool | str, ...]
    fused: bool
    dp_degree: int = 1
    lengths: UpdateLengths | None = None  # None: every sample counts as long as the longest
    filled: Callable[[int], int] = int  # microbatches → as many as run: a pipeline's schedule may fill up

    def choices(self) -> list[Choice]:
        choices: list[Choice] = []
        limits: dict[tuple[int, Split], Limit] = {}
        for limit in self.limits:
            limits.setdefault((limit.micro_batch_size, self._split(limit)), limit)
        for ((size, split), limit), sync, reshard, recompute in product(
            limits.items(), self.syncs, self.reshards, self.recomputes
        ):
            num, fill, num_together, bubbles = split
            # A single microbatch is reduced at its end anyway.
            sync = self.syncs[0] if num == 1 else sync
            reshard = reshard and sync != GATHER_ONCE
            choices.append(
                Choice(size, num, sync, reshard, recompute, self.fused, fill, num_together, bubbles, limit.tokens)
            )
        return list(dict.fromkeys(choices))

    def _split(self, limit: Limit) -> Split:
        if self.lengths is None:
            return Split(self.filled(-(-self.samples_per_rank // limit.micro_batch_size)))
        return self.lengths.split(limit, self.dp_degree)


def build_grid(
    config: Config, stated: Collection[str], wrapped: str, dp_degree: int, length_tokens: int,
    updates: tuple[tuple[int, ...], ...] = (), num_chunks: int = 1,
) -> Grid:  # fmt: skip
    """Return the grid of a recipe.

    Args:
        config: The recipe, with the command line's overrides.
        stated: Keys that the command line sets; they do not vary.
        wrapped: A key of `SYNCS`.
        dp_degree: Ranks that see different samples.
        length_tokens: Of the longest sample, or of a chunk of it.
        updates: Lengths of the samples of a few updates, if the data is read.
        num_chunks: Of the longest sample. Each is a microbatch.
    """
    samples_per_rank = -(-sizes_of(config.update).largest // dp_degree) * num_chunks
    syncs = SYNCS[wrapped] if config.parallel.pp == 1 else ("last",)
    if config.update.sync != "auto" and ("update.sync" in stated or config.update.sync not in syncs):
        syncs = (config.update.sync,)
    reshards = (True,)
    if wrapped in ("fsdp2", "hsdp"):
        is_stated = "parallel.reshard_after_forward" in stated
        reshards = (config.parallel.reshard_after_forward,) if is_stated else (True, False)
    recompute = config.model.activation_checkpointing
    recomputes = (False, True) if isinstance(recompute, bool) else (False, recompute, True)
    # A module may not have it, and chunks keep no keys under it.
    is_fixed = config.model.function is not None or config.update.long_samples is not None
    if "model.activation_checkpointing" in stated or is_fixed:
        recomputes = (recompute,)
    lengths = UpdateLengths(updates, length_tokens, config.update.one_row, config.parallel) if updates else None
    if num_chunks > 1:
        limits = [Limit(1, length_tokens)]
    else:
        limits = _limits(config, stated, samples_per_rank, length_tokens, is_ragged=lengths is not None)
    filled = int if config.parallel.pp == 1 else partial(filled_up, config.parallel)
    optim, options = config.optim, config.optim.options
    can_be_fused = optim.function is None and optim.name in FUSED_ON_GPUS and "foreach" not in options
    fused = can_be_fused and bool(options.get("fused", True))
    return Grid(samples_per_rank, tuple(limits), syncs, reshards, recomputes, fused, dp_degree, lengths, filled)


def _limits(
    config: Config, stated: Collection[str], samples_per_rank: int, length_tokens: int, *, is_ragged: bool
) -> list[Limit]:
    """Return the recipe's own limit, powers of two and all of a rank's samples; in tokens, those of the longest."""
    size_of_recipe, cap = config.update.micro_batch_size, config.update.max_microbatch_tokens
    if size_of_recipe is not None and "update.micro_batch_size" in stated:
        return [Limit(min(size_of_recipe, samples_per_rank))]
    powers = {2**power for power in range(samples_per_rank.bit_length())}
    sizes = sorted({size for size in (*powers, size_of_recipe or 1, samples_per_rank) if size <= samples_per_rank})
    if cap is None:
        return [Limit(size) for size in sizes]
    limits = [Limit(size, size * length_tokens) for size in sizes]
    if isinstance(cap, int) and cap >= length_tokens:
        num_rows = -(-cap // length_tokens) if is_ragged else cap // length_tokens
        is_bound = "update.max_microbatch_tokens" in stated
        smaller = [limit for limit in limits if not is_bound or limit.micro_batch_size * length_tokens <= cap]
        limits = [Limit(min(num_rows, samples_per_rank), cap), *smaller]
    return limits

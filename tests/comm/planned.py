"""The cost of a policy: collectives and bytes of one update, and the gradient held between microbatches.

Formulas are written once. The tests hold them against what is counted, and docs/parallelism.md is made of them.
"""

from dataclasses import dataclass
from typing import NamedTuple

Counts = dict[str, int]


class Sizes(NamedTuple):
    """The numbers that the formulas speak of."""

    C: int  # calls of forward_backward in an update
    N: int  # microbatches of a call, on each rank
    P: int  # bytes of the gradient; under tensor parallelism of this rank's part
    R: int  # bytes of the root's own group of it
    T: int  # parameters, as tensors
    B: int  # buckets of DDP
    F: int  # buckets of 25 MiB in which a model without a wrapper is summed; a larger tensor is one by itself
    G: int  # groups of FSDP: the modules that were wrapped
    S: int  # ranks over which a gradient is sharded
    K: int = 0  # parameters of norms under sequence parallelism
    Q: int = 0  # bytes of their gradients
    E: int = 0  # bytes of an embedding that tensor parallelism keeps elsewhere: torch makes its gradient whole


Formulas = dict[str, tuple[str, str]]  # by collective: how many, and how many bytes


@dataclass(frozen=True)
class Policy:
    """A wrapper with a sync: the call that wraps, what an update costs, and when it is the one to take."""

    wrapper: str
    sync: str
    collectives: Formulas
    held: str  # bytes of gradient on a rank between two microbatches of the first call
    when: str


def once(kind: str, number: str, size: str) -> Formulas:
    """With the last microbatch of each call."""
    return {kind: (f"C*{number}", f"C*{size}")}


def each(kind: str, number: str, size: str) -> Formulas:
    """With every microbatch."""
    return {kind: (f"C*N*{number}", f"C*N*{size}")}


GATHERED = each("all_gather", "(2*G-1)", "(2*P-R)")  # the root stays gathered between forward and backward
UNUSED = {"all_reduce": ("C*(B+1)", "C*(P+4*T)")}  # and one message of which parameters were used
UNUSED_EVERY = {"all_reduce": ("C*N*(B+1)", "C*N*(P+4*T)")}

POLICIES = [
    Policy("plain", "last", {"all_reduce": ("F", "P")}, "P",
           "a few ranks, or a model that no wrapper suits: nothing overlaps"),
    Policy("ddp", "last", once("all_reduce", "B", "P"), "P",
           "the model and its gradient fit on each rank; reduced behind the last backward"),
    Policy("ddp", "every", each("all_reduce", "B", "P"), "P", "never cheaper than last; for comparison"),
    Policy("ddp-find-unused", "last", UNUSED, "P", "parameters that some microbatches do not use"),
    Policy("ddp-find-unused", "every", UNUSED_EVERY, "P", "never cheaper than last"),
    Policy("ddp-static-graph", "last", once("all_reduce", "B", "P"), "P",
           "the same parameters are used every time; the first microbatch of all is reduced too"),
    Policy("ddp-static-graph", "every", each("all_reduce", "B", "P"), "P", "never cheaper than last"),
    Policy("ddp-bucket-view", "last", once("all_reduce", "B", "P"), "P",
           "DDP where memory is short: no second copy of the gradient in its buckets"),
    Policy("ddp-bucket-view", "every", each("all_reduce", "B", "P"), "P", "never cheaper than last"),
    Policy("replicate", "last", once("all_reduce", "G", "P"), "P", "as DDP, and under tensor or pipeline parallelism"),
    Policy("replicate", "every", each("all_reduce", "G", "P"), "P", "never cheaper than last"),
    Policy("fsdp2", "every", GATHERED | each("reduce_scatter", "G", "P"), "P//S",
           "the gradient does not fit on a rank: only a shard is kept"),
    Policy("fsdp2", "last", GATHERED | once("reduce_scatter", "G", "P"), "P",
           "slow links and room for the whole gradient"),
    Policy("fsdp2", "gather_once", once("all_gather", "G", "P") | each("reduce_scatter", "G", "P"), "P//S",
           "slow links and room for all gathered parameters, which take less than the gradient in float32"),
    Policy("hsdp", "replica_last",
           GATHERED | each("reduce_scatter", "G", "P") | once("all_reduce", "G", "P//S"), "P//S",
           "shards inside a node, replicas across: the slow link is used once"),
    Policy("hsdp", "every", GATHERED | each("reduce_scatter", "G", "P") | each("all_reduce", "G", "P//S"), "P//S",
           "never cheaper than replica_last"),
    Policy("hsdp", "last", GATHERED | once("reduce_scatter", "G", "P") | once("all_reduce", "G", "P//S"), "P",
           "room for the whole gradient: both links are used once"),
    Policy("hsdp", "gather_once",
           once("all_gather", "G", "P") | each("reduce_scatter", "G", "P") | once("all_reduce", "G", "P//S"), "P//S",
           "as FSDP2"),
    Policy("fsdp1", "every", GATHERED | each("reduce_scatter", "G", "P"), "P//S", "code that is still on FSDP1"),
    Policy("fsdp1", "last", GATHERED | once("reduce_scatter", "G", "P"), "P", "as FSDP2"),
    Policy("fsdp1-grad-op", "every", each("all_gather", "G", "P") | each("reduce_scatter", "G", "P"), "P//S",
           "parameters fit gathered: one gather less in each backward"),
    Policy("fsdp1-grad-op", "last", once("all_gather", "G", "P") | once("reduce_scatter", "G", "P"), "P",
           "parameters and gradient fit: everything is sent once"),
    Policy("fsdp1-no-shard", "last", once("all_reduce", "G", "P"), "P", "DDP is better"),
    Policy("fsdp1-no-shard", "every", each("all_reduce", "G", "P"), "P", "never cheaper than last"),
    Policy("fsdp1-hybrid", "every", GATHERED | each("reduce_scatter", "G", "P") | each("all_reduce", "G", "P//S"),
           "P//S", "FSDP2 has replica_last"),
    Policy("fsdp1-hybrid", "last", GATHERED | once("reduce_scatter", "G", "P") | once("all_reduce", "G", "P//S"), "P",
           "as HSDP"),
    Policy("tp", "last", {"all_reduce": ("F", "P")}, "P", "layers too wide for a rank, few data ranks"),
    Policy("tp-sp", "last", {"all_reduce": ("F+K", "P+Q+E")}, "P+E",
           "and long sequences: the norms' gradients are summed once per update"),
    Policy("fsdp2-tp", "every", GATHERED | each("reduce_scatter", "G", "P"), "P//S", "large models on many nodes"),
    Policy("fsdp2-tp", "last", GATHERED | once("reduce_scatter", "G", "P"), "P", "as FSDP2"),
    Policy("fsdp2-tp-sp", "every", GATHERED | each("reduce_scatter", "G", "P") | each("all_reduce", "K", "Q"), "P//S",
           "as above; the norms' gradients are summed where FSDP2 reduces"),
    Policy("fsdp2-tp-sp", "last", GATHERED | once("reduce_scatter", "G", "P") | once("all_reduce", "K", "Q"), "P+E",
           "fewer, smaller sums of the norms' gradients"),
    Policy("replicate-tp", "last", once("all_reduce", "G", "P"), "P", "tensor parallelism with whole replicas"),
    Policy("replicate-tp", "every", each("all_reduce", "G", "P"), "P", "never cheaper than last"),
]  # fmt: skip
AUTO = {policy.wrapper: policy.sync for policy in reversed(POLICIES)}  # what "auto" means: the first of a wrapper


def evaluate(formula: str, sizes: Sizes) -> int:
    """A formula's value."""
    return int(eval(formula, {"__builtins__": {}}, sizes._asdict()))


def expected(policy: Policy, sizes: Sizes, activations: Counts) -> Counts:
    """Collectives and bytes of one update on a rank; ``activations`` are what plain PyTorch has in one microbatch."""
    counts = {name: number * sizes.C * sizes.N for name, number in activations.items()}
    for kind, (number, size) in policy.collectives.items():
        counts[kind] = counts.get(kind, 0) + evaluate(number, sizes)
        counts[f"{kind}_bytes"] = counts.get(f"{kind}_bytes", 0) + evaluate(size, sizes)
    return counts


def messages(wrapper: str, axes: int, data_axes: int, calls: int) -> int:
    """Small gathers of one update: what the ranks agree on before a call, and tell each other at the end."""
    asks_who_has_gradients = axes if wrapper in ("plain", "tp", "tp-sp") and data_axes else 0
    return (calls + 1) * axes + asks_who_has_gradients

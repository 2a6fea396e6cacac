"""What a ledger notes: how memory is divided, and what each part of an update takes."""

from dataclasses import dataclass, field

from megabatch.simulate.traffic import Key, Sent

CATEGORIES = (
    "parameters",  # those that a rank keeps: its shards, or all
    "buffers",
    "optimizer states",
    "gradients",  # likewise
    "unsharded parameters",
    "unsharded gradients",
    "communication",  # DDP's buckets, what FSDP2 gathers into and reduces from
    "activations",
    "temporaries",
)
"""What memory is divided into: the keys of `Moment.bytes` and of `Simulated.at_peak`, in the order of a chart."""
HOST = "host"  # category of what only a host's memory holds


@dataclass
class Phase:
    """A part of an update: a forward, a backward, the step."""

    peak_bytes: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)  # by category
    flops: int = 0
    compute_seconds: float = 0.0
    arithmetic_seconds: float = 0.0  # of those, where arithmetic and not memory takes the time
    sent: dict[Key, Sent] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> int:
        """By this rank."""
        return sum(each.sent_bytes for each in self.sent.values())

    @property
    def traffic_seconds(self) -> float:
        """One collective after the other."""
        return sum(each.seconds for each in self.sent.values())

    @property
    def seconds(self) -> float:
        """Traffic hides behind computing, or computing behind traffic."""
        return max(self.compute_seconds, self.traffic_seconds)


@dataclass(frozen=True)
class Moment:
    """Memory at a time of a simulated update, in bytes by `CATEGORIES`."""

    phase: str
    seconds: float  # of computing, since the record began
    bytes: dict[str, int]  # by category

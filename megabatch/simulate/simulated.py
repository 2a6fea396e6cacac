"""Simulated: what an update takes, read from the phases that were run."""

from dataclasses import dataclass, replace

from megabatch.errors import PlanError
from megabatch.simulate.allocator import Event, Reserved, reserved
from megabatch.simulate.devices import Device
from megabatch.simulate.record import Moment, Phase
from megabatch.simulate.traffic import Sent

NUM_TELLING = 2  # microbatches after which nothing new happens


@dataclass(frozen=True)
class Simulated:
    """What one update of ``num_microbatches`` takes on rank 0."""

    phases: dict[str, Phase]  # those that were run, in order
    where: str  # the phase in which the peak is
    steady_bytes: int  # that stay from update to update: parameters, states, buckets
    host_bytes: int  # at most, of what CPU offload keeps on the host; in none of the others
    sync: str  # the policy that was followed
    num_microbatches: int
    times: dict[str, int]  # how often each phase happens in an update
    num_parameters: int  # of the whole model
    history: tuple[Moment, ...]  # where memory stops rising or falling
    trace: tuple[Event, ...]  # of both updates
    device: Device

    @property
    def peak_bytes(self) -> int:
        """Allocated at once, at most."""
        return self.phases[self.where].peak_bytes

    @property
    def at_peak(self) -> dict[str, int]:
        """The same by category."""
        return self.phases[self.where].at_peak

    @property
    def sent(self) -> tuple[Sent, ...]:
        """What this rank sends, by collective and axis."""
        sums: dict[object, Sent] = {}
        for name, phase in self.phases.items():
            for key, each in phase.sent.items():
                sums[key] = each.times_plus(self.times[name], sums.get(key))
        return tuple(sums.values())

    @property
    def sent_bytes(self) -> int:
        return sum(each.sent_bytes for each in self.sent)

    @property
    def flops(self) -> int:
        return sum(self.times[name] * phase.flops for name, phase in self.phases.items())

    @property
    def seconds(self) -> float:
        """Of computing and sending, which overlap within a phase and not between phases."""
        return sum(self.times[name] * phase.seconds for name, phase in self.phases.items())

    @property
    def compute_seconds(self) -> float:
        return sum(self.times[name] * phase.compute_seconds for name, phase in self.phases.items())

    @property
    def traffic_seconds(self) -> float:
        return sum(self.times[name] * phase.traffic_seconds for name, phase in self.phases.items())

    @property
    def bound(self) -> str:
        """What takes most of the time: "compute", "memory bandwidth" or "traffic"."""
        sums = dict.fromkeys(("compute", "memory bandwidth", "traffic"), 0.0)
        for name, phase in self.phases.items():
            memory_seconds = phase.compute_seconds - phase.arithmetic_seconds
            kind = "compute" if phase.arithmetic_seconds >= memory_seconds else "memory bandwidth"
            kind = "traffic" if phase.traffic_seconds > phase.compute_seconds else kind
            sums[kind] += self.times[name] * phase.seconds
        return max(sums, key=sums.__getitem__)

    def at(self, num_microbatches: int) -> "Simulated":
        """The same for another number of microbatches, of which as many must have been run as tell (two)."""
        num_run = sum(name.startswith("forward") for name in self.phases)
        if num_microbatches != num_run and not num_microbatches > num_run == NUM_TELLING:
            raise PlanError(
                f"{num_run} microbatches were run, which do not tell of {num_microbatches}; simulate with "
                f"num_microbatches={num_microbatches}"
            )
        return replace(self, num_microbatches=num_microbatches, times=times_of(num_run, num_microbatches))

    def reserved(self, limit_bytes: int | None = None, *, expandable: bool = False) -> Reserved:
        """What CUDA's caching allocator reserves over both updates, and whether it fits into ``limit_bytes``."""
        return reserved(self.trace, limit_bytes=limit_bytes, expandable=expandable)


def times_of(num_run: int, num_microbatches: int) -> dict[str, int]:
    """How often each phase that was run happens in an update: what lies between the first forward and the last
    backward stands for all that are like it."""
    times = {f"{phase} {index + 1}": 1 for index in range(num_run) for phase in ("forward", "backward")} | {"step": 1}
    if num_run < num_microbatches:
        times["backward 1"] = times["forward 2"] = num_microbatches - 1
    return times

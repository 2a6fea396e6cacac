"""Ledger of memory by category while code runs, with its arithmetic and its traffic.

The ledger counts storages, so views cost nothing and it sees each one freed. It counts fake tensors (a prediction) and
real ones (a measurement). Two things happen outside of torch's operations, so the ledger replaces a method of torch
while it is open: the resizing of storages (FSDP2 frees its gathered parameters this way), and DTensor's trial runs of
an operation on tensors of the global shape, which take no memory. Only one ledger can be open at a time.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from megabatch.simulate.allocator import ROUND_BYTES, Event
from megabatch.simulate.devices import DEVICES, Device, cost_of, tensors_in
from megabatch.simulate.traffic import Collective, Key, Sent, collective_of, sent_by

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
HOST = "host"  # category of what only a host's memory holds
DEVICE_OF = torch.ops.prim.device.default  # of fake tensors alone
SILENT = ("prim", "profiler")  # namespaces of what holds and moves nothing


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
    """What was in memory at a time."""

    phase: str
    seconds: float  # of computing, since the record began
    bytes: dict[str, int]  # by category


@dataclass
class _Storage:
    """What the ledger knows of one."""

    num_bytes: int
    category: str
    name: int  # in the trace
    alive: Any = None  # a weak reference, which says when it is freed


class Ledger(TorchDispatchMode):
    """Counts while it is open.

    Args:
        device: What computes and sends, for the seconds.
        axes: The axes of the mesh of all ranks with their sizes, for the names of what is sent.
        on_host: Categories that lie in the host's memory; they are counted in ``host_bytes`` alone.
    """

    def __init__(
        self,
        device: Device = DEVICES["cpu"],
        axes: Mapping[str, int] | None = None,
        on_host: Iterable[str] = (),
    ) -> None:
        super().__init__()
        self.device, self.axes, self.on_host = device, dict(axes or {}), {*on_host, HOST}
        self.total_bytes = self.host_bytes = self.host_peak_bytes = 0
        self.held: Counter[str] = Counter()  # bytes by category
        self.phases: dict[str, Phase] = {}
        self.history: list[Moment] = []
        self.trace: list[Event] = []
        self.phase, self.category = "", "activations"
        self._record = Phase()
        self._seconds = 0.0
        self._storages: dict[int, _Storage] = {}  # by address
        self._streams: dict[int, tuple[int, object]] = {}  # by identity, which is kept with it
        self._names = self._muted = 0
        self._was_rising = True
        self._undo = contextlib.ExitStack()

    def enter_phase(self, name: str, category: str) -> None:
        """What follows is of this phase, and new storages of this category until they are tagged."""
        self._step()
        self.phase, self.category = name, category
        self._record = self.phases.setdefault(name, Phase())
        self._raise_peak()

    def begin(self) -> None:
        """Forget what was recorded, but not what is held."""
        self.phases.clear()
        self.history.clear()
        self._seconds, self.host_peak_bytes = 0.0, self.host_bytes
        self._record = Phase()

    def begin_trace(self) -> None:
        """Begin the trace with what is there now, in the order in which it came."""
        alive = sorted(self._storages.values(), key=lambda storage: storage.name)
        self.trace = [Event(True, each.name, each.num_bytes, 0) for each in alive if self._is_traced(each)]

    @property
    def peak(self) -> tuple[str, Phase]:
        """The phase with the highest peak, and its name."""
        return max(self.phases.items(), key=lambda each: each[1].peak_bytes)

    def tag(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Say what storages are for; those not seen before are counted from now on."""
        for tensor in tensors:
            for storage in () if tensor is None else storages_of(tensor):
                self._see(storage, category, retag=True)

    def __enter__(self) -> "Ledger":
        self._undo = contextlib.ExitStack()
        self._undo.enter_context(replaced(torch.UntypedStorage, "resize_", self._watch_resize))
        self._undo.enter_context(replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", self._mute_trials))
        try:
            super().__enter__()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self._step()
        try:
            super().__exit__(*error)
        finally:
            self._undo.close()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No compiler comes here, and to keep one out takes longer than what is done here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and not args[0].fake_mode.in_kernel_invocation:  # asked for more often than all others
            return args[0].fake_device
        for each in types:
            if hasattr(each, "__tensor_flatten__"):
                return NotImplemented  # so that what is inside of its operations is seen
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._muted or func.is_view or func.namespace in SILENT:
            return result
        for tensor in (result,) if isinstance(result, Tensor) else tensors_in((result,)):
            self._see(tensor.untyped_storage(), self.category)
        if (collective := collective_of(func, args, kwargs, result)) is not None:
            self._count_collective(collective)
        cost = cost_of(func, args, kwargs, result, self.device)
        self._record.flops += cost.flops
        self._record.compute_seconds += cost.seconds
        self._record.arithmetic_seconds += cost.seconds if cost.is_arithmetic else 0.0
        self._seconds += cost.seconds
        return result

    def _count_collective(self, collective: Collective) -> None:
        sent = sent_by(collective, self.axes, self.device)
        key = (sent.collective, sent.axis, sent.num_ranks)
        self._record.sent[key] = sent + self._record.sent[key] if key in self._record.sent else sent
        if collective.kind in ("all_gather", "reduce_scatter"):
            self.tag(collective.tensors, "communication")

    @contextlib.contextmanager
    def muted(self) -> Any:
        """What happens inside is not counted."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    def _see(self, storage: torch.UntypedStorage, category: str, *, retag: bool = False) -> None:
        address = _address(storage)
        known = self._storages.get(address)
        if known is None:
            self._count(storage, address, category)
            return
        num_bytes = _rounded(storage)
        if num_bytes != known.num_bytes:
            self._resize(known, num_bytes)
        if retag and known.category != category:
            self._move(known, category)

    def _count(self, storage: torch.UntypedStorage, address: int, category: str) -> None:
        self._names += 1
        known = self._storages[address] = _Storage(0, category, self._names)
        book = weakref.ref(self)

        def freed(_: object) -> None:
            if (ledger := book()) is not None and ledger._storages.get(address) is known:
                del ledger._storages[address]
                ledger._resize(known, 0)

        known.alive = weakref.ref(storage, freed)
        self._resize(known, _rounded(storage))

    def _resize(self, known: _Storage, num_bytes: int) -> None:
        if self._is_traced(known):
            self.trace.append(Event(False, known.name, known.num_bytes, 0))
        self._add(known.category, num_bytes - known.num_bytes)
        known.num_bytes = num_bytes
        self._names += 1
        known.name = self._names
        if self._is_traced(known):
            self.trace.append(Event(True, known.name, num_bytes, self._stream()))

    def _move(self, known: _Storage, category: str) -> None:
        """To another category; between device and host it is freed here and made there."""
        was_on_host, is_on_host = known.category in self.on_host, category in self.on_host
        if was_on_host != is_on_host:
            num_bytes = known.num_bytes
            self._resize(known, 0)
            known.category = category
            self._resize(known, num_bytes)
            return
        if not is_on_host:
            self.held[known.category] -= known.num_bytes
            self.held[category] += known.num_bytes
        known.category = category

    def _is_traced(self, known: _Storage) -> bool:
        return known.num_bytes > 0 and known.category not in self.on_host

    def _add(self, category: str, num_bytes: int) -> None:
        if category in self.on_host:
            self.host_bytes += num_bytes
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
            return
        if num_bytes and (num_bytes > 0) != self._was_rising:
            self._step()
            self._was_rising = num_bytes > 0
        self.held[category] += num_bytes
        self.total_bytes += num_bytes

    def _step(self) -> None:
        """Note what is held, where it stops rising or falling; a peak is always such a point."""
        self._raise_peak()
        self.history.append(Moment(self.phase, self._seconds, dict(+self.held)))

    def _raise_peak(self) -> None:
        if self.total_bytes > self._record.peak_bytes:
            self._record.peak_bytes, self._record.at_peak = self.total_bytes, dict(+self.held)

    def _stream(self) -> int:
        """The number of the stream in which something is allocated; FSDP2 has four."""
        stream = torch.cpu.current_stream()
        return self._streams.setdefault(id(stream), (len(self._streams), stream))[0]

    def _watch_resize(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if not self._muted and (known := self._storages.get(_address(storage))) is not None:
                num_bytes = _rounded(storage)
                if num_bytes != known.num_bytes:
                    self._resize(known, num_bytes)
            return result

        return resize_

    def _mute_trials(self, propagate: Callable[..., Any]) -> Callable[..., Any]:
        def muted(*args: Any, **kwargs: Any) -> Any:
            with self.muted():
                return propagate(*args, **kwargs)

        return muted


@contextlib.contextmanager
def tagging_shards(ledger: Ledger) -> Generator[None]:
    """While it is open, the ledger is told what FSDP2 gathers and what it accumulates, in any model."""

    def gathering(wait: Callable[..., Any]) -> Callable[..., Any]:
        def wait_for_unshard(group: Any) -> Any:
            result = wait(group)
            for parameter in group.fsdp_params:
                ledger.tag(getattr(parameter, "all_gather_outputs", ()), "unsharded parameters")
            return result

        return wait_for_unshard

    def reducing(after: Callable[..., Any]) -> Callable[..., Any]:
        def post_backward(group: Any, *unused: Any) -> Any:
            _tag_gradients(ledger, group)
            result = after(group, *unused)
            _tag_gradients(ledger, group)
            return result

        return post_backward

    with (
        replaced(FSDPParamGroup, "wait_for_unshard", gathering),
        replaced(FSDPParamGroup, "post_backward", reducing),
    ):
        yield


def _tag_gradients(ledger: Ledger, group: Any) -> None:
    for parameter in group.fsdp_params:
        unsharded = getattr(parameter, "_unsharded_param", None)
        ledger.tag((getattr(unsharded, "grad", None), parameter.unsharded_accumulated_grad), "unsharded gradients")
        ledger.tag((parameter.sharded_param.grad, group._partial_reduce_output), "gradients")


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """The storages of a tensor, of what it holds if it is a DTensor or the like."""
    if isinstance(tensor, DTensor):
        return storages_of(cast(Any, tensor)._local_tensor)
    if is_traceable_wrapper_subclass(tensor):
        inner = tensor.__tensor_flatten__()[0]
        return [storage for name in inner for storage in storages_of(getattr(tensor, name))]
    return [tensor.untyped_storage()]


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """A method of a class, replaced while this is open."""
    original, is_own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:  # it is inherited
            delattr(owner, name)


def _address(storage: torch.UntypedStorage) -> int:
    return cast(Any, storage)._cdata


def _rounded(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // ROUND_BYTES) * ROUND_BYTES

"""Ledger of memory by category while code runs, with its arithmetic and its traffic.

The ledger counts storages, so views cost nothing and it sees each one freed. It counts fake tensors (a prediction) and
real ones (a measurement). Two things happen outside of torch's operations, so the ledger replaces a method of torch
while it is open: the resizing of storages (FSDP2 frees its gathered parameters this way), and DTensor's trial runs of
an operation on tensors of the global shape, which take no memory. Only one ledger can be open at a time.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megabatch.simulate.allocator import ROUND_BYTES, Event
from megabatch.simulate.devices import CONTENTION, DEVICES, Device, busy_seconds, cast_bytes, cost_of, tensors_in
from megabatch.simulate.traffic import SEND, Collective, Key, Sent, count_traffic, parse_collective
from megabatch.torch_private.classes import local_tensor
from megabatch.torch_private.dtensors import trial_of_dtensor
from megabatch.torch_private.fsdp2_groups import awaits_gather, class_of_groups, partly_reduced, unsharded_parameter
from megabatch.torch_private.operations import (
    WAIT,
    TorchDispatchMode,
    UncompiledMode,
    address_of,
    is_traceable_wrapper_subclass,
)

CATEGORIES = (
    "parameters",  # the shards that a rank keeps, or all
    "buffers",
    "optimizer states",
    "gradients",  # the same
    "unsharded parameters",
    "unsharded gradients",
    "communication",  # DDP's buckets, and the buffers of FSDP2's collectives
    "activations",
    "temporaries",
)
"""Uses of a device's memory, as `Simulated` lists them."""
TO_DEVICE, TO_HOST = "to device", "to host"  # directions of a copy
HOST = "host"  # category of memory on the host only
DEVICE_OF = torch.ops.prim.device.default  # of fake tensors only
META = torch.device("meta")  # of tensors that only say a shape
SILENT = ("prim", "profiler")  # namespaces of operations without memory and work


@dataclass
class Phase:
    """A part of an update: a forward, a backward, the step."""

    peak_bytes: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)  # by category
    flops: int = 0
    compute_seconds: float = 0.0
    arithmetic_seconds: float = 0.0  # of those, in operations that arithmetic limits and not memory
    host_seconds: float = 0.0  # to launch the operations, and to compute on what is offloaded
    cpu_seconds: float = 0.0  # of those, the latter
    copy_seconds: float = 0.0  # of offloaded shards over PCIe, beside computing: the larger of both directions
    awaited_seconds: float = 0.0  # of collectives that computing waits for
    is_cpu: bool = False  # launches come before computing, not beside it
    fill: float = 1.0  # of a microbatch: tokens by those that were simulated, which computing and awaiting follow
    idle_seconds: float = 0.0  # of a pipeline's rank that waits for the others
    sent: dict[Key, Sent] = field(default_factory=dict)

    def repeated(self, num: float, *, gathers_once: bool = False) -> "Phase":
        """Return the phase with ``num`` times the work. Gradients are reduced as often as before.

        Args:
            num: How often the phase runs; a mean may be a fraction.
            gathers_once: Parameters are gathered as often as before, too.
        """

        def is_once(sent: Sent) -> bool:
            return sent.reduces_gradients or (gathers_once and sent.gathers_parameters)

        seconds = ("compute_seconds", "arithmetic_seconds", "host_seconds", "cpu_seconds", "copy_seconds",
                   "awaited_seconds")  # fmt: skip
        return replace(
            self,
            flops=round(num * self.flops),
            sent={key: sent if is_once(sent) else sent.times_plus(num) for key, sent in self.sent.items()},
            **{name: num * getattr(self, name) for name in seconds},
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends."""
        return sum(sent.sent_bytes for sent in self.sent.values())

    @property
    def traffic_seconds(self) -> float:
        """Seconds of all collectives, one after the other."""
        return sum(sent.seconds for sent in self.sent.values())

    @property
    def seconds(self) -> float:
        """Seconds of the phase; traffic overlaps with computing, except for what computing waits for."""
        return max(self._busy_seconds, self.copy_seconds) + self.fill * self.awaited_seconds + self.idle_seconds

    @property
    def _busy_seconds(self) -> float:
        computing = self.fill * self.compute_seconds
        return busy_seconds(computing, self.host_seconds, self.overlapped_seconds, is_cpu=self.is_cpu)

    @property
    def overlapped_seconds(self) -> float:
        """Seconds of the collectives that overlap with computing. Messages of a pipeline are part of the idle time."""
        messages = sum(sent.seconds for sent in self.sent.values() if sent.collective == SEND)
        return self.traffic_seconds - messages - self.awaited_seconds

    @property
    def bound(self) -> str:
        """The limit of the speed: "compute", "memory bandwidth", "launches", "host", "PCIe", "traffic" or "bubble"."""
        if self.idle_seconds > self.seconds - self.idle_seconds:
            return "bubble"
        traffic_seconds = self.overlapped_seconds + self.fill * self.awaited_seconds
        if self.copy_seconds > max(self._busy_seconds, traffic_seconds):
            return "PCIe"
        if 0 < self._busy_seconds <= traffic_seconds:
            return "traffic"
        if self.host_seconds > self.fill * self.compute_seconds + CONTENTION * self.overlapped_seconds:
            return "host" if 2 * self.cpu_seconds > self.host_seconds else "launches"
        return "compute" if 2 * self.arithmetic_seconds >= self.compute_seconds else "memory bandwidth"


ALLOCATE, FREE, MOVE, PHASE, BEGIN = "allocate", "free", "move", "phase", "begin"


class Step(NamedTuple):
    """A change of memory, or the beginning of a phase or of the record."""

    kind: str
    name: int = 0  # of the allocation
    num_bytes: int = 0
    stream: int = 0
    category: str = ""  # of the allocation; of a phase, its name
    before: str = ""  # the category that an allocation had before it moved


class MemoryLog:
    """Memory by category, step by step, with the peak of each phase.

    Args:
        on_host: Categories in the host's memory; only ``host_bytes`` counts them.
        is_cpu: Launches come before computing in every phase, not beside it.
    """

    def __init__(self, on_host: Iterable[str] = (), *, is_cpu: bool = False) -> None:
        self.on_host, self._is_cpu = {*on_host, HOST}, is_cpu
        self.total_bytes = self.host_bytes = self.host_peak_bytes = self.steady_bytes = 0
        self.held: Counter[str] = Counter()  # bytes by category
        self.phases: dict[str, Phase] = {}
        self.steps: list[Step] = []
        self.record = Phase(is_cpu=is_cpu)  # of the current phase
        self._was_rising = True

    def add(self, step: Step) -> None:
        """Log a step and count it."""
        self.steps.append(step)
        if step.kind in (PHASE, BEGIN):
            self.note_peak()
        if step.kind == ALLOCATE:
            self._count(step.category, step.num_bytes)
        elif step.kind == FREE:
            self._count(step.category, -step.num_bytes)
        elif step.kind == MOVE:
            if step.category not in self.on_host:
                self.held[step.before] -= step.num_bytes
                self.held[step.category] += step.num_bytes
        elif step.kind == PHASE:
            self.record = self.phases.setdefault(step.category, Phase(is_cpu=self._is_cpu))
            self.note_peak()
        else:
            self.phases.clear()
            self.host_peak_bytes, self.steady_bytes = self.host_bytes, self.total_bytes
            self.record = Phase(is_cpu=self._is_cpu)

    def note_peak(self) -> None:
        """Note the memory of the phase where it stops rising or ends, if it is the most so far."""
        if self.total_bytes > self.record.peak_bytes:
            self.record.peak_bytes, self.record.at_peak = self.total_bytes, dict(+self.held)

    @property
    def peak(self) -> tuple[str, Phase]:
        """Name and record of the phase with the highest peak."""
        return max(self.phases.items(), key=lambda named_phase: named_phase[1].peak_bytes)

    def _count(self, category: str, num_bytes: int) -> None:
        if category in self.on_host:
            self.host_bytes += num_bytes
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
            return
        if (num_bytes > 0) != self._was_rising:
            self.note_peak()
            self._was_rising = num_bytes > 0
        self.held[category] += num_bytes
        self.total_bytes += num_bytes


def trace_of(steps: Iterable[Step], on_host: Collection[str] = ()) -> list[Event]:
    """Return the allocations and releases of the device."""
    return [
        Event(step.kind == ALLOCATE, step.name, step.num_bytes, step.stream)
        for step in steps
        if step.kind in (ALLOCATE, FREE) and step.category not in on_host
    ]


@dataclass
class _Storage:
    """One entry of the ledger."""

    num_bytes: int
    category: str
    name: int  # in the log
    stream: int = 0
    alive: Any = None  # a weak reference, whose callback tells when it is freed


class Ledger(UncompiledMode, TorchDispatchMode):
    """A mode that counts memory, arithmetic and traffic while it is open.

    Args:
        device: Computes and sends; it determines the seconds.
        axes: Axes of the mesh of all ranks with their sizes, to name the traffic.
        on_host: Categories in the host's memory; only ``host_bytes`` counts them.
    """

    def __init__(
        self,
        device: Device = DEVICES["cpu"],
        axes: Mapping[str, int] | None = None,
        on_host: Iterable[str] = (),
    ) -> None:
        super().__init__()
        self.device, self.axes = device, dict(axes or {})
        self.log = MemoryLog(on_host, is_cpu=device.is_cpu)
        self.category = "activations"
        self._storages: dict[int, _Storage] = {}  # by address
        self._streams: dict[int, tuple[int, object]] = {}  # by identity, which is kept with it
        self._names = self._muted = 0
        self._offloads, self._is_on_device = bool(self.log.on_host - {HOST}), False
        self._copied = {TO_DEVICE: 0, TO_HOST: 0}  # bytes of the phase
        self._undo = contextlib.ExitStack()

    def enter_phase(self, name: str, category: str) -> None:
        """Begin or go on with a phase; new storages have this category until they are tagged."""
        self.category = category
        self._copied = dict.fromkeys(self._copied, 0)
        self.log.add(Step(PHASE, category=name))

    def begin(self) -> None:
        """Clear the record, but not the memory that is held."""
        self.log.add(Step(BEGIN))

    def begin_log(self) -> None:
        """Begin the log with the memory that is held now, in the order of its allocation."""
        alive = sorted(self._storages.values(), key=lambda storage: storage.name)
        self.log.steps = [Step(ALLOCATE, storage.name, storage.num_bytes, 0, storage.category) for storage in alive]

    def tag(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Set the category of storages, and count those not seen before."""
        for tensor in tensors:
            for storage in () if tensor is None else list_storages(tensor):
                self._note_storage(storage, category, retag=True)

    @contextlib.contextmanager
    def copying_shards(self, parameters: Sequence[Any]) -> Generator[None]:
        """Copy the offloaded shards of FSDP2's parameters to the device, and keep the copies while this is open."""
        before, self._is_on_device = self._is_on_device, True
        shards = [local_tensor(parameter.sharded_param) for parameter in parameters] if self._offloads else []
        casts = [parameter.param_dtype not in (None, parameter.sharded_param.dtype) for parameter in parameters]
        copied = [shard.nbytes for shard in shards]
        # A cast lets go of its copy before the next one; the ledger sees what it is cast to.
        uncast_bytes = sum(size for size, is_cast in zip(copied, casts, strict=False) if not is_cast)
        largest = max((size for size, is_cast in zip(copied, casts, strict=False) if is_cast), default=0)
        copy = _Storage(0, "communication", 0)
        self._resize(copy, -(-(uncast_bytes + largest) // ROUND_BYTES) * ROUND_BYTES)
        self.count_copy(TO_DEVICE, sum(copied))
        try:
            yield
        finally:
            self._is_on_device = before
            self._resize(copy, 0)

    def count_copy(self, direction: str, num_bytes: int) -> None:
        """Count a copy between the device and its host."""
        self._copied[direction] += num_bytes
        self.log.record.copy_seconds = max(self._copied.values()) / self.device.pcie_bytes_per_second

    @property
    def offloads(self) -> bool:
        """True if some categories are on the host."""
        return self._offloads

    def __enter__(self) -> "Ledger":
        self._undo = contextlib.ExitStack()
        self._undo.enter_context(replaced(torch.UntypedStorage, "resize_", self._watch_resize))
        self._undo.enter_context(replaced(*trial_of_dtensor(), self._mute_trials))
        try:
            super().__enter__()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.log.note_peak()
        try:
            super().__exit__(*error)
        finally:
            self._undo.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and not args[0].fake_mode.in_kernel_invocation:  # the most frequent operation by far
            return args[0].fake_device
        for kind in types:
            if hasattr(kind, "__tensor_flatten__"):
                return NotImplemented  # so that the operations inside of it come here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is WAIT:
            return args[0]
        if self._muted or func.is_view or func.namespace in SILENT or kwargs.get("device") == META:
            return result
        is_of_host = self._offloads and not self._is_on_device and self._is_of_host((*args, *kwargs.values()))
        category = HOST if is_of_host else self.category
        for tensor in (result,) if isinstance(result, Tensor) else tensors_in((result,)):
            self._note_storage(tensor.untyped_storage(), category)
        if (collective := parse_collective(func, args, kwargs, result)) is not None:
            self._count_collective(collective)
        if self.device.is_cpu and (num_bytes := cast_bytes(func, args)):
            copy = _Storage(0, "temporaries", 0)
            self._resize(copy, -(-num_bytes // ROUND_BYTES) * ROUND_BYTES)
            self._resize(copy, 0)
        device = self.device.host if is_of_host else self.device
        cost, record = cost_of(func, args, kwargs, result, device), self.log.record
        if is_of_host:
            record.cpu_seconds += cost.seconds
            record.host_seconds += cost.seconds + (self.device.launch_seconds if cost.seconds else 0.0)
            return result
        record.flops += cost.flops
        record.compute_seconds += cost.seconds
        record.arithmetic_seconds += cost.seconds if cost.is_arithmetic else 0.0
        record.host_seconds += self.device.launch_seconds if cost.seconds else 0.0
        return result

    def _is_of_host(self, arguments: tuple[Any, ...]) -> bool:
        """Return True if an argument is in the host's memory."""
        storages = (self._storages.get(address_of(tensor.untyped_storage())) for tensor in tensors_in(arguments))
        return any(known is not None and known.category in self.log.on_host for known in storages)

    def _count_collective(self, collective: Collective) -> None:
        sent = count_traffic(collective, self.axes, self.device)
        key, record = (sent.collective, sent.axis, sent.num_ranks), self.log.record
        record.sent[key] = sent + record.sent[key] if key in record.sent else sent
        record.awaited_seconds += sent.seconds if collective.is_awaited else 0.0
        if collective.kind in ("all_gather", "reduce_scatter"):
            self.tag(collective.tensors, "communication")

    def _note_storage(self, storage: torch.UntypedStorage, category: str, *, retag: bool = False) -> None:
        address = address_of(storage)
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
        ledger_ref = weakref.ref(self)

        def freed(_: object) -> None:
            if (ledger := ledger_ref()) is not None and ledger._storages.get(address) is known:
                del ledger._storages[address]
                ledger._resize(known, 0)

        known.alive = weakref.ref(storage, freed)
        self._resize(known, _rounded(storage))

    def _resize(self, known: _Storage, num_bytes: int) -> None:
        if known.num_bytes:
            self._log(FREE, known)
        self._names += 1
        known.name, known.num_bytes = self._names, num_bytes
        if num_bytes:
            known.stream = self._stream()
            self._log(ALLOCATE, known)

    def _move(self, known: _Storage, category: str) -> None:
        """Change the category; a move between device and host frees and allocates."""
        before, num_bytes = known.category, known.num_bytes
        is_other_memory = (before in self.log.on_host) != (category in self.log.on_host)
        if is_other_memory:
            self._resize(known, 0)
        known.category = category
        if is_other_memory:
            self._resize(known, num_bytes)
        elif num_bytes:
            self._log(MOVE, known, before)

    def _log(self, kind: str, known: _Storage, before: str = "") -> None:
        self.log.add(Step(kind, known.name, known.num_bytes, known.stream, known.category, before))

    def _stream(self) -> int:
        """Return the number of the current stream; FSDP2 has four."""
        stream = torch.cpu.current_stream()
        return self._streams.setdefault(id(stream), (len(self._streams), stream))[0]

    def _watch_resize(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if not self._muted and (known := self._storages.get(address_of(storage))) is not None:
                num_bytes = _rounded(storage)
                if num_bytes != known.num_bytes:
                    self._resize(known, num_bytes)
            return result

        return resize_

    def _mute_trials(self, propagate: Callable[..., Any]) -> Callable[..., Any]:
        def muted(*args: Any, **kwargs: Any) -> Any:
            self._muted += 1
            try:
                return propagate(*args, **kwargs)
            finally:
                self._muted -= 1

        return muted


@contextlib.contextmanager
def tagging_shards(ledger: Ledger) -> Generator[None]:
    """Tag, in any model, the parameters that FSDP2 gathers and the gradients that it accumulates."""

    def beginning(begin: Callable[..., Any]) -> Callable[..., Any]:
        def unshard(group: Any, *flags: Any, **named: Any) -> Any:
            if not ledger.offloads or awaits_gather(group) or group.is_unsharded:
                return begin(group, *flags, **named)
            with ledger.copying_shards(group.fsdp_params):
                return begin(group, *flags, **named)

        return unshard

    def gathering(wait: Callable[..., Any]) -> Callable[..., Any]:
        def wait_for_unshard(group: Any) -> Any:
            with ledger.copying_shards(()):  # with one rank the gather is here
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
            if ledger.offloads and group.reduce_grads and partly_reduced(group) is None:
                shards = (fsdp_param.sharded_param.grad for fsdp_param in group.fsdp_params)
                ledger.count_copy(TO_HOST, sum(local_tensor(shard).nbytes for shard in shards if shard is not None))
            return result

        return post_backward

    groups = class_of_groups()
    with (
        replaced(groups, "unshard", beginning),
        replaced(groups, "wait_for_unshard", gathering),
        replaced(groups, "post_backward", reducing),
    ):
        yield


def _tag_gradients(ledger: Ledger, group: Any) -> None:
    for parameter in group.fsdp_params:
        gradient = getattr(unsharded_parameter(parameter), "grad", None)
        ledger.tag((gradient, parameter.unsharded_accumulated_grad), "unsharded gradients")
        ledger.tag((parameter.sharded_param.grad, partly_reduced(group)), "gradients")


def list_storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor, or of the tensors inside of a DTensor or another wrapper."""
    if isinstance(tensor, DTensor):
        return list_storages(local_tensor(tensor))
    if is_traceable_wrapper_subclass(tensor):
        inner = tensor.__tensor_flatten__()[0]
        return [storage for name in inner for storage in list_storages(getattr(tensor, name))]
    return [tensor.untyped_storage()]


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Replace a method of a class, or a function of a module, while this is open."""
    original, is_own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:  # it is inherited
            delattr(owner, name)


def _rounded(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // ROUND_BYTES) * ROUND_BYTES

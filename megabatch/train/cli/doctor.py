"""Doctor: versions and devices of all ranks, a gradient and a step that are proved. Nothing hangs.

Each stage has a deadline: a rank that does not come, or a network that does not carry, is named instead of waited for.
"""

import platform
import shutil
import socket
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.cuda import nccl
from torch.distributed.distributed_c10d import Store
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import megabatch
from megabatch import losses, verify
from megabatch.errors import MegabatchError, in_one_line
from megabatch.optim import Muon, verify_step
from megabatch.simulate import DEVICES
from megabatch.train.autotune.device_file import device_toml, measure_device, read_device
from megabatch.train.checkpoints.metadata import installed_version
from megabatch.train.checkpoints.run_folder import device_name
from megabatch.train.cli.help import EXAMPLE
from megabatch.train.config import ParallelConfig
from megabatch.train.init.hardware import kind_of
from megabatch.train.runtime.console import CRASHED
from megabatch.train.runtime.exit import FAILURE, PEER_GONE, FailedError, fail, leave_now
from megabatch.train.runtime.files import replace_text
from megabatch.train.runtime.ranks import Ranks, init_ranks
from megabatch.train.runtime.rendezvous import Rendezvous

SECONDS = 60.0  # for a stage; a GPU's first sum over ranks of many nodes takes a few
STORE_FAILS = (RuntimeError, ValueError)  # it went away with the process that held it
VOCABULARY, WIDTH = 32, 8
Facts = dict[str, Any]  # of a rank: its host, its device, its versions


class Finding(NamedTuple):
    """A line of the examination; one that is not ok ends with what to change."""

    is_ok: bool
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{'ok' if self.is_ok else 'fail':5} {self.subject:9} {self.text}"


def examine(rendezvous: Rendezvous, seconds: float = SECONDS) -> None:
    """Print what is found; rank 0 speaks. Raises `FailedError` with status 1 where something fails."""
    is_ok = True
    for finding in findings(rendezvous, Deadline(rendezvous, seconds)):
        is_ok = is_ok and finding.is_ok
        if rendezvous.rank == 0:
            print(finding, flush=True)
    if not is_ok:
        raise FailedError(CRASHED)


def findings(rendezvous: Rendezvous, deadline: "Deadline") -> Iterator[Finding]:
    """Examine stage after stage, in the same order on every rank."""
    with deadline.of("taking a device and joining the others"):
        ranks = init_ranks(rendezvous, EXAMPLE.model_copy(update={"parallel": ParallelConfig(wrapper="ddp")}))
    with deadline.of("telling each other what is here"):
        facts = ranks.gather(facts_of(ranks.device))
    yield version_finding(facts)
    yield device_finding(facts, ranks.device)
    for name, wrap in (WRAPPERS if ranks.size > 1 else {"plain": nn.Sequential}).items():
        with deadline.of(f"an update through {name}"):
            finding = proof_finding(name, wrap, ranks)
        yield finding
    if ranks.size > 1:
        with deadline.of("a step of sharded optimizers"):
            finding = step_finding(ranks)
        yield finding


def measure(rendezvous: Rendezvous, path: Path, seconds: float = 5 * SECONDS) -> None:
    """Measure this machine and write a device file; rank 0 reports and writes. Raises `MegabatchError`."""
    check_device_path(path)
    with Deadline(rendezvous, seconds).of("measuring this machine"):
        ranks = init_ranks(rendezvous, EXAMPLE.model_copy(update={"parallel": ParallelConfig(wrapper="ddp")}))
        figures = measure_device(
            ranks.device, nearest_device(ranks.device), partial(print, flush=True) if rendezvous.rank == 0 else None
        )
        ranks.on_main(lambda: replace_text(path, device_toml(figures)), str(path))
    if rendezvous.rank == 0:
        print(f"wrote {path}; plan with --device {path}", flush=True)


def check_device_path(path: Path) -> None:
    """Raise before minutes are spent where the file cannot be written, or is somebody else's."""
    if not path.parent.is_dir() or path.suffix != ".toml":
        raise MegabatchError(f"--measure is {str(path)!r}; name a .toml file in a folder that is there")
    if path.exists():
        try:
            read_device(path)
        except MegabatchError:
            raise MegabatchError(
                f"--measure is {str(path)!r}, which is there and no device file; name another"
            ) from None


def nearest_device(device: torch.device) -> str:
    """Return the known device that lends the figures that are not measured."""
    name = kind_of(f"GPU 0: {torch.cuda.get_device_name(device)}") if device.type == "cuda" else "cpu"
    return next((known for known in DEVICES if known.startswith(name)), "a100-80g")


class Deadline:
    """The end of this process, with the reason, where a stage takes longer than it may; and a line for what it raises.

    Args:
        seconds: Of a stage, from when this rank has come to it.
    """

    def __init__(self, rendezvous: Rendezvous, seconds: float) -> None:
        self._rendezvous, self._seconds = rendezvous, seconds
        self._store = None if rendezvous.store is None else cast(Store, cast(Any, rendezvous.store).clone())

    @contextmanager
    def of(self, stage: str) -> Generator[None, None, None]:
        """Surround a stage; the others are told that this rank has come to it."""
        if self._store is not None:
            self._store.set(f"doctor: {stage}: {self._rendezvous.rank}", "here")
        timer = threading.Timer(self._seconds, self._leave, [stage])
        timer.daemon = True
        timer.start()
        try:
            yield
        except Exception as error:
            if isinstance(error, MegabatchError | FailedError) or any(sign in str(error) for sign in PEER_GONE):
                raise
            advice = "look at that rank's device and network, or try another version of torch"
            fail(self._rendezvous, f"megabatch: doctor: {stage}: {in_one_line(error)}; {advice}", CRASHED)
        finally:
            timer.cancel()

    def _leave(self, stage: str) -> NoReturn:
        """Leave from the timer's thread: the stage's own may never come back."""
        line = f"megabatch: doctor: {stage} has not ended within {self._seconds:g} s"
        try:
            is_first = self._store is None or self._store.add(FAILURE, 1) == 1
            line += f"; {self._why(stage)}"
        except STORE_FAILS:
            is_first, line = self._rendezvous.rank == 0, f"{line}; the store by which ranks have met does not answer"
        if is_first:
            print(line, file=sys.stderr, flush=True)
        leave_now(CRASHED)

    def _why(self, stage: str) -> str:
        store, size = self._store, self._rendezvous.size
        if store is None:
            return "look at what else runs on this host"
        missing = [str(rank) for rank in range(size) if not store.check([f"doctor: {stage}: {rank}"])]
        if missing:
            return f"of {size} ranks these have not come to it: {', '.join(missing)}; look at their hosts"
        return (
            "every rank has come to it, so what they send does not arrive: let hosts reach each other on every port, "
            "or name their common network in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        )


def facts_of(device: torch.device) -> Facts:
    """Return what this rank has."""
    is_gpu = device.type == "cuda"
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    versions |= {"transformers": installed_version("transformers"), "megabatch": megabatch.__version__}
    if is_gpu:
        versions |= {"CUDA": torch.version.cuda, "NCCL": ".".join(map(str, nccl.version()))}
    number = str(torch.cuda.get_device_properties(device).uuid) if is_gpu else None
    return {"host": socket.gethostname(), "device": device_name(device), "gpu": number, "versions": versions}


def version_finding(facts: Sequence[Facts]) -> Finding:
    """Compare the versions: another one on another rank makes another run of it."""
    here = facts[0]["versions"]
    for rank, there in enumerate(facts):
        for name, version in there["versions"].items():
            if version != here[name]:
                text = f"rank {rank} on {there['host']} has {name} {version}, and rank 0 on {facts[0]['host']} has "
                return Finding(False, "versions", f"{text}{here[name]}; install the same on all")
    return Finding(True, "versions", ", ".join(f"{name} {version}" for name, version in here.items() if version))


def device_finding(facts: Sequence[Facts], device: torch.device) -> Finding:
    """Count the devices of all hosts. A GPU is one rank's."""
    hosts, gpus = {each["host"] for each in facts}, [(each["host"], each["gpu"]) for each in facts]
    for rank, gpu in enumerate(gpus):
        if gpu[1] and gpus.index(gpu) < rank:
            text = f"ranks {gpus.index(gpu)} and {rank} share one GPU of {gpu[0]}; start fewer"
            return Finding(False, "devices", text)
    text = " and ".join(f"{count} x {name}" for name, count in Counter([each["device"] for each in facts]).items())
    unseen = device.type == "cpu" and shutil.which("nvidia-smi") is not None
    hint = f"; nvidia-smi is here and torch {torch.__version__} sees no GPU: install torch for CUDA" if unseen else ""
    return Finding(True, "devices", f"{text} on {len(hosts)} host{'' if len(hosts) == 1 else 's'}{hint}")


class TinyModel(nn.Module):
    """Next tokens of the token alone; logits [B, T, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:  # [B, T] -> [B, T, V]
        return self.head(self.table(input_ids)).clone()  # FSDP2 warns of what is a view


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {"ddp": DistributedDataParallel, "fsdp2": fully_shard}


def tiny_model(ranks: Ranks, wrap: Callable[[nn.Module], Any]) -> Any:
    """Return the same model on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return wrap(TinyModel().to(ranks.device))


def step_finding(ranks: Ranks) -> Finding:
    """Compare steps of sharded AdamW and Muon with those of one process. Collective."""
    model = tiny_model(ranks, fully_shard)
    matrix, *others = sorted(model.parameters(), key=lambda each: each is not model.head.weight)
    for optimizer in (AdamW(model.parameters()), Muon([matrix], AdamW(others))):
        found = verify_step(model, optimizer)
        if not found.ok:
            return Finding(False, "step", f"do not train here: {'; '.join(found.causes)}")
    text = f"AdamW and Muon on shards of {ranks.size} ranks: the same bits as in one process, on every rank"
    return Finding(True, "step", text)


def proof_finding(name: str, wrap: Callable[[nn.Module], Any], ranks: Ranks) -> Finding:
    """Compare the gradient of an uneven update over all ranks with that of plain torch on the whole. Collective."""
    model = tiny_model(ranks, wrap)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ids = [torch.randint(VOCABULARY, (3 + 4 * number % 10,)) for number in range(2 * ranks.size + 3)]  # [T]
    samples = [{"input_ids": each, "labels": torch.where(torch.arange(len(each)) < 1, -100, each)} for each in ids]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it will call otherwise
        proof = verify(model, losses.next_token, samples[ranks.rank :: ranks.size])
    text = f"{len(samples)} uneven samples on {ranks.size} rank{'' if ranks.size == 1 else 's'}: gradient "
    if proof.ok:
        return Finding(True, name, f"{text}{proof.worst:.1e} from plain torch's, in float64")
    why = "; ".join(proof.causes) or "try another version of torch, and look at the devices and the network"
    return Finding(False, name, f"{text}{proof.worst:.1e} from plain torch's; do not train here: {why}")

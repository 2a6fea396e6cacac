"""Facts: what each rank has, told to all, and what of it does not go together."""

import json
import platform
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.cuda import nccl

import megabatch
from megabatch.autotune import free_on
from megabatch.train.checkpoints.metadata import installed_version
from megabatch.train.checkpoints.run_folder import device_name
from megabatch.train.cli.doctor.finding import Finding
from megabatch.train.cli.init.hardware import seen_gpus
from megabatch.train.config.byte_sizes import GIB, gib_text
from megabatch.train.runtime.ranks import Ranks

SCARCE_BYTES = GIB  # of a device's memory: less than that is free for no model worth training


@dataclass(frozen=True)
class Facts:
    """What one rank has."""

    host: str
    device: str  # as its maker calls it
    device_id: str  # of a GPU, on all hosts its own
    free_bytes: float  # of the device; on a CPU of the host, which its ranks share
    versions: dict[str, str | None]


def facts_of(device: torch.device) -> Facts:
    """What this rank has."""
    is_gpu = device.type == "cuda"
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": installed_version("transformers"),
        "megabatch": megabatch.__version__,
        "CUDA": torch.version.cuda if is_gpu else None,
        "NCCL": ".".join(map(str, nccl.version())) if is_gpu and dist.is_nccl_available() else None,
    }
    number = str(torch.cuda.get_device_properties(device).uuid) if is_gpu else ""
    return Facts(socket.gethostname(), device_name(device), number, free_on(device), versions)


def gathered(ranks: Ranks) -> list[Facts]:
    """Those of every rank; collective."""
    return [Facts(**json.loads(text)) for text in ranks.gather(json.dumps(asdict(facts_of(ranks.device))))]


def findings_of(facts: Sequence[Facts], device: torch.device) -> Iterator[Finding]:
    """Versions, devices, their memory, and ranks."""
    yield version_finding(facts)
    yield device_finding(facts, device)
    yield memory_finding(facts)
    hosts = Counter([each.host for each in facts])
    backend = dist.get_backend() if device.type == "cpu" else "nccl, and gloo for what is on the CPU"
    yield Finding("ok", "ranks", f"{len(facts)} on {len(hosts)} {'host' if len(hosts) == 1 else 'hosts'}, by {backend}")


def version_finding(facts: Sequence[Facts]) -> Finding:
    """What is installed; another version on another rank makes another run of it."""
    here = facts[0].versions
    others = [rank for rank, each in enumerate(facts) if each.versions != here]
    text = ", ".join(f"{name} {version}" for name, version in here.items() if version is not None)
    if not others:
        return Finding("ok", "versions", text)
    there = facts[others[0]]
    name = next(name for name in here if there.versions[name] != here[name])
    return Finding(
        "fail",
        "versions",
        f"rank {others[0]} on {there.host} has {name} {there.versions[name]}, and rank 0 on {facts[0].host} has "
        f"{here[name]}; install the same on all",
    )


def device_finding(facts: Sequence[Facts], device: torch.device) -> Finding:
    """Who makes the devices; a GPU is one rank's."""
    text = " and ".join(f"{count} x {name}" for name, count in Counter([each.device for each in facts]).items())
    places = [(each.host, each.device_id) for each in facts]
    for rank, place in enumerate(places):
        if place[1] and places.index(place) < rank:
            return Finding(
                "fail", "devices", f"ranks {places.index(place)} and {rank} share one GPU of {place[0]}; start fewer"
            )
    unseen = len(seen_gpus()) if device.type == "cpu" else 0
    if unseen:
        return Finding(
            "warn",
            "devices",
            f"{text}; the driver has {unseen} GPU and torch {torch.__version__} sees none: install torch for CUDA",
        )
    return Finding("ok", "devices", text)


def memory_finding(facts: Sequence[Facts]) -> Finding:
    """The least that is free."""
    least = min(range(len(facts)), key=lambda rank: facts[rank].free_bytes)
    free = facts[least].free_bytes
    where = f"for rank {least} on {facts[least].host}"
    if free < SCARCE_BYTES:
        return Finding("warn", "memory", f"{gib_text(free)} free {where}; end what else runs there")
    return Finding("ok", "memory", f"{gib_text(free)} free, the least, {where}")

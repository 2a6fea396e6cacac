"""Random states: a second forward draws the same random numbers as the first, for example in dropout."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """The states of torch's generators of the CPU and of a device.

    Attributes:
        of_cpu: [bytes], on the CPU.
        of_device: [bytes], on the CPU too. None where the device is the CPU.
    """

    device: torch.device
    of_cpu: Tensor
    of_device: Tensor | None

    def same_as(self, other: "RandomState") -> bool:
        """Return True if no random number was drawn between the two."""
        if not torch.equal(self.of_cpu, other.of_cpu):
            return False
        return self.of_device is other.of_device or torch.equal(_known(self.of_device), _known(other.of_device))


def note(device: torch.device) -> RandomState:
    """Return the current states of the generators. They are on the host, so this waits for no device."""
    of_device = None
    if device.type not in ("cpu", "meta"):
        of_device = torch.get_device_module(device).get_rng_state(*_which(device))
    return RandomState(device, torch.get_rng_state(), of_device)


def put_back(state: RandomState) -> None:
    """Restore the states of the generators."""
    torch.set_rng_state(state.of_cpu)
    if state.of_device is not None:
        torch.get_device_module(state.device).set_rng_state(state.of_device, *_which(state.device))


@contextlib.contextmanager
def replay(state: RandomState) -> Generator[None]:
    """Draw again what was drawn after ``state``; afterwards the generators stand where they stood before."""
    now = note(state.device)
    put_back(state)
    try:
        yield
    finally:
        put_back(now)


def _which(device: torch.device) -> tuple[torch.device, ...]:
    # There is one MPS device only, which torch does not ask for.
    return () if device.type == "mps" else (device,)


def _known(state: Tensor | None) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu") if state is None else state

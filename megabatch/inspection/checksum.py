"""Checksums of tensors, by which ranks compare what they hold."""

import zlib

import torch
from torch import Tensor

from megabatch.inspection.tree import tensors_of

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
CHUNK = 2**20  # elements; bounds the memory of a checksum


def checksum(tensor: Tensor) -> Tensor:
    """Sum the bits as integers, each times an odd number by position, in int64: no order of adding rounds."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.resolve_neg().reshape(-1).view(INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    odd = torch.arange(
        1, 2 * CHUNK if len(bits) > CHUNK else 2 * len(bits) + 1, 2, dtype=torch.int64, device=bits.device
    )
    for number, chunk in enumerate(bits.split(CHUNK)):
        total += (chunk * odd[: len(chunk)]).sum() * (2 * number + 1)
    return total


def hash_tensors(value: object, checksum: int) -> int:
    """Return a hash of the tensors on the CPU in ``value``, continued from ``checksum``."""
    for tensor in tensors_of(value):
        # Reading a tensor of another device would wait for that device.
        if tensor.device.type == "cpu":
            checksum = zlib.crc32(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes(), checksum)
    return checksum

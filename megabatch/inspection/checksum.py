"""A checksum of a tensor, by which ranks compare what they hold."""

import torch
from torch import Tensor

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

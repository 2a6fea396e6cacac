"""Errors that say that memory ran out, by their types and the words of the libraries that raise them."""

import pytest
import torch
import torch.distributed as dist

from megabatch import GradientAccumulator, MegabatchError
from megabatch.inspection.error_kinds import is_out_of_memory
from tests.unit.failures.table import SAMPLES, linear, squares

NCCL = "NCCL error in: NCCLUtils.cpp:37, unhandled cuda error, NCCL version 2.27.5\nLast error:\nCuda failure 2 "
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported at some other call"),
    torch.AcceleratorError("HIP error: out of memory"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to"),
    dist.DistBackendError(NCCL + "'out of memory'"),
    dist.DistBackendError("NCCL error in: NCCLUtils.cpp:37\nLast error:\nCuda failure 'out of memory'"),
]
OTHERS = [
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    dist.DistBackendError(NCCL + "'peer access is not supported between these two devices'"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    RuntimeError("the worker of the data loader ran out of memory"),
    ValueError("CUDA error: out of memory"),
]


def chained(error: Exception) -> RuntimeError:
    """As torch's schedules of pipelines wrap what they meet."""
    try:
        raise RuntimeError("stage 0 failed") from error
    except RuntimeError as wrapped:
        return wrapped


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_memory_ran_out(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert is_out_of_memory(chained(error))


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_something_else(error: Exception) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_a_microbatch_runs_again_in_parts(error: Exception) -> None:
    model, failures = linear(), [error]

    def loss_fn(given: torch.nn.Module, microbatch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        if failures:
            raise failures.pop()
        return squares(given, microbatch)

    gradient = GradientAccumulator(model, micro_batch_size=2)
    gradient.forward_backward(SAMPLES[:2], loss_fn)
    assert gradient.last_plan is not None
    assert gradient.last_plan.num_split == 1
    failures += [error]
    with pytest.raises(MegabatchError, match="ran out of memory in sample 0 of its batch alone"):
        gradient.forward_backward(SAMPLES[:1], loss_fn)

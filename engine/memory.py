"""Distinguishes errors that mean that memory is short from all others."""

import torch

# Messages of PyTorch on the CPU and of oneDNN, which have no exception classes for this. oneDNN names no
# cause, but in the warm-up it has run the same products, with another number of rows. The others are CUDA's
# libraries', which take memory beside PyTorch's allocator: for code when it first runs, and for workspaces.
_SIGNS_OF_NO_MEMORY = (
    *("DefaultCPUAllocator", "std::bad_alloc", "Cannot allocate memory"),
    *("could not create a primitive", "could not create a memory"),
    *("CUDA error: out of memory", "Triton Error [CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"),
)


def tells_of_no_memory(error: BaseException) -> bool:
    """Whether the error means that the device, or the host, had no memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        sign in str(error) for sign in _SIGNS_OF_NO_MEMORY
    )

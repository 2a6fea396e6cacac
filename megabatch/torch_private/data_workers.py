"""The workers of a DataLoader."""

import sys

from torch.utils.data import dataloader

FRAMES_OF_SAMPLERS = 16  # between a DataLoader and the sampler that it asks: samplers may wrap each other


def is_asked_by_workers() -> bool:
    """``_MultiProcessingDataLoaderIter._try_put_index``: True in a sampler that is read for workers, ahead of use."""
    code = dataloader._MultiProcessingDataLoaderIter._try_put_index.__code__  # pyright: ignore[reportPrivateUsage]
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    for _ in range(FRAMES_OF_SAMPLERS):
        if frame is None or frame.f_code is code:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is code

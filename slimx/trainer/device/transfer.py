"""Host arrays on their way to a trainer's device."""

from __future__ import annotations

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Move `array` to `device` as a tensor; on the CPU it shares the array's memory.

    A copy from pageable memory would wait for everything that the GPU has queued, once per array of a micro-batch. From
    pinned memory it only takes its place in the queue; torch keeps the pinned block until the copy is done.
    """
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)

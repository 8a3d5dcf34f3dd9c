"""The GPU makes the CPU's frames of what has changed, byte for byte, from memory of its own and of the host."""

from __future__ import annotations

import pytest
import torch

from slimx.extras.direct.ends import frames
from tests.extras.direct.test_frames import cases, encoded, versions


def test_gpu_makes_the_frames_of_the_cpu(device: torch.device) -> None:
    for before, after, item in cases():
        wanted = encoded(before, after, item)
        for base in (before.to(device), before.pin_memory()):
            made = frames.encode_on_device(base, after.to(device), item=item)
            assert torch.equal(made.cpu()[: len(wanted)], wanted)


@pytest.mark.parametrize("item", frames.ITEMS)
def test_gpu_makes_large_frames(device: torch.device, item: int) -> None:
    before, after = versions(0, 1 << 28, item, 0.02)
    assert torch.equal(
        frames.encode_on_device(before.to(device), after.to(device), item=item).cpu(), encoded(before, after, item)
    )

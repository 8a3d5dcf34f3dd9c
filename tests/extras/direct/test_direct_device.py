"""Direct transfers from the memory of GPUs to that of engines' GPUs: NIXL's own agents, on an emulated device.

The device's memory is the host's (cuda_stand), so that NIXL takes it for that; packing, placing and copying are the
kernels of csrc/. NIXL with GPU memory is tested on a GPU: `tests/gpu/test_direct.py`.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from slimx.extras.direct.ends.sent_bucket import shares_of, together
from tests.extras.direct.direct_stand import ENGINES, RANKS, Stand, take
from tests.refusals import refused
from tests.unit.layout.engine_stand import SERVED, engine_rank
from tests.unit.layout.layout_stand import Tensors, checkpoint
from tests.unit.reshard.cuda_stand import use_emulator
from tests.unit.reshard.gather_stand import ENGINE, MODEL, dressed

pytest.importorskip("nixl_cu13", reason="NIXL is not installed (requirements/cpu.txt pins it)")


@pytest.fixture(autouse=True)
def emulator(emulator_library: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    return use_emulator(emulator_library, monkeypatch)


def test_engine_ranks_get_their_bytes_in_gpu_memory_and_changes_are_found() -> None:
    weights: list[list[Tensors]] = [[{} for _ in range(RANKS)] for _ in range(ENGINES)]
    paths = set()
    with ExitStack() as stack:
        stand = Stand(stack, on_gpus=True)
        assert len(stand.receivers) == ENGINES * RANKS
        for transfer in (stand.next(), stand.next()):
            coming = [stand.send(0, transfer)]
            for bucket in range(stand.plan.count):
                if bucket + 1 < stand.plan.count:
                    coming.append(stand.send(bucket + 1, transfer))
                for number in range(ENGINES):
                    receivers = stand.receivers[number * RANKS : (number + 1) * RANKS]
                    with ExitStack() as arriving:
                        shares = zip(receivers, shares_of(coming[bucket], RANKS), strict=True)
                        landed = [arriving.enter_context(receiver.landed(share)) for receiver, share in shares]
                        packed = together(coming[bucket], landed)
                        assert packed.on_device
                        paths |= {packed.path, *packed.others}
                        for rank in range(RANKS):
                            weights[number][rank] |= take(packed, rank)
        spoilt = stand.send(0, stand.next())
        receiver, share = stand.receivers[0], shares_of(spoilt, RANKS)[0]
        with receiver.landed(share) as landed:
            assert take(landed, 0)
            tensor = landed.targets[0][0]
            receiver._landing.bytes[tensor.offset] ^= 1
            with refused("peer.checksum", about=tensor.name):
                take(landed, 0)
    assert len(paths) == ENGINES * RANKS, "a rank's buckets are made in the same memory"
    whole = checkpoint(MODEL)
    for number in range(ENGINES):
        for rank in range(RANKS):
            tensors = engine_rank(SERVED["qwen"], whole, ENGINE, rank)
            assert weights[number][rank].keys() == tensors.keys()
            for name, tensor in tensors.items():
                expected = dressed({name: tensor})[name].to(weights[number][rank][name].dtype)
                assert torch.equal(weights[number][rank][name], expected), name

"""Process groups over NCCL: their meeting, what they deliver, and that a lost end is told within the deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist

from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.transports.collective import _WAITS, ChannelError, Opening, Sending
from tests.gpu.sharing_peer import Peer
from tests.refusals import refused

DEADLINE_S = 10.0
pytestmark = pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU, and NCCL connects none with itself")


def open_meeting(ranks: int) -> Opening:
    return Sending.open("e0", 3, ranks=ranks, host="127.0.0.1", backend="nccl", deadline_s=DEADLINE_S)


def test_a_group_is_made_used_and_left(device: torch.device) -> None:
    before = os.environ.get(_WAITS.VARIABLE)
    sending = open_meeting(0).join()
    assert os.environ.get(_WAITS.VARIABLE) == before
    sending.broadcast(torch.ones(1 << 20, dtype=torch.uint8, device=device))
    sending.close()
    with refused("channel.closed", about="e0", kind=ChannelError):
        sending.broadcast(torch.ones(1, dtype=torch.uint8, device=device))


def test_nobody_waits_for_ever_at_a_meeting(device: torch.device) -> None:
    opening = Sending.open("e0", 4, ranks=1, host="127.0.0.1", backend="nccl", deadline_s=2)
    begin = time.monotonic()
    with refused("channel.broken", about="e0", kind=ChannelError):
        opening.join()
    assert time.monotonic() - begin < 10


@pytest.fixture
def other() -> Iterator[Peer]:
    peer = Peer("1")
    peer.ask("ready")
    yield peer
    peer.kill()


@two
@pytest.mark.parametrize("how", ["killed", "late"])
def test_a_bucket_arrives_and_a_lost_end_fails_within_the_deadline(device: torch.device, other: Peer, how) -> None:
    opening = open_meeting(1)
    other.tell("join", asdict(opening.meeting))
    sending = opening.join()
    assert other.answer() == "joined"
    data = torch.randint(0, 256, (300 << 20,), dtype=torch.uint8, device=device)
    other.tell("receive", len(data))
    sending.broadcast(data)
    assert other.answer() == f"{kernel.checksum_tensor(data.cpu()):016x}"
    if how == "killed":
        other.kill()
    begin = time.monotonic()
    with refused("channel.broken", about="e0", kind=ChannelError):
        sending.broadcast(data)
    assert time.monotonic() - begin < DEADLINE_S + 20
    data.add_(1)
    torch.cuda.synchronize()  # the device is as usable as before

"""Direct transfers by NIXL from and into the memory of a GPU, and through pinned host memory, within one process."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

for package in ("nixl_cu13", "msgspec"):
    pytest.importorskip(package, reason=f"{package} is not installed (requirements/cu130.txt pins it)")

from slimx.extras.direct.ends.sent_bucket import shares_of, together  # noqa: E402
from tests.extras.direct.direct_stand import ENGINES, RANKS, Stand, take  # noqa: E402
from tests.unit.layout.engine_stand import SERVED, engine_rank  # noqa: E402
from tests.unit.layout.layout_stand import Tensors, checkpoint, trainer_shards  # noqa: E402
from tests.unit.reshard.gather_stand import ENGINE, MODEL, SIZES, dressed  # noqa: E402


@pytest.mark.parametrize("on_gpus", [True, False], ids=["GPU to GPU", "host to host"])
def test_every_engine_rank_gets_what_trainer_ranks_hold_on_their_gpus(device: torch.device, on_gpus: bool) -> None:
    trainers = [
        {name: tensor.to(device) for name, tensor in dressed(tensors).items()}
        for tensors in trainer_shards(MODEL, SIZES)
    ]
    received: list[Tensors] = [{} for _ in range(ENGINES * RANKS)]
    with ExitStack() as stack:
        stand = Stand(stack, trainers=trainers, on_gpus=on_gpus)
        per_engine = len(stand.receivers) // ENGINES
        for transfer in (stand.next(), stand.next()):
            for bucket in range(stand.plan.count):
                sent = stand.send(bucket, transfer)
                for number in range(ENGINES):
                    receivers = stand.receivers[number * per_engine : (number + 1) * per_engine]
                    with ExitStack() as arriving:
                        shares = zip(receivers, shares_of(sent, per_engine), strict=True)
                        landed = [arriving.enter_context(receiver.landed(share)) for receiver, share in shares]
                        packed = together(sent, landed)
                        assert packed.on_device == on_gpus
                        for rank in range(RANKS):
                            received[number * RANKS + rank] |= take(packed, rank, device)
    whole = checkpoint(MODEL)
    for number, found in enumerate(received):
        expected = dressed(engine_rank(SERVED["qwen"], whole, ENGINE, number % RANKS))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor.to(found[name].dtype)) for name, tensor in expected.items())

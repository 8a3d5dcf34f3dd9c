"""A receiver of buckets in memory of a GPU or of the host: it proves what it stages, and holds what was staged."""

from __future__ import annotations

import torch
from torch import nn

from slimx.adapters.sglang.weights.receiver import load_staged, receiver_of
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.manifest import Manifest
from slimx.reshard.transports.device import DeviceMemory
from slimx.reshard.transports.memory import MemoryFile
from tests.refusals import refused

SIZE = 4 * 2**20


class Model(nn.Module):
    """A rank's model: parameters that are published under their own names."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.wide = nn.Linear(515, 257, bias=False, device=device, dtype=torch.bfloat16)
        self.experts = nn.Parameter(torch.zeros(4, 96, 64, dtype=torch.bfloat16, device=device))
        self.norm = nn.Parameter(torch.zeros(77, device=device))
        self.requires_grad_(False)


def proves_and_holds(memory: DeviceMemory | MemoryFile, device: torch.device) -> None:
    """Asserts that a bucket in `memory`, of SIZE bytes, with a wrong byte is refused, and that the right one is loaded
    and verified."""
    model, cuda = Model(device), device.type == "cuda"
    receiver, weights = receiver_of(model), {n: torch.randn(p.shape).to(p.dtype) for n, p in model.named_parameters()}
    entries, end = [], 0
    for name, tensor in weights.items():
        memory.bytes[end : end + tensor.nbytes] = tensor.flatten().view(torch.uint8).to(device)
        form = {"name": name, "dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "nbytes": tensor.nbytes}
        entries.append(form | {"offset": end, "checksum": f"{kernel.checksum_tensor(tensor):016x}"})
        end = -(-(end + tensor.nbytes) // 64) * 64
    place = {"policy": "actor", "version": 1, "epoch": 0, "bucket": 0}
    bucket = place | {"ranks": {"all": {"fd_path": memory.path, "size": end, "tensors": entries}}}
    manifest = Manifest(policy="actor", version=1, encoding="local", trainer_step=1, membership_epoch=0).to_json()

    def flip() -> None:
        memory.bytes[entries[1]["offset"]] ^= 1
        if cuda:
            torch.cuda.synchronize()

    flip()
    receiver.begin(manifest=manifest)
    with refused("receiver.checksum", about=entries[1]["name"]):
        receiver.stage(**bucket)
    assert not model.norm.any(), "nothing was copied"
    flip()

    receiver.begin(manifest=manifest)
    receiver.stage(**bucket)
    if cuda:  # what is staged from a device is a copy
        memory.bytes.fill_(0xEE)
    load_staged(model, [])
    assert receiver.outcome == {"loaded": len(weights)}
    assert receiver.verify()["differ"] == []
    assert all(p.cpu().equal(weights[name]) for name, p in model.named_parameters())
    model.experts[3, 95, 63] += 1
    assert receiver.verify()["differ"] == ["experts"]
    memory.close()

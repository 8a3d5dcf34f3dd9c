"""One rank's receiver of buckets on a GPU: it copies them, proves its copy, and needs their owner no more.

On the emulated device (cuda_stand); everything but where the bytes lie is tested in test_engine_receiver.py.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimx.adapters.sglang.weights import buckets as sglang_buckets
from slimx.adapters.sglang.weights.places import local_layout, local_sums, staged_sums, sum_rects
from slimx.adapters.sglang.weights.receiver import receiver_of
from slimx.reshard.kernels.cpu import checksum_tensor
from slimx.reshard.kernels.record import PIECE, rectangle
from slimx.reshard.transports.device import DeviceMemory
from tests.refusals import refused
from tests.unit.adapters.engine_model import DEEPSEEK, ServerModel, Weights, checkpoint, rank_local
from tests.unit.adapters.receiver_stand import LATENT, LAYOUT, SIZES, assert_holds, held, manifest, outcome, stage
from tests.unit.reshard.cuda_stand import DEVICE, use_emulator


@pytest.fixture(autouse=True)
def emulator(emulator_library: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    return use_emulator(emulator_library, monkeypatch)


class Slot:
    """The publisher's memory: one bucket after another."""

    def __init__(self) -> None:
        self.memory = DeviceMemory(1 << 20)

    def pack(self, weights: Weights, version: int = 1, bucket: int = 0) -> dict[str, Any]:
        """Puts a bucket there; returns its description for a rank."""
        self.memory.bytes.fill_(0xEE)
        entries, end = [], 0
        for name, tensor in weights.items():
            self.memory.bytes[end : end + tensor.nbytes] = tensor.contiguous().flatten().view(torch.uint8)
            entry = {"name": name, "dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "offset": end}
            entries.append(entry | {"nbytes": tensor.nbytes, "checksum": f"{checksum_tensor(tensor):016x}"})
            end = -(-(end + tensor.nbytes) // 64) * 64
        assert end <= self.memory.size
        where = {"fd_path": self.memory.path, "size": end, "tensors": entries}
        return {"policy": "actor", "version": version, "epoch": 0, "bucket": bucket} | where


def test_a_rank_copies_only_its_part_of_a_bucket(model, monkeypatch) -> None:
    receiver, slot, weights = receiver_of(model), Slot(), checkpoint(LAYOUT)
    experts = [f"model.layers.1.mlp.experts.{number}.up_proj.weight" for number in (0, 1, 5, 6, 2)]
    argument = slot.pack({name: weights[name] for name in experts})
    fetched = []
    fetch = sglang_buckets.fetch
    monkeypatch.setattr(sglang_buckets, "fetch", lambda *arguments: fetched.append(arguments[1:3]) or fetch(*arguments))
    receiver.begin(manifest=manifest(), staging="bucket")
    assert stage(receiver, **argument)["staged"] == 2, "experts 5 and 6 of this rank, the others of the other"
    first, last = argument["tensors"][2:4]
    assert fetched == [(first["offset"], last["offset"] + last["nbytes"])]
    receiver.begin(manifest=manifest(epoch=1))
    other = slot.pack({experts[0]: weights[experts[0]]}) | {"epoch": 1}
    assert stage(receiver, **other)["staged"] == 0 and len(fetched) == 1, "nothing of it is this rank's"


@pytest.fixture
def model() -> ServerModel:
    return ServerModel(DEEPSEEK, SIZES, rank=1)


@pytest.mark.parametrize("encoding", ["hf", "local"])
@pytest.mark.parametrize("staging", ["model", "bucket"])
def test_buckets_arrive_whole_although_the_next_one_takes_their_place(model, encoding: str, staging: str) -> None:
    receiver, slot = receiver_of(model), Slot()
    for version in (1, 2):
        weights = checkpoint(LAYOUT, seed=version)
        offered = rank_local(LAYOUT, weights, 1) if encoding == "local" else weights
        receiver.begin(manifest=manifest(version, encoding=encoding), staging=staging)
        for number in range(3):
            names = list(offered)[number::3]
            stage(receiver, **slot.pack({name: offered[name] for name in names}, version, number))
            slot.memory.bytes.fill_(0xDD)  # the publisher has got its memory back
            if staging == "bucket":
                assert "error" not in outcome(model)
        if staging == "model":
            assert "error" not in outcome(model)
        assert_holds(model, weights)
        assert receiver.verify()["differ"] == []
        assert receiver.commit(version=version)["version"] == version


def test_bytes_that_changed_on_the_device_are_refused_before_any_copy(model) -> None:
    receiver, slot, weights, before = receiver_of(model), Slot(), checkpoint(LAYOUT), held(model)
    for name in ("model.layers.1.mlp.experts.5.up_proj.weight", LATENT[0]):
        argument = slot.pack({name: weights[name]})
        for at in (0, weights[name].nbytes - 1):
            slot.memory.bytes[at] ^= 1
            receiver.begin(manifest=manifest())
            with refused("receiver.checksum", about=name):
                stage(receiver, **argument)
            slot.memory.bytes[at] ^= 1
    assert all(torch.equal(before[name], value) for name, value in held(model).items())


def test_a_failing_device_ends_the_publication_before_the_model_changes(model, emulator) -> None:
    receiver, slot, before = receiver_of(model), Slot(), held(model)
    receiver.begin(manifest=manifest())
    argument = slot.pack(checkpoint(LAYOUT))
    emulator.emulator_fail(719)
    with refused("device.copy", about=argument["fd_path"]):
        stage(receiver, **argument)
    emulator.emulator_fail(0)
    assert receiver.status()["open"] is None
    assert all(torch.equal(before[name], value) for name, value in held(model).items())


def test_memory_that_ends_before_a_tensor_is_refused(model) -> None:
    receiver, slot = receiver_of(model), Slot()
    argument = slot.pack({"model.norm.weight": torch.randn(16)})
    argument["tensors"][0]["offset"] = 1 << 29
    receiver.begin(manifest=manifest())
    with refused("bucket.size", about=argument["fd_path"]):
        stage(receiver, **(argument | {"size": 1 << 30}))


def test_sums_on_the_device_are_those_of_the_cpu(model) -> None:
    tensor = torch.randn(37, 29).bfloat16()
    views = [tensor[3:9, 2:17], tensor.T[1:4], tensor[:, :0]]
    records = [rectangle(view, tensor=k, pos=2 * k, pos_ld=200) for k, view in enumerate(views) if view.numel()]
    pieces = np.array(records, dtype=PIECE)
    assert np.array_equal(sum_rects(pieces, 3, DEVICE), sum_rects(pieces, 3, None))
    assert sum_rects(pieces[:0], 2, DEVICE).tolist() == [0, 0]
    parameters, places = dict(model.named_parameters()), local_layout(model).places
    views = {name: parameters[name].data for name in places}
    sums = staged_sums(views, places, DEVICE)
    assert sums == staged_sums(views, places)
    assert {name: {share} for name, (_, share) in sums.items()} == local_sums(places, places, parameters)

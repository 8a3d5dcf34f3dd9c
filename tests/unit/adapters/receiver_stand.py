"""One rank's receiver of a publication, and what it must hold afterwards."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from slimx.adapters.sglang.weights.receiver import RankReceiver, load_staged, receiver_of
from slimx.layout.ranks import EngineSizes
from slimx.reshard.kernels.cpu import checksum_tensor
from slimx.reshard.manifest import Manifest
from tests.unit.adapters.engine_model import (
    DEEPSEEK,
    ServerModel,
    Weights,
    engine_layout,
    rank_local,
)

SIZES = EngineSizes(tensor=2, expert=2)
LAYOUT = engine_layout(DEEPSEEK, SIZES)
LATENT = ["model.layers.0.self_attn.q_a_proj.weight", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]


def manifest(version: int = 1, epoch: int = 0, **change: Any) -> dict[str, Any]:
    base = {"policy": "actor", "version": version, "encoding": "hf", "trainer_step": 5, "membership_epoch": epoch}
    return Manifest(**(base | change)).to_json()


def stage(receiver: RankReceiver, policy: str, version: int, epoch: int, bucket: int, **part: Any) -> dict[str, Any]:
    """Lets a rank open a bucket of which every rank takes the same part."""
    return receiver.stage(policy=policy, version=version, epoch=epoch, bucket=bucket, ranks={"all": part})


def publish(model: nn.Module, weights: Weights, version: int = 1, **change: Any) -> None:
    """Passes `weights` in one bucket through the receiver of `model`, up to the proof; `change`: of the manifest."""
    receiver, entries, end = receiver_of(model), [], 0
    receiver.begin(manifest=manifest(version, version, **change), staging="model")
    with os.fdopen(os.memfd_create("slimx-bucket"), "wb") as file:
        for name, tensor in weights.items():
            os.pwrite(file.fileno(), tensor.contiguous().numpy().tobytes(), end)
            form = {"name": name, "dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "offset": end}
            entries.append(form | {"nbytes": tensor.nbytes, "checksum": f"{checksum_tensor(tensor):016x}"})
            end += tensor.nbytes
        where = {"fd_path": f"/proc/self/fd/{file.fileno()}", "size": end, "tensors": entries}
        policy = change.get("policy", "actor")
        stage(receiver, policy, version, version, 0, **where)
    load_staged(model, [])
    assert "error" not in receiver.outcome, receiver.outcome


def held(model: ServerModel) -> Weights:
    return {name: parameter.data.clone() for name, parameter in model.named_parameters()}


def assert_holds(model: ServerModel, weights: Weights) -> None:
    want = rank_local(LAYOUT, weights, 1)
    assert all(torch.equal(value, want[name]) for name, value in held(model).items())
    for k in range(2):
        attention = model.get_submodule(f"model.layers.{k}.self_attn")
        assert torch.equal(attention.w_kc, attention.kv_b_proj.weight * 2), "derived from other weights"


def outcome(model: ServerModel) -> dict[str, Any]:
    load_staged(model, [])
    return receiver_of(model).status()["outcome"]

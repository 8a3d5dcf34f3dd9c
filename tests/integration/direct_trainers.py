"""Trainer ranks that publish a tiny Qwen3-MoE straight to real engines: slimx's senders, each in its own process."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import load_file

from slimx.cluster.waiting import gather
from slimx.extras.direct.ends.offer import Offer
from slimx.extras.direct.ends.sender import DirectSender
from slimx.extras.direct.ends.sent_bucket import SentBucket
from slimx.layout.engine import EngineLayout
from slimx.layout.megatron import MegatronLayout
from slimx.layout.number_formats import Precision
from slimx.layout.parts import Part, matrix
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.layout.table import checkpoint_parts
from slimx.models.families.qwen3_moe import engine_table, weight_table
from slimx.reshard.pack.packer import Packer
from slimx.reshard.plan.copy_plan import Plan, compile_plan
from slimx.runtime.ports import local_address
from tests.integration.conftest import Weights, perturbed

SIZES = Sizes(data=2, expert=2)
START_S = 600
"""Seconds for the first call to a process: on busy cores it takes a minute to start."""


def config_in(model: Path) -> dict[str, Any]:
    return json.loads((model / "config.json").read_text())


def plan_for(model: Path, sizes: EngineSizes | None, bucket_bytes: int) -> Plan:
    """The plan of float32 weights for one engine of `sizes`; None: under Hugging Face names."""
    hf = config_in(model)
    table = weight_table(hf)
    return compile_plan(
        MegatronLayout(table, SIZES).parts(),
        checkpoint_parts(table) if sizes is None else EngineLayout(engine_table(hf), sizes).parts(),
        precision=Precision("float32", "float32"),
        bucket_bytes=bucket_bytes,
        ranks=1 if sizes is None else sizes.world,
    )


def cut_out(part: Part, whole: Weights) -> torch.Tensor:
    """The local tensor that `part` describes."""
    local = torch.empty(part.shape)
    rows = local.view(matrix(part.shape))
    for r in part.rects:
        source = whole[part.sources[r.source]]
        source = source.view(matrix(tuple(source.shape)))
        block = source[r.row : r.row + r.rows * r.step : r.step, r.col : r.col + r.cols]
        rows[r.local_row : r.local_row + r.rows, r.local_col : r.local_col + r.cols] = block
    return local


class SendingRank:
    """One trainer rank, whose weights of a version are `perturbed` by its number."""

    def __init__(self, rank: int, model: str, network: str | None):
        torch.set_num_threads(1)
        self.rank, self.host = rank, local_address(network)
        self.start = load_file(Path(model, "model.safetensors"))
        self.parts = MegatronLayout(weight_table(config_in(Path(model))), SIZES).parts_of(rank)
        self.tensors = {part.name: cut_out(part, self.start) for part in self.parts}

    def ping(self) -> int:
        return os.getpid()

    def hold(self, version: int) -> None:
        whole = perturbed(self.start, seed=version)
        for part in self.parts:
            self.tensors[part.name].copy_(cut_out(part, whole))

    def prepare(self, plan: bytes, edges: list[int], item: int) -> None:
        packer = Packer(Plan.from_bytes(plan), self.rank, self.tensors)
        self.sender = DirectSender(
            packer, f"trainer rank {self.rank} ({os.getpid()})", self.host, edges=edges, item=item
        )

    def connect(self, engine: int, offer: bytes) -> None:
        self.sender.connect(engine, Offer.from_bytes(offer))

    def send(self, bucket: int, transfer: int, engines: dict[int, int]) -> SentBucket:
        return self.sender.send(bucket, transfer, engines)


class DirectTrainers:
    """All trainer ranks, as the delivery calls them (`slimx.extras.direct.transport.RankSenders`)."""

    def __init__(self, model: Path, plan: Plan, network: str | None, *, step_deadline_s: float):
        """`plan`: for one engine. `step_deadline_s`: seconds for one call of a publication."""
        self.model, self.network, self.step_deadline_s = model, network, step_deadline_s
        self.published = plan
        self.actors = [self._make(rank) for rank in range(SIZES.world)]

    def _make(self, rank: int) -> Any:
        return ray.remote(SendingRank).options(num_cpus=0).remote(rank, str(self.model), self.network)

    async def pid(self, rank: int) -> int:
        return await self.actors[rank].ping.remote()

    def replace(self, rank: int) -> None:
        """Another process in place of one that died, or that ends now."""
        ray.kill(self.actors[rank])
        self.actors[rank] = self._make(rank)

    async def hold(self, version: int) -> None:
        await self._all("hold", [(version,)] * SIZES.world)

    async def prepare(self, dealt: Plan, edges: list[int], item: int, on_gpus: bool) -> None:
        assert not on_gpus
        await self._all("prepare", [(dealt.to_bytes(), edges, item)] * SIZES.world)

    async def connect(self, engine: int, offer: Offer) -> None:
        await self._all("connect", [(engine, offer.of(rank).to_bytes()) for rank in range(SIZES.world)])

    async def send(self, bucket: int, transfer: int, engines: dict[int, int]) -> list[SentBucket]:
        return await self._all("send", [(bucket, transfer, engines)] * SIZES.world)

    async def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        deadline_s = self.step_deadline_s if method in ("connect", "send") else START_S
        calls = [getattr(actor, method).remote(*one) for actor, one in zip(self.actors, arguments, strict=True)]
        holders = [f"trainer rank {rank}" for rank in range(SIZES.world)]
        logs = [Path(os.devnull)] * SIZES.world
        return await gather(calls, what=method, holders=holders, deadline_s=deadline_s, logs=logs)

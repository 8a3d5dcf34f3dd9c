"""Buckets in the memory of trainer ranks, as the publisher has them brought."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from slimx.cluster import waiting
from slimx.config.schema import Config
from slimx.engines.transport import MemoryDelivery, transport_of
from slimx.errors import SlimxError
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import TransportLost
from tests.refusals import refused

BUCKET = PackedBucket("/proc/1/fd/3", 4, ((),))
MANIFEST = Manifest(policy="actor", version=7, trainer_step=7, membership_epoch=3)


class Rank:
    """A trainer rank as far as it is asked whether it lives."""

    def __init__(self, lives: bool) -> None:
        self.ping = SimpleNamespace(remote=self._ping)
        self.lives = lives

    async def _ping(self) -> None:
        if not self.lives:
            raise ray.exceptions.RayActorError


class Ranks:
    """Trainer ranks, one of which may have died."""

    def __init__(self, lives: bool = True):
        self.actors = [Rank(True), Rank(lives)]


def config_of(directory: Path, transport: str) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(directory)},
            "model": {"path": "model"},
            "rollout": {"prompts": "none"},
            "publish": {"transport": transport},
        }
    )


@pytest.mark.parametrize("name", ["auto", "memory", "cuda_ipc"])
def test_memory_buckets_use_the_same_delivery(tmp_path: Path, name: str) -> None:
    config, source = config_of(tmp_path, name), object()
    transport = transport_of(config.publish)
    found, delivery = transport.connect(config, Ranks(), None, source)
    assert found is source and type(delivery) is MemoryDelivery
    assert transport.gathers and transport.end(config.publish) is None
    assert transport.on_gpus(config.publish, "cuda", colocate=False) == (name == "cuda_ipc")


@pytest.mark.parametrize("lives", [True, False])
async def test_a_bucket_whose_owner_died_is_no_engines_fault(lives: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "DEATH_S", 0.1)

    class Gone:
        """An engine that cannot open the bucket."""

        name = "e0"

        async def perform(self, verb: str, *arguments: Any) -> None:
            raise SlimxError("it cannot be opened", code="bucket.gone", about="e0")

    delivery = MemoryDelivery(Ranks(lives))
    await delivery.begin(MANIFEST, 1)
    kind, code = (SlimxError, "bucket.gone") if lives else (TransportLost, "publish.source")
    with refused(code, kind=kind):
        await delivery.bring(Gone(), 3, BUCKET, 0)

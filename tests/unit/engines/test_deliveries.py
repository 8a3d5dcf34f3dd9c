"""Buckets in the memory of trainer ranks, and versions that they write as files, as the publisher has them brought."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from slimx.cluster import waiting
from slimx.config.schema import Config
from slimx.engines.delivery.deliveries import DiskDelivery, MemoryDelivery, make_delivery
from slimx.errors import SlimxError
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import TransportLost
from tests.refusals import refused

BUCKET = PackedBucket("/proc/1/fd/3", 4, ((),))
WRITTEN = PackedBucket("/shelf/bucket-0", 4, ((),))
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
    """Trainer ranks that note which version they write."""

    def __init__(self, lives: bool = True):
        self.actors, self.asked = [Rank(True), Rank(lives)], []

    async def begin_version(self, directory: Path, manifest: Manifest) -> None:
        self.asked.append(("begin", directory, manifest.version))

    async def write_version(self, bucket: int, packed: PackedBucket) -> PackedBucket:
        self.asked.append(("write", bucket))
        return WRITTEN

    async def complete_version(self) -> None:
        self.asked.append(("complete",))


def config_of(directory: Path, transport: str) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(directory)},
            "model": {"path": "model"},
            "rollout": {"prompts": "none"},
            "publish": {"transport": transport},
        }
    )


def test_the_configured_delivery_is_made(tmp_path: Path) -> None:
    kinds = {name: type(make_delivery(Ranks(), config_of(tmp_path, name))) for name in ("disk", "memory", "cuda_ipc")}
    assert kinds == {"disk": DiskDelivery, "memory": MemoryDelivery, "cuda_ipc": MemoryDelivery}


async def test_a_version_is_complete_on_disk_once_all_of_its_buckets_are_written(tmp_path: Path) -> None:
    """Whatever became of it at the engines: one that comes back catches up from it."""
    ranks = Ranks()
    delivery = make_delivery(ranks, config_of(tmp_path, "disk"))
    await delivery.begin(MANIFEST, 2)
    for bucket in range(2):
        await delivery.end()
        assert ("complete",) not in ranks.asked
        assert await delivery.take(BUCKET, bucket) is WRITTEN, "the source may release its own"
        assert delivery.wire == 4 * (bucket + 1)
    for _ in range(2):
        await delivery.end()
    directory = tmp_path / "publish"
    assert ranks.asked == [("begin", directory, 7), ("write", 0), ("write", 1), ("complete",)]
    assert delivery.kept(7) is None and delivery.keeps


@pytest.mark.parametrize("lives", [True, False])
async def test_a_bucket_whose_owner_died_is_no_engines_fault(
    tmp_path: Path, lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "DEATH_S", 0.1)

    class Gone:
        """An engine that cannot open the bucket."""

        name = "e0"

        async def perform(self, verb: str, *arguments: Any) -> None:
            raise SlimxError("it cannot be opened", code="bucket.gone", about="e0")

    delivery = make_delivery(Ranks(lives), config_of(tmp_path, "memory"))
    await delivery.begin(MANIFEST, 1)
    kind, code = (SlimxError, "bucket.gone") if lives else (TransportLost, "publish.source")
    with refused(code, kind=kind):
        await delivery.bring(Gone(), 3, BUCKET, 0)

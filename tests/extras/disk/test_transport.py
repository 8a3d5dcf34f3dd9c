"""Versions that trainer rank 0 writes as files, as the publisher has them brought."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slimx.config.schema import Config
from slimx.engines.transport import transport_of
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket
from tests.refusals import invalid

BUCKET = PackedBucket("/proc/1/fd/3", 4, ((),))
WRITTEN = PackedBucket("/shelf/bucket-0", 4, ((),))
MANIFEST = Manifest(policy="actor", version=7, trainer_step=7, membership_epoch=3)


class Trainers:
    """Trainer ranks that note which version they write."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def call(self, method: str, what: str, /, *, per_rank: None, ranks: list[int], **arguments: Any) -> list[Any]:
        assert ranks == [0]
        self.calls.append((method, *(value for name, value in arguments.items() if name != "packed")))
        return [WRITTEN if method == "disk.write" else None]


def config_of(directory: Path, *engines: dict[str, Any], **publish: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(directory)},
            "model": {"path": "model"},
            "rollout": {"prompts": "none", "engines": engines or ({},)},
            "publish": {"transport": "disk"} | publish,
        }
    )


async def test_a_version_is_complete_on_disk_once_all_of_its_buckets_are_written(tmp_path: Path) -> None:
    """Whatever became of it at the engines: one that comes back catches up from it."""
    trainers, config = Trainers(), config_of(tmp_path)
    _, delivery = transport_of(config.publish).connect(config, trainers, None, None)
    await delivery.begin(MANIFEST, 2)
    for bucket in range(2):
        await delivery.end()
        assert ("disk.complete",) not in trainers.calls
        assert await delivery.take(BUCKET, bucket) is WRITTEN, "the source may release its own"
        assert delivery.wire == 4 * (bucket + 1)
    for _ in range(2):
        await delivery.end()
    begun = ("disk.begin", str(tmp_path / "publish"), MANIFEST)
    assert trainers.calls == [begun, ("disk.write", 0), ("disk.write", 1), ("disk.complete",)]
    assert delivery.kept(7) is None and delivery.keeps


def test_only_changed_tensors_are_assembled_next_to_a_server(tmp_path: Path) -> None:
    whole, changes = config_of(tmp_path).publish, config_of(tmp_path, delta={"every_full": 10}).publish
    assert transport_of(whole).end(whole) is None
    assert transport_of(changes).end(changes)().item == 2


@pytest.mark.parametrize("engines", [{"urls": ["http://127.0.0.1:8000"]}, {"tensor": 16, "nodes": 2}], ids=str)
def test_changes_are_refused_without_a_process_to_apply_them(tmp_path: Path, engines: dict[str, Any]) -> None:
    config_of(tmp_path, engines)
    with invalid("publish.delta_beside"):
        config_of(tmp_path, engines, delta={"every_full": 10})

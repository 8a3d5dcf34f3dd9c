"""Versions as files of changes: readers get, bit for bit, the bytes of whole files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from slimx.extras.disk import versions
from slimx.extras.disk.changes import ChainReader, ChangesDirectory
from slimx.reshard.kernels.cpu import checksum_tensor
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket, PackedTensor
from slimx.reshard.transports.memory import open_memory
from tests.refusals import refused

EVERY_FULL, STEPS, ITEM = 8, 100, 2
SIZES = (200 * 1024, 64 * 1024, 4096)
"""Bytes of the buckets."""


class Stand:
    """A shelf of changes, one of whole files of the same weights, and readers on the machines of engines."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.shelf = ChangesDirectory(directory / "changes", item=ITEM, every_full=EVERY_FULL)
        self.whole = versions.VersionDirectory(directory / "whole")
        self.draw = torch.Generator().manual_seed(0)
        self.data = [torch.randint(256, (size,), generator=self.draw).to(torch.uint8) for size in SIZES]
        self.epoch = 0

    def update(self, share: float) -> None:
        for data in self.data:
            moved = torch.rand(len(data), generator=self.draw) < share
            data[moved] = torch.randint(256, (int(moved.sum()),), generator=self.draw).to(torch.uint8)

    def packed(self, bucket: int) -> PackedBucket:
        data = self.data[bucket]
        tensor = PackedTensor(f"t{bucket}", "uint8", (len(data),), 0, len(data), checksum_tensor(data))
        return PackedBucket("/proc/1/fd/3", len(data), ((tensor,),))

    def write(self, version: int, *readers: ChainReader, complete: bool = True) -> int:
        """Publishes the present bytes to `readers` by both and compares them; returns the bytes of changes written."""
        self.epoch += 1
        manifest = Manifest(policy="p", version=version, trainer_step=version, membership_epoch=self.epoch)
        self.shelf.begin(manifest)
        self.whole.begin(manifest)
        written = 0
        for bucket, data in enumerate(self.data):
            out = self.shelf.add(bucket, self.packed(bucket), data)
            other = self.whole.add(bucket, self.packed(bucket), data)
            written += out.chain[-1].nbytes
            for reader in readers:
                assert torch.equal(taken(reader, out), taken_whole(other))
        if complete:
            self.shelf.commit()
            self.whole.commit()
        return written

    def versions(self) -> list[str]:
        return sorted(path.name for path in (self.directory / "changes").iterdir())

    def newest(self) -> list[PackedBucket]:
        stored = versions.newest(self.directory / "changes")
        assert stored is not None
        return stored.buckets


def taken(reader: ChainReader, packed: PackedBucket) -> torch.Tensor:
    """Returns the bytes of the bucket's only tensor, verified by its checksum."""
    ((tensor,),) = packed.targets
    with reader.landed(packed) as landed:
        memory = open_memory(landed.path, landed.size)
    found = memory[tensor.offset : tensor.offset + tensor.nbytes].clone()
    assert checksum_tensor(found) == tensor.checksum and landed.targets == packed.targets
    return found


def taken_whole(packed: PackedBucket) -> torch.Tensor:
    ((tensor,),) = packed.targets
    return open_memory(packed.path, packed.size, private=True)[tensor.offset : tensor.offset + tensor.nbytes]


@pytest.fixture
def stand() -> Iterator[Stand]:
    """In memory, as each file that is written waits for its disk; and of one thread: waking another takes longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with TemporaryDirectory(dir="/dev/shm", prefix="slimx-test-") as directory:
        yield Stand(Path(directory))
    torch.set_num_threads(threads)


def test_over_a_hundred_versions_changes_bring_what_whole_files_bring(stand: Stand) -> None:
    draw, readers, sent = np.random.default_rng(0), [ChainReader(ITEM), ChainReader(ITEM)], []
    for step in range(STEPS):
        stand.update(float(draw.choice([0.0, 0.001, 0.02, 0.9])))
        if step == 43:  # an engine is lost, and catches up two versions later
            readers[1] = ChainReader(ITEM)
        # The other one is lost, or has missed versions, whole ones among them.
        active = readers[:1] if 41 <= step < 43 or 20 <= step < 30 else readers
        sent.append(stand.write(step, *active, complete=step != 60) / sum(SIZES))
        if step == 70:  # another process: it has nothing to compare with
            stand.shelf = ChangesDirectory(stand.directory / "changes", item=ITEM, every_full=EVERY_FULL)
        if step != 60:
            for bucket, packed in enumerate(stand.newest()):
                assert torch.equal(taken(ChainReader(ITEM), packed), stand.data[bucket]), "an engine that has nothing"
            assert 1 <= len(stand.versions()) <= EVERY_FULL
    assert sent[0] == 1.0 and sent[61] == sent[71] == 1.0, "after what was not completed, and by another process"
    assert min(sent) < 0.01 and np.mean(sent) < 0.5


def test_files_are_read_once_and_kept_while_the_newest_version_needs_them(stand: Stand) -> None:
    reader, back = ChainReader(ITEM), ChainReader(ITEM)
    counts = []
    for version in range(EVERY_FULL + 1):
        stand.update(0.001)
        before = reader.read
        written = stand.write(version, reader)
        assert reader.read - before == written, "what is held is not read again"
        counts.append(len(stand.versions()))
    assert counts == [*range(1, EVERY_FULL + 1), 1]
    for bucket, packed in enumerate(stand.newest()):
        assert torch.equal(taken(back, packed), stand.data[bucket])
    assert back.read == sum(SIZES)


def test_a_version_that_is_published_again_is_built_upon_nothing_of_itself(stand: Stand) -> None:
    reader = ChainReader(ITEM)
    for version in (1, 2, 2, 3):
        stand.update(0.001)
        written = stand.write(version, reader)
        assert (written == sum(SIZES)) == (version in (1,) or len(stand.versions()) == 1)
    for bucket, packed in enumerate(stand.newest()):
        assert torch.equal(taken(ChainReader(ITEM), packed), stand.data[bucket])


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bucket.size"),
        (lambda path: path.unlink(), "bucket.gone"),
        (lambda path: path.write_bytes(b"\xff" * len(path.read_bytes())), "delta.frame"),
    ],
    ids=["truncated", "gone", "garbage"],
)
def test_a_file_that_was_changed_is_refused_and_read_anew_afterwards(stand: Stand, spoil, code: str) -> None:
    reader = ChainReader(ITEM)
    stand.write(1, reader)
    stand.update(0.01)
    stand.write(2)
    (packed, *_) = stand.newest()
    path = Path(packed.path)
    before = path.read_bytes()
    spoil(path)
    with refused(code), reader.landed(packed):
        pytest.fail("it was taken")
    path.write_bytes(before)
    assert torch.equal(taken(reader, packed), stand.data[0])

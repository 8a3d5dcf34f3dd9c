"""Ranks fill the buckets of one publication: the publisher, one that maps its memory, one that sends from afar.

Real processes over gloo: this one is the publisher (rank 0) and starts the other two.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slimx.reshard.pack.gather import Gatherer
from slimx.reshard.pack.packer import Contribution, Packer, describe
from slimx.reshard.packed import PUBLISHER, PackedBucket
from tests import reshard_reference as reference
from tests.unit.layout.engine_stand import SERVED, engine_rank
from tests.unit.layout.layout_stand import Tensors, bytes_read, checkpoint, trainer_shards
from tests.unit.reshard.gather_stand import DEADLINE_S, ENGINE, MODEL, REMOTE, SIZES, WORLD, dressed, plan


def fill_all(rank: int, directory: Path) -> Iterator[tuple[PackedBucket, torch.Tensor]]:
    """Runs one rank of a publication; the publisher yields each bucket and its memory."""
    torch.set_num_threads(1)
    deadline = timedelta(seconds=DEADLINE_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=WORLD, timeout=deadline
    )
    try:
        packer = Packer(plan(), rank, torch.load(directory / f"{rank}.pt"))
        gatherer = Gatherer(packer, remote=REMOTE, group=dist.group.WORLD)
        for bucket in range(packer.plan.count):
            path = [list(gatherer.open(bucket).values()) if rank == PUBLISHER else None]
            dist.broadcast_object_list(path, PUBLISHER)
            shares: list[Contribution | None] = [None] * WORLD
            share = gatherer.fill(bucket, path[0])
            dist.gather_object(share, shares if rank == PUBLISHER else None, PUBLISHER)
            if rank == PUBLISHER:
                form = packer.form(bucket)
                memory = torch.from_file(path[0][0], size=form.size, dtype=torch.uint8)
                yield describe(form, path[0], shares), memory
                gatherer.release(bucket)
                assert not Path(path[0][0]).exists()
        dist.barrier()
    finally:
        dist.destroy_process_group()


PROGRAM = """
import sys
from pathlib import Path
from tests.unit.reshard.gather_stand import run_others
from tests.unit.reshard.test_gather import fill_all
run_others(lambda rank: len(list(fill_all(rank, Path(sys.argv[1])))))
"""


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for rank, tensors in enumerate(trainer_shards(MODEL, SIZES)):
        torch.save(dressed(tensors), tmp_path / f"{rank}.pt")
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)])
    yield process
    process.kill()
    process.wait()


def test_local_and_remote_ranks_fill_the_same_buckets(tmp_path: Path, others):
    threads = torch.get_num_threads()
    found: list[Tensors] = [{}, {}]
    for packed, memory in fill_all(PUBLISHER, tmp_path):
        for target, tensors in enumerate(packed.targets):
            for t in tensors:
                found[target][t.name] = (
                    memory[t.offset : t.offset + t.nbytes].view(torch.bfloat16).view(t.shape).clone()
                )
                assert t.checksum == reference.checksum(found[target][t.name]), t.name
    torch.set_num_threads(threads)
    sent = bytes_read(plan()).sum(axis=1)
    assert others.wait(DEADLINE_S) == 0 and (sent > 0).all()
    for rank in range(ENGINE.world):
        expected = dressed(engine_rank(SERVED["qwen"], checkpoint(MODEL), ENGINE, rank))
        assert found[rank].keys() == expected.keys()
        assert all(found[rank][name].equal(tensor.bfloat16()) for name, tensor in expected.items())


def test_memory_persists_and_a_new_file_under_an_old_name_is_mapped_again():
    """A closed file's number goes to the next file: the other rank must write into that one."""
    shards = trainer_shards(MODEL, SIZES)
    ranks = [Gatherer(Packer(plan(), rank, dressed(shards[rank])), remote=(), group=None) for rank in range(WORLD)]

    def fill(bucket: int) -> tuple[str, torch.Tensor]:
        path = ranks[PUBLISHER].open(bucket)[0]
        for rank in ranks:
            rank.fill(bucket, [path])
        return path, torch.from_file(path, size=rank.packer.form(bucket).size, dtype=torch.uint8).clone()

    path, filled = fill(0)
    inode = Path(path).stat().st_ino
    ranks[PUBLISHER].release()
    assert fill(0)[0] == path and Path(path).stat().st_ino == inode, "a publication has ended: its memory is kept"
    ranks[PUBLISHER].release(0)
    assert not Path(path).exists()
    again, refilled = fill(0)
    assert again == path and Path(path).stat().st_ino != inode and refilled.equal(filled)


def test_buckets_owned_in_turn_equal_buckets_in_one_memory():
    shards = [dressed(tensors) for tensors in trainer_shards(MODEL, SIZES)]
    alone = [Gatherer(Packer(plan(), rank, tensors), remote=(), group=None) for rank, tensors in enumerate(shards)]
    ranks = [
        Gatherer(Packer(plan(), rank, tensors, apart=True), remote=(), group=None, holders=WORLD)
        for rank, tensors in enumerate(shards)
    ]
    holding = []
    for bucket in range(plan().count):
        opened = [rank.open(bucket) for rank in ranks]
        holding += [(part, rank) for rank, parts in enumerate(opened) for part in parts]
        paths = [path for _, path in sorted(item for parts in opened for item in parts.items())]
        whole = [alone[PUBLISHER].open(bucket)[0]]
        apart = describe(ranks[0].packer.form(bucket), paths, [rank.fill(bucket, paths) for rank in ranks])
        one = describe(alone[0].packer.form(bucket), whole, [rank.fill(bucket, whole) for rank in alone])
        assert apart.nbytes == one.nbytes and len(paths) == ENGINE.world
        for target, tensors in enumerate(one.targets):
            data = torch.from_file(paths[target], size=apart.size, dtype=torch.uint8)
            for there, here in zip(apart.targets[target], tensors, strict=True):
                assert (there.name, there.checksum) == (here.name, here.checksum)
                memory = torch.from_file(whole[0], size=one.size, dtype=torch.uint8)
                assert data[there.offset :][: there.nbytes].equal(memory[here.offset :][: here.nbytes])
    times = [[rank for _, rank in holding].count(rank) for rank in range(WORLD)]
    assert len(holding) == plan().count * ENGINE.world and max(times) - min(times) <= 1
    (path,) = (parts[0] for rank in ranks if 0 in (parts := rank.open(0)))
    for rank in ranks:
        rank.release(0)
    assert not Path(path).exists()

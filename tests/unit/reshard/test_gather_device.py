"""Ranks fill the buckets of one publication in the memory of the publisher's GPU: the publisher, one whose own GPU
reaches it, one that sends from afar.

Real processes over gloo, each with the emulated device (cuda_stand): this one is the publisher, rank 0.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from slimx.layout.form import AttachedForm
from slimx.reshard.pack.gather_device import SLOTS, DeviceGatherer
from slimx.reshard.pack.packer import Contribution, Packer, describe
from slimx.reshard.packed import PUBLISHER, PackedBucket
from slimx.reshard.transports.device import fetch
from slimx.trainer.device.memory import PhasePeaks, ProcessMeter
from slimx.trainer.weight_export import WeightExport
from tests import reshard_reference as reference
from tests.refusals import refused
from tests.unit.layout.engine_stand import SERVED, engine_rank
from tests.unit.layout.layout_stand import Tensors, bytes_read, checkpoint, trainer_shards
from tests.unit.reshard.cuda_stand import DEVICE, use_emulator
from tests.unit.reshard.gather_stand import DEADLINE_S, ENGINE, MODEL, REMOTE, SIZES, WORLD, dressed, plan

PROGRAM = """
import sys
from pathlib import Path
import pytest
from tests.unit.reshard.cuda_stand import use_emulator
from tests.unit.reshard.gather_stand import run_others
from tests.unit.reshard.test_gather_device import fill_all

def rank(number):
    emulator = use_emulator(Path(sys.argv[2]), pytest.MonkeyPatch())
    list(fill_all(number, Path(sys.argv[1])))
    return emulator.emulator_open()

run_others(rank)
"""


def fill_all(rank: int, directory: Path) -> Iterator[tuple[PackedBucket, DeviceGatherer]]:
    """Fills the buckets of two publications on a rank; the publisher yields each bucket while it is held."""
    torch.set_num_threads(1)
    deadline = timedelta(seconds=DEADLINE_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=WORLD, timeout=deadline
    )
    try:
        packer = Packer(plan(), rank, torch.load(directory / f"{rank}.pt"))
        gatherer = DeviceGatherer(packer, remote=REMOTE, group=dist.group.WORLD)
        for bucket in [*range(packer.plan.count)] * 2:
            path = [list(gatherer.open(bucket).values()) if rank == PUBLISHER else None]
            dist.broadcast_object_list(path, PUBLISHER)
            shares: list[Contribution | None] = [None] * WORLD
            share = gatherer.fill(bucket, path[0])
            dist.gather_object(share, shares if rank == PUBLISHER else None, PUBLISHER)
            if rank == PUBLISHER:
                yield describe(packer.form(bucket), path[0], shares), gatherer
                gatherer.release(bucket)
        gatherer.close()
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.fixture
def emulator(emulator_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulator(emulator_library, monkeypatch)


@pytest.fixture
def others(tmp_path: Path, emulator_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for rank, tensors in enumerate(trainer_shards(MODEL, SIZES)):
        torch.save(dressed(tensors), tmp_path / f"{rank}.pt")
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path), str(emulator_library)])
    yield process
    process.kill()
    process.wait()


def test_ranks_with_and_without_peer_access_fill_the_same_buckets(tmp_path, emulator, others):
    threads = torch.get_num_threads()
    found: list[Tensors] = [{}, {}]
    paths = set()
    for packed, _ in fill_all(PUBLISHER, tmp_path):
        assert packed.on_device
        paths.add(packed.path)
        memory = fetch(packed.path, 0, packed.size, DEVICE)
        for target, tensors in enumerate(packed.targets):
            for t in tensors:
                stored = memory[t.offset : t.offset + t.nbytes].view(torch.bfloat16).view(t.shape)
                assert t.checksum == reference.checksum(stored), t.name
                found[target][t.name] = stored
    torch.set_num_threads(threads)
    assert len(paths) == 1, "a bucket that is released before the next is packed leaves it its memory"
    sent = bytes_read(plan()).sum(axis=1)
    assert others.wait(DEADLINE_S) == 0, "no memory of the publisher is left open"
    assert (sent > 0).all()
    for rank in range(ENGINE.world):
        expected = dressed(engine_rank(SERVED["qwen"], checkpoint(MODEL), ENGINE, rank))
        assert found[rank].keys() == expected.keys()
        assert all(found[rank][name].equal(tensor.bfloat16()) for name, tensor in expected.items())


def test_a_bucket_keeps_its_memory_until_it_is_released_and_there_are_two(emulator):
    (tensors,) = [shard for rank, shard in enumerate(trainer_shards(MODEL, SIZES)) if rank == PUBLISHER]
    gatherer = DeviceGatherer(Packer(plan(), PUBLISHER, dressed(tensors)), remote=(), group=None)
    first, second = (gatherer.open(bucket)[0] for bucket in range(SLOTS))
    assert first != second and gatherer.open(0)[0] == first
    with refused("pack.no_memory", about="bucket 2"):
        gatherer.open(2)
    gatherer.release(0)
    assert gatherer.open(2)[0] == first, "no third allocation"
    gatherer.release()
    assert {gatherer.open(bucket)[0] for bucket in (3, 4)} == {first, second}
    gatherer.close()
    assert gatherer.open(0), "the next publication takes memory anew"
    gatherer.close()


def test_a_weight_that_is_not_finite_ends_it_by_name(emulator):
    parameters = dressed(trainer_shards(MODEL, SIZES)[PUBLISHER])
    parameters["embedding.word_embeddings.weight"][0, 0] = float("nan")
    gatherer = DeviceGatherer(Packer(plan(bucket_bytes=10**6), PUBLISHER, parameters), remote=(), group=None)
    with refused("kernel.nonfinite", about="model.embed_tokens.weight"):
        gatherer.fill(0, [gatherer.open(0)[0]])
    gatherer.close()


def test_a_worker_finds_peers_and_releases_memory_when_offloaded(emulator):
    parameters = dressed(trainer_shards(MODEL, SIZES)[PUBLISHER])
    model = SimpleNamespace(
        parallel=SimpleNamespace(rank=PUBLISHER, device=DEVICE, host_group=None),
        weights=SimpleNamespace(parameters=parameters, attached=AttachedForm()),
        on_moved=[],
        reload=lambda training: None,
    )
    export = WeightExport(model, PhasePeaks(ProcessMeter(), "generate"))
    for on_device in (True, False):
        path, content = export.probe(on_device=on_device)
        assert path.startswith("cuda-ipc:") == on_device and export.reaches(path=path, content=content)
        assert not export.reaches(path=path, content=bytes(len(content))), "another rank's memory at the same path"
        elsewhere = path.replace(path.split("/")[0], "cuda-ipc:elsewhere") if on_device else "/nowhere"
        assert not export.reaches(path=elsewhere, content=content)
    for name, on_device in (("publish", True), ("export", False)):
        export.prepare(name=name, plan=plan().to_bytes(), remote=[], on_device=on_device)
    on_device, on_host = (
        export.fill(name=name, bucket=0, paths=list(export.open(name=name, bucket=0).values()))
        for name in ("publish", "export")
    )
    assert on_device.sums.any() and (on_device.sums == on_host.sums).all()
    export.release(name="publish", bucket=None)
    (memory,) = export._gatherers["publish"]._free
    export.offload()
    assert not memory._free.alive, "freed"

"""A checkpoint that does not fit is reported at once, with the directory, the bytes needed and the bytes free."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from slimx.errors import SlimxError
from slimx.trainer.checkpoint import files
from slimx.trainer.process import install_adapters
from tests.full_disk import fill, small_disk
from tests.function_call import call_in_process
from tests.unit.orchestration.checkpointing_stand import Bench, state

NBYTES = 2**20


@dataclass(frozen=True)
class Written:
    """A directory, and the failure that a rank reported after it had written about a megabyte there."""

    directory: Path
    failure: SlimxError | None


def failures(directories: list[str]) -> list[dict[str, str] | None]:
    """Writes about a megabyte of a checkpoint into each directory, as rank 1 of two, in a process whose torch the
    trainer's adapters may change. Returns the failures that the rank notes: {"code", "about", "sentence"}, or None."""
    install_adapters()
    import torch
    from torch.distributed.checkpoint import DefaultSavePlanner

    from slimx.trainer.checkpoint.save import Saver

    planner = DefaultSavePlanner()
    planner.set_up_planner({"weight": torch.zeros(NBYTES // 4)}, is_coordinator=True)
    plan = planner.create_local_plan()
    found: list[dict[str, str] | None] = []
    for directory in map(Path, directories):
        saver = Saver(rank=1, world=2, group=None, deadline_s=60)
        saver._write(directory, plan, {item.index: planner.resolve_data(item) for item in plan.items}, b"")
        error = saver.failure
        found.append(error and {"code": error.code, "about": error.about, "sentence": str(error)})
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Written]]:
    """A disk with room, one that is full before the end, and one that is full from the start."""
    root = tmp_path_factory.mktemp("disks")
    with ExitStack() as stack:
        small = {name: stack.enter_context(small_disk(root / name, kib=256)) for name in ("too small", "full")}
        directories = {"roomy": root / "roomy", **small}
        for directory in directories.values():
            (directory / files.REPORTS).mkdir(parents=True)
        fill(directories["full"])
        found = call_in_process(failures, [str(directory) for directory in directories.values()])
        errors = [error and SlimxError(error["sentence"], code=error["code"], about=error["about"]) for error in found]
        yield {name: Written(directories[name], error) for name, error in zip(directories, errors, strict=True)}


@pytest.mark.parametrize("name", ["too small", "full"])
def test_a_full_disk_is_reported_with_bytes_needed_and_free(written, name):
    disk, failure = written[name].directory, written[name].failure
    with pytest.raises(SlimxError) as error:
        if name == "full" and failure is not None:
            raise failure  # no byte for a report: the rank itself raises
        files.unreported(disk, range(2))
    assert error.value.code == "checkpoint.write" and error.value.about == str(disk)
    assert "trainer rank 1" in str(error.value) and f"writes {NBYTES} bytes" in str(error.value)
    assert " are free" in str(error.value)


def test_a_rank_that_has_room_reports_and_leaves_nothing_reserved(written):
    directory, failure = written["roomy"].directory, written["roomy"].failure
    assert failure is None
    assert files.unreported(directory, [1]) == []
    assert sum(record.size for record in files.read_report(directory, 1).files.values()) >= NBYTES


async def test_the_run_hears_of_a_failed_save_at_once_and_not_when_it_asks(tmp_path):
    bench, heard = Bench(tmp_path), []
    bench.checkpoints.on_failure = heard.append
    await bench.checkpoints.save(state(1))
    files.write_failure(bench.trainers.saves[0], 1, "no room")
    async with asyncio.timeout(60):
        while not heard:
            await asyncio.sleep(0.005)
    assert heard[0].code == "checkpoint.write" and heard[0].about == str(bench.trainers.saves[0])


@pytest.mark.parametrize("moment", ["begin", "commit"])
async def test_a_disk_that_the_driver_finds_full_is_named(tmp_path, moment):
    with small_disk(tmp_path / "disk", kib=256) as disk:
        bench = Bench(disk)
        if moment == "begin":
            (disk / "checkpoints").write_text("")  # a file where a directory must be
            with pytest.raises(SlimxError) as error:
                await bench.checkpoints.save(state(1))
        else:
            await bench.checkpoints.save(state(1))
            for rank in range(2):
                bench.trainers.write(rank)
            fill(disk)
            with pytest.raises(SlimxError) as error:
                await bench.checkpoints.settle()
            assert bench.saves.newest() is None
    assert error.value.code == "checkpoint.write" and error.value.about.startswith(str(disk / "checkpoints"))

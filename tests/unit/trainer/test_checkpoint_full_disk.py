"""A checkpoint that does not fit: told at once, with the directory, the bytes needed and the bytes free."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from slimx.errors import SlimxError
from slimx.trainer.checkpoint import files
from tests.full_disk import fill, small_disk
from tests.unit.orchestration.checkpointing_stand import Bench, state
from tests.unit.trainer.full_disk_rank import NBYTES


@dataclass(frozen=True)
class Written:
    """A directory, and the failure that a rank told of itself after it had written about a megabyte there."""

    directory: Path
    told: SlimxError | None


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
        command = [sys.executable, "-W", "ignore", "-m", "tests.unit.trainer.full_disk_rank"]
        done = subprocess.run([*command, *map(str, directories.values())], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()[-len(directories) :]]
        told = [line and SlimxError(line["sentence"], code=line["code"], about=line["about"]) for line in lines]
        yield {name: Written(directories[name], error) for name, error in zip(directories, told, strict=True)}


@pytest.mark.parametrize("name", ["too small", "full"])
def test_a_full_disk_is_reported_with_bytes_needed_and_free(written, name):
    disk, told = written[name].directory, written[name].told
    with pytest.raises(SlimxError) as error:
        if name == "full" and told is not None:
            raise told  # no byte for a report: the rank itself tells
        files.unreported(disk, range(2))
    assert error.value.code == "checkpoint.write" and error.value.about == str(disk)
    assert "trainer rank 1" in str(error.value) and f"writes {NBYTES} bytes" in str(error.value)
    assert " are free" in str(error.value)


def test_a_rank_that_has_room_reports_and_leaves_nothing_reserved(written):
    directory, told = written["roomy"].directory, written["roomy"].told
    assert told is None
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

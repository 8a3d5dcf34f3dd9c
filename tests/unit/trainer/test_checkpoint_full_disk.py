"""A checkpoint that does not fit: told at once, with the directory, the bytes needed and the bytes free."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from slimx.errors import SlimxError
from slimx.trainer.checkpoint import files
from tests.full_disk import fill, small_disk
from tests.unit.orchestration.checkpointing_stand import Bench, state
from tests.unit.trainer.full_disk_rank import NBYTES

pytestmark = pytest.mark.costly


def written(directory: Path, rank: int = 1) -> SlimxError | None:
    """Write about a megabyte as the thread of one rank of two does; the failure that the rank itself tells."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.trainer.full_disk_rank", str(directory), str(rank)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    return told and SlimxError(told["sentence"], code=told["code"], about=told["about"])


@pytest.mark.parametrize("full_from_the_start", [False, True])
def test_a_rank_that_finds_the_disk_full_says_so_with_the_bytes_needed_and_free(tmp_path, full_from_the_start):
    with small_disk(tmp_path / "disk", kib=256) as disk:
        (disk / files.REPORTS).mkdir(parents=True)
        if full_from_the_start:
            fill(disk)
        told = written(disk)
        with pytest.raises(SlimxError) as error:
            if full_from_the_start and told is not None:
                raise told  # no byte for a report: the rank itself tells
            files.unreported(disk, range(2))
    assert error.value.code == "checkpoint.write" and error.value.about == str(disk)
    assert "trainer rank 1" in str(error.value) and f"writes {NBYTES} bytes" in str(error.value)
    assert " are free" in str(error.value)


def test_a_rank_that_has_room_reports_and_leaves_nothing_reserved(tmp_path):
    (tmp_path / files.REPORTS).mkdir(parents=True)
    assert written(tmp_path) is None
    assert files.unreported(tmp_path, [1]) == []
    assert sum(record.size for record in files.read_report(tmp_path, 1).files.values()) >= NBYTES


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

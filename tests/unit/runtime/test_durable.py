"""A file that is written anew is the old one or the new one, whatever happens in between."""

from __future__ import annotations

import errno

import pytest

from slimx.digest import record, record_bytes
from slimx.durable import replace_synced, write_atomic
from tests.full_disk import fill, small_disk
from tests.refusals import refused


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_takes_the_place_of_the_old_one_piece_by_piece(tmp_path, sync):
    path = tmp_path / "state.json"
    path.write_bytes(b"old")
    write_atomic(path, b"one ", memoryview(b"two"), sync=sync)
    assert path.read_bytes() == b"one two" and list(tmp_path.iterdir()) == [path]
    assert record(path) == record_bytes(b"one two")


@pytest.mark.parametrize("sync", [True, False])
def test_a_full_disk_keeps_the_old_file_and_leaves_no_partial_one(tmp_path, sync):
    with small_disk(tmp_path / "disk", kib=256) as disk:
        path = disk / "state.json"
        path.write_bytes(b"old")
        fill(disk)
        with pytest.raises(OSError) as failed:
            write_atomic(path, bytes(2**19), sync=sync)
        assert failed.value.errno == errno.ENOSPC
        with refused("disk.write", about=str(path)):
            replace_synced(path, bytes(2**19))
        assert path.read_bytes() == b"old" and not (disk / "state.json.partial").exists()

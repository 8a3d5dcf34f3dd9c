"""Archives of others cost no more memory and disk than the bounds say, whatever their headers claim."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimx.extras.boxes import rootfs
from slimx.extras.boxes.archives import HEADERS
from slimx.extras.boxes.programs.enclosure import MIB
from slimx.extras.boxes.rootfs import ENTRY
from slimx.extras.boxes.terminal.judging import NoVerdict, judged
from slimx.extras.boxes.terminal.tasks import Checks, Task
from tests.refusals import refused

PEAK = 16 * MIB
"""Bytes of memory for an archive, at most; Python's objects and decompression included."""
END = bytes(2 * tarfile.BLOCKSIZE)


def header(kind: bytes, size: int, name: str = "x") -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


def extended(kind: bytes, content: bytes) -> bytes:
    return header(kind, len(content)) + content + bytes(-len(content) % tarfile.BLOCKSIZE)


def record(key: str, value: bytes) -> bytes:
    """One record of an extended header, which begins with its own length."""
    rest = b" %s=%s\n" % (key.encode(), value)
    length = len(rest) + 1
    while len(b"%d" % length) + len(rest) != length:
        length = len(b"%d" % length) + len(rest)
    return b"%d" % length + rest


def old_sparse(parts: int) -> bytes:
    """A sparse file of GNU tar's old form, whose table goes on in `parts` blocks."""
    buffer = bytearray(header(tarfile.GNUTYPE_SPARSE, 0))
    buffer[482] = 1
    buffer[148:156] = b" " * 8
    buffer[148:156] = b"%06o\0 " % sum(buffer)
    block = b"".join(b"%011o\0%011o\0" % (1, 1) for _ in range(21))
    return bytes(buffer) + parts * (block + b"\1" + bytes(7))


def new_sparse(numbers: int) -> bytes:
    keys = {"GNU.sparse.major": b"1", "GNU.sparse.minor": b"0", "GNU.sparse.realsize": b"1"}
    head = extended(tarfile.XHDTYPE, b"".join(record(key, value) for key, value in keys.items()))
    return head + header(tarfile.REGTYPE, 0) + b"%d\n" % numbers + (b"0" * 99 + b"\n") * numbers


def negative(size: int) -> bytes:
    """A header whose size is below 0, in the base-256 form."""
    buffer = bytearray(header(tarfile.REGTYPE, 0))
    buffer[124:136] = b"\xff" + size.to_bytes(11, "big", signed=True)
    buffer[148:156] = b" " * 8
    buffer[148:156] = b"%06o\0 " % sum(buffer)
    return bytes(buffer)


COMMENT = extended(tarfile.XHDTYPE, record("comment", b"x" * (HEADERS // 2)))
GLOBALS = [
    extended(tarfile.XGLTYPE, record(f"{n}", b"x" * (HEADERS // 2))) + header(b"0", 0, f"{n}") for n in range(99)
]
HOSTILE = {
    "pax header": extended(tarfile.XHDTYPE, bytes(64 * MIB)),
    "global pax header": extended(tarfile.XGLTYPE, bytes(64 * MIB)),
    "size of a pax header that is not there": header(tarfile.XHDTYPE, 2**40),
    "long name": extended(tarfile.GNUTYPE_LONGNAME, b"x" * 64 * MIB),
    "long link": extended(tarfile.GNUTYPE_LONGLINK, b"x" * 64 * MIB),
    "old sparse file": old_sparse(2**16),
    "sparse file": new_sparse(2**16),
    "chain of headers": extended(tarfile.XHDTYPE, b"") * 2000,
    "many global headers": b"".join(GLOBALS),
    "negative size": header(tarfile.REGTYPE, 0) + negative(-512),
    "negative size of a pax header": header(tarfile.REGTYPE, 0)
    + extended(tarfile.XHDTYPE, record("size", b"-512"))
    + header(tarfile.REGTYPE, 0),
}


@pytest.fixture
def bounded() -> Iterator[None]:
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < PEAK, f"{peak / MIB:.0f} MiB"


@pytest.fixture(name="to")
def _to(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def packed(path: Path, content: bytes) -> Path:
    path.write_bytes(lzma.compress(content + END, preset=1))
    return path


@pytest.mark.parametrize("case", HOSTILE)
def test_headers_of_an_archive_take_bounded_memory(tmp_path, to, case, request):
    path = packed(tmp_path / "image.tar.xz", HOSTILE[case])
    request.getfixturevalue("bounded")
    with refused("box.image", about=str(path)):
        rootfs.unpack(path, to, 1024 * MIB)


def test_headers_of_many_members_are_not_kept(tmp_path, to, request):
    members = [COMMENT + header(tarfile.REGTYPE, 0, f"file{number}") for number in range(64)]
    path = packed(tmp_path / "image.tar.xz", b"".join(members))
    request.getfixturevalue("bounded")
    rootfs.unpack(path, to, 64 * MIB)
    assert len(os.listdir(to)) == 64


def test_a_sparse_file_counts_with_the_bytes_that_it_stores(tmp_path, to):
    keys = {"GNU.sparse.major": b"0", "GNU.sparse.minor": b"1", "GNU.sparse.size": b"1"}
    keys["GNU.sparse.map"] = b"0,%d" % MIB
    head = extended(tarfile.XHDTYPE, b"".join(record(key, value) for key, value in keys.items()))
    path = packed(tmp_path / "image.tar.xz", head + header(tarfile.REGTYPE, MIB) + bytes(MIB))
    rootfs.unpack(path, to, 2 * MIB)
    with refused("box.large", about=str(path)):
        rootfs.unpack(path, to, MIB)


@pytest.mark.parametrize("compress", [lzma.compress, gzip.compress, bz2.compress])
def test_damaged_compression_is_refused(tmp_path, to, compress):
    text = random.Random(1).randbytes(2**16).hex().encode()
    whole = bytearray(compress(header(tarfile.REGTYPE, len(text)) + text + END))
    whole[2**15 : 2**15 + 64] = b"\xff" * 64
    (tmp_path / "image.tar").write_bytes(whole)
    with refused("box.image", about=str(tmp_path / "image.tar")):
        rootfs.unpack(tmp_path / "image.tar", to, MIB)


def test_an_archive_that_a_model_has_written_is_read_to_an_end():
    began = io.BytesIO()
    tarfile.open(fileobj=began, mode="w").close()
    task = Task(tests=Checks(command=("true",)), kept=("x",))
    for case in ("negative size", "negative size of a pax header", "size of a pax header that is not there"):
        with pytest.raises(NoVerdict):
            judged(HOSTILE[case] + END, began.getvalue(), task, MIB)


def test_holes_of_a_directory_count_when_it_becomes_an_archive(tmp_path):
    for number in range(60):
        with (tmp_path / f"{number}").open("wb") as file:
            file.truncate(32 * MIB)
    assert rootfs.used(tmp_path) < MIB
    archive = io.BytesIO()
    with refused("box.large", about=str(tmp_path)):
        rootfs.pack(tmp_path, archive, 100 * MIB)
    assert archive.tell() <= 100 * MIB


def test_a_packed_directory_unpacks_to_itself(tmp_path, to):
    (tmp_path / "made").mkdir()
    (tmp_path / "made/a").write_bytes(b"a")
    (tmp_path / "made/b").symlink_to("a")
    os.link(tmp_path / "made/a", tmp_path / "made/c")
    with (tmp_path / "a.tar").open("wb") as file:
        rootfs.pack(tmp_path / "made", file, 4 * ENTRY + 1)
    rootfs.unpack(tmp_path / "a.tar", to, 4 * ENTRY + 1)
    assert (to / "b").readlink() == Path("a") and (to / "a").read_bytes() == b"a" and (to / "c").samefile(to / "a")

"""Packages for a GPU machine without a network arrive there as they were collected, or not at all."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path

import pytest

from tools.gpu.unpack import MANIFEST, STAMP, Unusable, unpack
from tools.gpu.wheels import ENGINE, LOCKS, TRAINER, collect, kept, pack, pinned, split

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
PART_BYTES = 1500


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """One package of incompressible data, with files that are left out."""
    files = {
        "some/__init__.py": b"name = 'some'\n",
        "some/table.bin": random.Random(0).randbytes(4000),
        "some/__pycache__/__init__.pyc": b"x",
        "some/__init__.pyi": b"x",
        "some/configs/E=8,device_name=NVIDIA_H100_80GB_HBM3.json": b"{}",
        "some-1.0.dist-info/METADATA": b"Name: some\nVersion: 1.0\n",
        "some-1.0.dist-info/RECORD": b"x",
        "bin/some": b"x",
    }
    root = tmp_path / "site"
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


@pytest.fixture
def folder(site: Path, tmp_path: Path) -> Path:
    """Returns a folder with the packages of `site`, in parts."""
    archive, folder = tmp_path / "archive", tmp_path / "carried"
    folder.mkdir()
    pack(site, kept(site), archive)
    parts = split(archive, folder, PART_BYTES)
    whole = {"bytes": archive.stat().st_size, "sha256": hashlib.sha256(archive.read_bytes()).hexdigest()}
    manifest = {"python": PYTHON, "packages": {"some": "1.0"}, "archive": whole, "parts": parts}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def files_of(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != STAMP and ".cpython-" not in path.name
    }


def test_packages_arrive_as_they_were_collected(site: Path, folder: Path, tmp_path: Path) -> None:
    parts = sorted(folder.glob("packages.*"))
    assert len(parts) == 3 and all(part.stat().st_size <= PART_BYTES for part in parts)
    assert unpack(folder, tmp_path / "unpacked") == 1
    collected = files_of(site)
    arrived = files_of(tmp_path / "unpacked")
    assert arrived == {name: collected[name] for name in arrived}
    assert set(collected) - set(arrived) == {
        "some/__pycache__/__init__.pyc",
        "some/__init__.pyi",
        "some-1.0.dist-info/RECORD",
        "bin/some",
    }


def test_packages_that_lie_there_are_not_unpacked_again(folder: Path, tmp_path: Path) -> None:
    unpacked = tmp_path / "unpacked"
    unpack(folder, unpacked)
    (unpacked / "mark").touch()
    unpack(folder, unpacked)
    assert (unpacked / "mark").exists()
    (unpacked / STAMP).write_text("other packages")
    unpack(folder, unpacked)
    assert not (unpacked / "mark").exists()


def test_directories_with_other_files_are_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "mine").touch()
    with pytest.raises(Unusable, match="home"):
        unpack(folder, tmp_path / "home")
    with pytest.raises(SystemExit, match="home"):
        collect([], PYTHON, tmp_path / "home")
    assert (tmp_path / "home" / "mine").exists()


@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_a_part_that_is_not_whole_is_refused(folder: Path, tmp_path: Path, damage: str) -> None:
    part = sorted(folder.glob("packages.*"))[1]
    data = part.read_bytes()
    part.unlink()
    if damage != "missing":
        part.write_bytes(data[:-1] if damage == "short" else bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(Unusable, match=part.name):
        unpack(folder, tmp_path / "unpacked")
    assert not (tmp_path / "unpacked").exists()


def test_parts_of_another_archive_are_refused(folder: Path, tmp_path: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["archive"]["sha256"] = "0" * 64
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(Unusable):
        unpack(folder, tmp_path / "unpacked")
    assert not (tmp_path / "unpacked").exists()


@pytest.mark.parametrize("text", ["{", '{"python": "3.8"}', None])
def test_a_manifest_that_is_of_no_use_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(Unusable, match=MANIFEST):
        unpack(tmp_path, tmp_path / "unpacked")


def test_the_same_files_give_the_same_archive(site: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        pack(site, kept(site), tmp_path / name)
        next(site.rglob("METADATA")).touch()
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_the_locks_have_every_package_that_is_carried() -> None:
    assert len(pinned({*TRAINER, *ENGINE}, LOCKS)) == len({*TRAINER, *ENGINE})
    with pytest.raises(SystemExit, match="no-such-package"):
        pinned(("no-such-package",), LOCKS)

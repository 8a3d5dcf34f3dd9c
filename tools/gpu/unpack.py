"""Unpacks on the GPU machine the packages that `make gpu-wheels` collected: `python tools/gpu/unpack.py FOLDER
DIRECTORY`.

FOLDER contains manifest.json and the parts that it lists. DIRECTORY then contains the packages: add it to PYTHONPATH.
Only needs Python.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
STAMP = ".unpacked"
"""Name of the file in the directory with the digest of the unpacked archive."""
BLOCK = 1 << 20


class Unusable(Exception):
    """Raised if the packages cannot be unpacked, with one sentence."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of `folder`. Raises Unusable if there is none, or if it is for another version of Python."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        advice = f"run make gpu-wheels where there is a network, and bring {folder} along"
        raise Unusable(f"there is no {path}: {advice}") from None
    except ValueError as error:
        raise Unusable(f"{path} is not JSON ({error}): copy it again") from None
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if manifest["python"] != running:
        raise Unusable(f"{path} is for Python {manifest['python']}, this is {running}: collect packages for {running}")
    return manifest


def unpack(folder: Path, directory: Path) -> int:
    """Unpacks the packages of `folder` into `directory`, unless they are already there; returns their number.

    Raises Unusable if a part is missing or damaged, and removes `directory`.
    """
    manifest = read_manifest(folder)
    stamp, digest = directory / STAMP, manifest["archive"]["sha256"]
    if stamp.exists() and stamp.read_text() == digest:
        return len(manifest["packages"])
    if directory.exists() and any(directory.iterdir()) and not stamp.exists():
        raise Unusable(f"{directory} holds other files than unpacked packages, which would be removed: name another")
    parts = [(folder / part["name"], part["bytes"], part["sha256"]) for part in manifest["parts"]]
    for path, size, expected in parts:
        _check(path, size, expected)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    reader = _Joined([path for path, _, _ in parts])
    try:
        with tarfile.open(fileobj=reader, mode="r|xz") as archive:
            archive.extractall(directory, filter="data")
        for _ in iter(lambda: reader.read(BLOCK), b""):  # up to the end, for the digest
            pass
        if reader.digest.hexdigest() != digest:
            raise Unusable(f"the parts in {folder} do not make the archive of its manifest: collect them again")
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    # A server's three processes import thousands of modules each, and an environment may forbid them to keep byte code.
    compileall.compile_dir(directory, quiet=2, workers=0)
    stamp.write_text(digest)
    return len(manifest["packages"])


def _check(path: Path, size: int, digest: str) -> None:
    if not path.exists():
        raise Unusable(f"{path} is missing: copy it here, or run make gpu-wheels again")
    if path.stat().st_size != size:
        raise Unusable(f"{path} has {path.stat().st_size} bytes, the manifest says {size}: copy it again")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise Unusable(f"{path} does not have the digest of the manifest: copy it again")


class _Joined:
    """The parts read as one file, with the digest of all bytes read."""

    def __init__(self, paths: list[Path]):
        self.digest = hashlib.sha256()
        self._blocks = self._read(paths)
        self._rest = b""

    @staticmethod
    def _read(paths: list[Path]) -> Iterator[bytes]:
        for path in paths:
            with path.open("rb") as file:
                yield from iter(lambda: file.read(BLOCK), b"")  # noqa: B023  # it is used up before the next one

    def read(self, size: int) -> bytes:
        """Returns up to `size` bytes; none at the end of the last part."""
        block = self._rest or next(self._blocks, b"")
        taken, self._rest = block[:size], block[size:]
        self.digest.update(taken)
        return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    try:
        count = unpack(options.folder, options.directory)
    except Unusable as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{count} packages in {options.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

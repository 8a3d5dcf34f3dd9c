"""Store of images: one file per prepared image, which all processes of a run read, and the original files of images
that prompt files contain. Files are named by digests."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save

from slimx.digest import fingerprint
from slimx.durable import write_atomic
from slimx.errors import SlimxError

_PIXELS = "pixels"
_GRID = "grid"
Grid = tuple[int, int, int]


class ImageStore:
    """Directory of images. A file is written once and never changed."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)

    def save(self, digest: str, pixels: np.ndarray, grid: Grid) -> None:
        """Stores `pixels`, float32 [patches, elements of a patch], of an image with `grid` patches (time, height,
        width) under `digest`."""
        file = self._file(digest)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, save({_PIXELS: pixels, _GRID: np.array(grid, np.int64)}))

    def grid(self, digest: str) -> Grid | None:
        """Returns the grid of the image that was stored under `digest`; None if there is none."""
        file = self._file(digest)
        if not file.exists():
            return None
        with safe_open(file, "numpy") as tensors:
            frames, high, wide = tensors.get_tensor(_GRID).tolist()
        return frames, high, wide

    def load(self, digest: str) -> np.ndarray:
        """Returns the pixels that were stored under `digest`. Raises SlimxError naming the file if it is missing."""
        file = self._file(digest)
        if not file.exists():
            raise _missing(file, digest)
        return load_file(file)[_PIXELS]

    def keep(self, data: bytes) -> str:
        """Stores the image file `data` unless the store has it, and returns its digest. Raises SlimxError if it cannot
        be written."""
        digest = fingerprint(data)
        file = self._original(digest)
        try:
            # A crash may leave a shorter file, because syncing each of many files would take minutes.
            if not file.exists() or file.stat().st_size != len(data):
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(file, data, sync=False)
        except OSError as error:
            raise SlimxError(
                f"{file} cannot be written ({error.strerror}); free up disk space, or set another run.dir",
                code="vision.store",
                about=str(self.directory),
            ) from error
        return digest

    def original(self, digest: str) -> bytes:
        """Returns the image file that was stored with `keep`. Raises SlimxError naming the file if it is missing."""
        file = self._original(digest)
        if not re.fullmatch(r"[0-9a-f]+", digest) or not file.exists():
            raise _missing(file, digest)
        return file.read_bytes()

    def _file(self, digest: str) -> Path:
        return self.directory / digest[:2] / f"{digest}.safetensors"

    def _original(self, digest: str) -> Path:
        return self.directory / "originals" / digest[:2] / digest


def _missing(file: Path, digest: str) -> SlimxError:
    return SlimxError(
        f"{file}: the image is missing from the run's image store; restore the file, or remove the rollouts that "
        "refer to it",
        code="vision.missing",
        about=digest,
    )

"""Store of prepared images: one file per image, named by a digest, that all processes of a run read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save

from slimx.durable import write_atomic
from slimx.errors import SlimxError

_PIXELS = "pixels"
_GRID = "grid"
Grid = tuple[int, int, int]


class ImageStore:
    """Directory of prepared images. A file is written once and never changed."""

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
            raise SlimxError(
                f"{file}: the image is missing from the run's image store; restore the file, or remove the rollouts "
                "that refer to it",
                code="vision.missing",
                about=digest,
            )
        return load_file(file)[_PIXELS]

    def _file(self, digest: str) -> Path:
        return self.directory / digest[:2] / f"{digest}.safetensors"

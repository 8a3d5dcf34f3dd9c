"""Store of prepared images: one file per image, named by a digest, that all processes of a run read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save

from slimx.durable import write_atomic
from slimx.errors import SlimxError

_PIXELS = "pixels"


class ImageStore:
    """Directory of prepared images. A file is written once and never changed."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)

    def save(self, digest: str, pixels: np.ndarray) -> None:
        """Stores `pixels`, float32 [patches, elements of a patch], under `digest`."""
        file = self._file(digest)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, save({_PIXELS: pixels}))

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

"""Rows of prompt files with images: the images become `metadata.images`, a list of paths and references.

Images that a row contains as bytes are replaced by a reference as soon as the row is read, so that neither the driver's
memory nor saved rollouts and checkpoints contain them."""

from __future__ import annotations

from pathlib import Path

from slimx.digest import fingerprint
from slimx.extras.vision.images.pictures import size_of
from slimx.extras.vision.images.sources import STORED, located
from slimx.extras.vision.images.store import ImageStore
from slimx.extras.vision.prompts.marks import with_marks
from slimx.json_types import Json


class RowImages:
    """Function that rewrites rows, and the sizes of the images that they contain."""

    def __init__(self, store: ImageStore | None):
        """Rewrites rows. `store`: store that keeps the images that rows contain; None to keep only their sizes."""
        self._store = store
        self.sizes: dict[str, tuple[int, int]] = {}
        """Width and height in pixels of images, by their entry in `metadata.images`."""

    def __call__(self, row: Json, where: str) -> Json:
        """Returns a row with its messages as text, in which `<image>` marks images, and its images in
        `metadata.images`: absolute paths, and references to files in the run's image store. `where`: file and line of
        the row; paths of images are relative to the file. Raises SlimxError naming `where` for messages with other
        parts, and for images that cannot be located or decoded."""
        metadata = row.get("metadata")
        if not isinstance(metadata, dict | None):
            return row
        column = (metadata or {}).get("images")
        images = column if isinstance(column, list) else [column]
        if column is None:
            images = []
        messages = row.get("messages")
        if isinstance(messages, list):
            messages, images = with_marks(messages, images, where)
            row = row | {"messages": messages}
        if column is None and not images:
            return row
        directory = Path(where.rpartition(", ")[0]).parent
        kept = [self._kept(image, directory, f"{where}: image {index}") for index, image in enumerate(images)]
        return row | {"metadata": {**(metadata or {}), "images": kept}}

    def _kept(self, image: object, directory: Path, where: str) -> str:
        found = located(image, directory, where)
        if isinstance(found, Path):
            return str(found)
        digest = fingerprint(found)
        name = STORED + digest
        if name not in self.sizes:
            self.sizes[name] = size_of(found, where)
            if self._store is not None:
                self._store.keep(found)
        return name

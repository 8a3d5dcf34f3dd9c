"""Previews of the images of a run's prompts."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slimx.errors import SlimxError
from slimx.observability.tracking.run_files import read_config

if TYPE_CHECKING:  # imported by the functions that need it, because most reports have no images
    from slimx.extras.vision.images.store import ImageStore

SIDE = 112
"""Maximum width and height of an image in a report, in pixels."""
PER_PROMPT = 4
"""Maximum number of images that a report shows for one prompt."""
BYTES = 2**19
"""Maximum size of all images of a report, as base64."""


def image_store(directory: Path) -> ImageStore:
    """Returns the image store of the run in `directory`: its own, or the replayed run's. Raises SlimxError if
    config.yaml is missing or damaged."""
    from slimx.extras.vision.images.store import ImageStore

    return ImageStore(Path(read_config(directory)["rollout"].get("replay") or directory) / "images")


@dataclass(slots=True)
class Shown:
    """Images of one prompt in a report."""

    sources: list[str] = field(default_factory=list)
    """Previews as data URIs."""
    left: int = 0
    """Number of images without a preview."""


@dataclass(slots=True)
class Previews:
    """Previews of images for one report, up to a total of `BYTES`."""

    free: int = BYTES
    """Number of bytes that further previews may have."""

    def of(self, directory: Path, images: object) -> Shown:
        """Returns the `images` of a prompt of the run in `directory`, its metadata.images. Images that cannot be read,
        or for which there is no space, are only counted."""
        shown = Shown()
        for image in images if isinstance(images, list) else []:
            source = None
            if len(shown.sources) < PER_PROMPT:
                source = _preview(directory, image)
            if source is None or len(source) > self.free:
                shown.left += 1
                continue
            self.free -= len(source)
            shown.sources.append(source)
        return shown


def _preview(directory: Path, image: object) -> str | None:
    """Returns a preview as a data URI; None for an image that cannot be read."""
    from slimx.extras.vision.images.pictures import preview
    from slimx.extras.vision.images.sources import read_image

    try:
        file = preview(read_image(image, "the image", image_store(directory)), SIDE)
    except SlimxError:
        return None
    return f"data:image/png;base64,{b64encode(file).decode()}"

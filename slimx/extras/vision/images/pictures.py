"""Image files: their headers, which are read without decoding the pixels, and the conversion of their pixels to RGB."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slimx.errors import SlimxError, one_line

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 2**26
"""Limit on the number of pixels of an image, before it is decoded: a small file may expand to gigabytes."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats that are decoded, by Pillow's names. Other decoders of Pillow start programs or are little tested."""
_HEAD = 1024
"""Number of bytes of a file in which SVG is recognized."""


def opened(file: Path | bytes) -> Image:
    """Opens an image file, or the bytes of one, and reads its header. The caller must close the image. Raises
    ValueError with a reason for a file that slimx does not decode, and any error of Pillow's decoders."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS)
    except UnidentifiedImageError as error:
        if _is_svg(file):
            raise ValueError("it is an SVG drawing") from error
        raise ValueError("it is not JPEG, PNG, WebP, GIF, BMP, TIFF or PPM") from error
    wide, high = image.size
    if wide * high > MOST_PIXELS:
        problem = f"it has {wide} x {high} pixels, more than the limit of {MOST_PIXELS}"
    elif getattr(image, "is_animated", False) and image.format != "MPO":  # MPO: a photo and its previews
        problem = "it has several frames"
    elif image.mode in ("I", "F"):
        problem = "its pixels have 32 bits per channel"
    else:
        return image
    image.close()
    raise ValueError(problem)


def size_of(file: Path | bytes, where: str) -> tuple[int, int]:
    """Returns width and height in pixels from the header of an image file, or of the bytes of one. `where`: location of
    the image, for errors. Raises SlimxError if slimx does not decode the file."""
    try:
        with opened(file) as image:
            return image.size
    except Exception as error:  # decoders raise many kinds of errors for damaged files
        raise undecodable(where, one_line(error)) from error


def undecodable(where: str, reason: str) -> SlimxError:
    """Returns the error for an image that cannot be decoded. `where`: location of the image."""
    return SlimxError(
        f"{where} cannot be decoded ({reason}); replace it with a PNG or JPEG file", code="vision.image", about=where
    )


def preview(file: bytes, side: int) -> bytes:
    """Returns the image in the bytes of an image file as a PNG file of at most `side` pixels in width and height.
    Raises SlimxError if slimx does not decode it."""
    out = io.BytesIO()
    try:
        with opened(file) as image:
            image.draft("RGB", (side, side))
            shown = as_rgb(image)
    except Exception as error:  # decoders raise many kinds of errors for damaged files
        raise undecodable("the image", one_line(error)) from error
    shown.thumbnail((side, side))
    shown.save(out, "PNG")
    return out.getvalue()


def as_rgb(image: Image) -> Image:
    """Returns an image as viewers show it, in mode RGB: turned as its EXIF data say, on a white background where it is
    transparent, and with the upper 8 of 16 bits."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))  # convert() would clip to 255
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _is_svg(file: Path | bytes) -> bool:
    if isinstance(file, bytes):
        return b"<svg" in file[:_HEAD]
    with file.open("rb") as opened_file:
        return b"<svg" in opened_file.read(_HEAD)

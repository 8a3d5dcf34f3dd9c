"""Image files are judged by their headers, and converted as viewers show them."""

from __future__ import annotations

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from slimx.extras.vision.images import pictures
from slimx.extras.vision.images.pictures import as_rgb, opened, size_of
from tests.extras.vision.picture_stand import encoded, picture
from tests.refusals import refused


def converted(data: bytes) -> np.ndarray:
    with opened(data) as image:
        shown = as_rgb(image)
    assert shown.mode == "RGB"
    return np.asarray(shown)


def bomb() -> bytes:
    """Returns a PNG file of a few bytes whose header promises 10^10 pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))


def frames(kind: str) -> bytes:
    first, second = (Image.new("RGB", (8, 8), color) for color in ("red", "blue"))
    return encoded(first, kind, save_all=True, append_images=[second])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_the_header_tells_the_size_without_decoding(tmp_path, kind, monkeypatch):
    data = picture(40, 24, kind)
    (tmp_path / "image").write_bytes(data)
    monkeypatch.setattr(Image.Image, "convert", None)
    assert size_of(data, "here") == (40, 24) == size_of(tmp_path / "image", "here")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"text",
        b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>",
        picture()[:20],
        picture(kind="JPEG")[:20],
        bomb(),
        frames("GIF"),
        frames("PNG"),
        frames("WEBP"),
        frames("TIFF"),
        encoded(Image.new("F", (8, 8)), "TIFF"),
        encoded(Image.new("I", (8, 8)), "TIFF"),
        encoded(Image.new("RGB", (8, 8)), "EPS"),
    ],
)
def test_files_that_are_not_decoded_are_refused_by_their_headers(tmp_path, data):
    (tmp_path / "image").write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        for file in (data, tmp_path / "image"):
            with refused("vision.image", about="here") as caught:
                size_of(file, "here")
            assert "0x" not in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_an_image_of_too_many_pixels_is_refused(monkeypatch):
    monkeypatch.setattr(pictures, "MOST_PIXELS", 32 * 32 - 1)
    with refused("vision.image"):
        size_of(picture(), "here")


def test_a_truncated_image_is_not_shown_in_part():
    with opened(picture(64, 64)[:-400]) as image, pytest.raises(OSError):
        as_rgb(image)


def test_exif_data_turn_an_image():
    image = Image.new("RGB", (16, 8), "black")
    image.paste("white", (0, 0, 4, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a turn to the right
    for kind in ("PNG", "TIFF", "WEBP"):
        shown = converted(encoded(image, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {})))
        assert shown.shape == (16, 8, 3) and (shown[:4] == 255).all() and (shown[4:] == 0).all()


def test_transparency_is_white():
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert (converted(encoded(clear)) == 255).all()
    half = converted(encoded(Image.new("LA", (8, 8), (0, 128))))
    assert half.min() == half.max() == 127
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert (converted(encoded(palette)) == (10, 20, 30)).all()
    assert (converted(encoded(palette, transparency=1)) == 255).all()


def test_other_modes_keep_their_colors():
    deep = np.full((8, 8), 0x40FF, np.uint16)
    assert (converted(encoded(Image.fromarray(deep))) == 0x40).all()
    assert (converted(encoded(Image.new("1", (8, 8), 1))) == 255).all()
    assert (converted(encoded(Image.new("L", (8, 8), 7))) == 7).all()
    ink = converted(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF"))
    assert (ink == (255, 0, 0)).all()


def test_a_photo_with_previews_shows_its_first_image():
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "MPO", save_all=True, append_images=[Image.new("RGB", (4, 4), "blue")])
    assert size_of(file.getvalue(), "here") == (8, 8)
    assert converted(file.getvalue())[0, 0, 0] > 200

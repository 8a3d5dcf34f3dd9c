"""Images of prompts as users write them: paths, bytes, data URIs, and objects that contain one of these."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from slimx.errors import SlimxError, one_line
from slimx.extras.vision.images.store import ImageStore

MOST_BYTES = 64 * 2**20
"""Size limit of an image file in bytes."""
STORED = "stored:"
"""Prefix of a reference to an image file in the run's image store, before its digest."""
KEYS = ("bytes", "data", "base64", "path", "url", "image", "image_url", "source")
"""Keys of objects that contain an image, the first that is set first: those of Hugging Face's data sets and chat
messages, and of the messages of OpenAI's and Anthropic's APIs."""
ENCODED = ("data", "base64")
"""Those of `KEYS` whose strings are an image file in base64."""
_SHOWN = 200
"""Maximum number of characters of a path in errors."""
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
"""Modes of PIL images that PNG files have."""


def read_image(source: object, where: str, store: ImageStore) -> bytes:
    """Returns the bytes of an image file.

    `source`: as for `located` with the working directory, or a reference to a file in `store`. `where`: location of the
    image, for errors. Raises SlimxError for any other value, and for a file that cannot be read."""
    if isinstance(source, str) and source.startswith(STORED):
        return store.original(source.removeprefix(STORED))
    found = located(source, Path(), where)
    if isinstance(found, bytes):
        return found
    check_file(found, where)
    try:
        return found.read_bytes()
    except OSError as error:
        raise _unreadable(found, where, error) from error


def located(source: object, directory: Path, where: str) -> bytes | Path:
    """Returns the bytes that `source` contains, or the absolute path that it names, which is not read.

    `source`: a path (relative to `directory`), a file:// or data URI, bytes, a PIL image, a uint8 array [height, width]
    or [height, width, channels], or an object with one of these under one
    of `KEYS`. `where`: location of the image, for errors. Raises SlimxError for any other value."""
    if isinstance(source, Mapping):
        for key in KEYS:
            value = source.get(key)
            if isinstance(value, str) and key in ENCODED:
                return _checked(_from_base64(value, where), where)
            if value is not None:
                return located(value, directory, where)
    if isinstance(source, np.ndarray) or hasattr(source, "__array_interface__"):
        source = _png(source, where)
    if isinstance(source, bytes):
        return _checked(source, where)
    if not isinstance(source, str) or not source:
        kind = "empty" if source == "" else f"of type {type(source).__name__}"
        raise SlimxError(
            f"{where} is {kind}; give a path, bytes, a data URI, a PIL image, or an array",
            code="vision.source",
            about=where,
        )
    if source.startswith("data:"):
        head, comma, body = source.partition(",")
        if not comma or not head.endswith(";base64"):
            raise _not_encoded("it does not contain ;base64,", where)
        return _checked(_from_base64(body, where), where)
    if source.startswith("file://"):
        return Path(unquote(source.removeprefix("file://").removeprefix("localhost")))
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", source):
        raise SlimxError(
            f"{where} is the URL {source[:_SHOWN]}, which slimx does not download; download the image, and give its "
            "path",
            code="vision.url",
            about=where,
        )
    return Path(os.path.abspath(directory / source))


def check_file(path: Path, where: str) -> None:
    """Raises SlimxError if `path` is not a regular file, is empty or is too large. Follows symbolic links. `where`:
    location of the image that is in the file, for errors."""
    try:
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        raise _unreadable(path, where, error) from error
    if not path.is_file():
        raise SlimxError(
            f"{where}: {path} is not a file; give the path of an image file", code="vision.unreadable", about=str(path)
        )
    _check_size(size, where)


def _png(pixels: Any, where: str) -> bytes:
    """Returns a PIL image or an array of pixels as a PNG file, which stores them without loss."""
    from PIL import Image

    file = io.BytesIO()
    try:
        if isinstance(pixels, np.ndarray):
            pixels = Image.fromarray(pixels.squeeze(-1) if pixels.shape[2:] == (1,) else pixels)
        if pixels.mode not in _MODES:
            pixels = pixels.convert("RGB")
        pixels.save(file, "PNG", compress_level=1)
    except Exception as error:  # Pillow raises many kinds of errors for pixels that are no image
        raise SlimxError(
            f"{where} cannot be written as PNG ({one_line(error)}); give a PIL image, or a uint8 array [height, width, "
            "channels]",
            code="vision.source",
            about=where,
        ) from error
    return file.getvalue()


def _checked(data: bytes, where: str) -> bytes:
    _check_size(len(data), where)
    return data


def _check_size(size: int, where: str) -> None:
    if size == 0:
        raise SlimxError(f"{where} has 0 bytes; replace the image", code="vision.size", about=where)
    if size > MOST_BYTES:
        raise SlimxError(
            f"{where} has {size / 2**20:.0f} MiB, more than the limit of {MOST_BYTES / 2**20:.0f} MiB; reduce the "
            "image",
            code="vision.size",
            about=where,
        )


def _from_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _not_encoded(str(error), where) from error


def _not_encoded(reason: str, where: str) -> SlimxError:
    return SlimxError(
        f"{where} is not valid base64 ({reason}); write data:image/png;base64, and the encoded bytes",
        code="vision.uri",
        about=where,
    )


def _unreadable(path: Path, where: str, error: OSError | ValueError) -> SlimxError:
    name = str(path)[:_SHOWN]
    reason = error.strerror if isinstance(error, OSError) else error
    return SlimxError(
        f"{where}: {name} cannot be read ({reason}); correct the path, or make the file readable",
        code="vision.unreadable",
        about=name,
    )

"""Images of prompts as users write them: paths, bytes, data URIs, and objects that contain one of these."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

from slimx.errors import SlimxError

MOST_BYTES = 64 * 2**20
"""Size limit of an image file in bytes."""


def read_image(source: object, directory: Path, where: str) -> bytes:
    """Returns the bytes of an image file.

    `source`: a path (relative to the working directory or to `directory`), a data URI, bytes, or an object with one of
    these as `bytes`, `path`, `url`, `image` or `image_url`, as Hugging Face data sets and OpenAI's API have them.
    `where`: location of the image, for errors. Raises SlimxError for any other value, and for a file that cannot be
    read."""
    if isinstance(source, Mapping):
        for key in ("bytes", "path", "url", "image", "image_url"):
            if source.get(key) is not None:
                return read_image(source[key], directory, where)
    if isinstance(source, bytes):
        return _checked(source, where)
    if isinstance(source, str) and source.startswith("data:"):
        return _checked(_decoded(source, where), where)
    if not isinstance(source, str):
        raise SlimxError(
            f"{where} is of type {type(source).__name__}; give a path, bytes, or a data URI",
            code="vision.source",
            about=where,
        )
    path = Path(source.removeprefix("file://"))
    if not path.is_absolute() and not path.is_file():
        path = directory / path
    try:
        if path.stat().st_size > MOST_BYTES:
            raise _too_large(path.stat().st_size, where)
        return path.read_bytes()
    except OSError as error:
        raise SlimxError(
            f"{where}: {path} cannot be read ({error.strerror}); correct the path, or make the file readable",
            code="vision.unreadable",
            about=str(path),
        ) from error


def _decoded(uri: str, where: str) -> bytes:
    head, comma, body = uri.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("it does not contain ;base64,")
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SlimxError(
            f"{where} is not a valid data URI ({error}); write data:image/png;base64, and the encoded bytes",
            code="vision.uri",
            about=where,
        ) from error


def _checked(data: bytes, where: str) -> bytes:
    if len(data) > MOST_BYTES:
        raise _too_large(len(data), where)
    return data


def _too_large(size: int, where: str) -> SlimxError:
    return SlimxError(
        f"{where} has {size / 2**20:.0f} MiB, more than the limit of {MOST_BYTES / 2**20:.0f} MiB; reduce the image",
        code="vision.size",
        about=where,
    )

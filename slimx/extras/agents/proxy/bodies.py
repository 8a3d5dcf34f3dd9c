"""JSON bodies of requests and responses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import msgspec

from slimx.extras.agents.proxy.errors import ApiError

LARGE = 65536
"""Size in bytes from which a request is parsed in a thread, so that the event loop can serve other requests. Parsing a
smaller one takes less time than handing it to a thread and back."""
CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1", "utf-16", "utf-32")
"""Supported charsets of a request body. Some of Python's other charsets, such as punycode, take quadratic time."""


@dataclass(frozen=True, slots=True)
class RequestBody:
    """Body of a request, as it was received."""

    data: bytes
    charset: str
    """One of `CHARSETS`."""

    @property
    def is_large(self) -> bool:
        return len(self.data) >= LARGE

    def parsed(self) -> object:
        """Returns the value of the body. Raises ApiError if it is not JSON or is nested too deeply."""
        try:
            return decoded(self.data if self.charset == "utf-8" else self.data.decode(self.charset))
        except ValueError:
            raise ApiError(
                "the request body is not valid JSON; send a JSON object", code="invalid_json", param="body"
            ) from None
        except RecursionError:
            raise ApiError(
                "the request body is nested too deeply; send JSON with fewer nested levels",
                code="invalid_json",
                param="body",
            ) from None


def decoded(text: bytes | str) -> object:
    """Returns the value of JSON text, exactly as `json.loads` does: unlike msgspec, it accepts lone surrogates, NaN and
    numbers beyond the range of floats. Raises ValueError for text that is not JSON, RecursionError if it is nested too
    deeply."""
    try:
        return msgspec.json.decode(text)
    except ValueError:
        return json.loads(text if isinstance(text, str) else text.decode())


def encoded(value: object) -> bytes:
    """Returns a value as JSON. Lone surrogates, which agents can put into what responses repeat, are escaped."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def identity(value: object, order: Literal["sorted"] | None = None) -> bytes:
    """Returns a text of a JSON value that no other value has. `order`: "sorted" if the order of keys does not matter.
    Raises RecursionError for a value that is nested too deeply."""
    try:
        text = msgspec.json.encode(value, order=order)
        if b"null" not in text:  # msgspec writes null for NaN and infinity too
            return text
    except UnicodeEncodeError:  # lone surrogates
        pass
    return json.dumps(value, sort_keys=order is not None).encode()

"""Bodies of HTTP answers of engines and routers, read alike whoever asks."""

from __future__ import annotations

from typing import Any

import msgspec

Json = dict[str, Any]


def parse_body(body: str | bytes) -> Json:
    """A JSON object as it is; anything else under "text". By msgspec, as an answer brings a few numbers for every
    token."""
    try:
        value = msgspec.json.decode(body)
    except ValueError:  # msgspec's own errors are among these, and bytes that are no UTF-8
        value = None
    if isinstance(value, dict):
        return value
    return {"text": body if isinstance(body, str) else body.decode(errors="replace")}


def message_of(answer: Json) -> str:
    """The server's words in a failed answer, wherever it put them."""
    error = answer.get("error", answer.get("message", answer.get("text", "")))
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error or "no message")[:2000]

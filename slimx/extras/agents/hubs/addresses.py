"""Addresses of servers that environments and tools are behind."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from slimx.errors import SlimxError


def check_url(url: Any, key: str, *, code: str) -> None:
    """Raise SlimxError with `code`, naming the configuration's `key`, for what is no URL with http or https."""
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise SlimxError(f"{key}: {url!r} is no URL with http or https", code=code, about=key)

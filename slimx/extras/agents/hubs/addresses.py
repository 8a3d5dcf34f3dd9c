"""URLs of servers with environments and tools."""

from __future__ import annotations

from urllib.parse import urlsplit

from slimx.errors import SlimxError


def check_url(url: object, key: str, *, code: str) -> None:
    """Raises SlimxError with `code`, naming the configuration's `key`, if `url` is not a URL with http or https."""
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise SlimxError(f"{key}: {url!r} is not a URL with http or https", code=code, about=key)

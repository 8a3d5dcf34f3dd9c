"""Checks the URLs of environment and tool servers."""

from __future__ import annotations

from urllib.parse import urlsplit

from slimx.errors import SlimxError


def check_url(url: object, key: str, *, code: str) -> None:
    """Raises SlimxError with `code` if `url` is not an http or https URL. `key`: configuration key of the URL."""
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise SlimxError(
            f"{key}: {url!r} is not an http or https URL; set a URL such as http://host:8000", code=code, about=key
        )

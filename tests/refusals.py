"""The way tests assert a refusal: by its code and by what it is about, never by its sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slimx.errors import SlimxError


@contextmanager
def refused(
    code: str, *, about: str | None = None, kind: type[SlimxError] = SlimxError
) -> Iterator[pytest.ExceptionInfo]:
    """Assert that the block is refused with `code`, and about the key or object `about`."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code, caught.value
    if about is not None:
        assert caught.value.about == about, caught.value

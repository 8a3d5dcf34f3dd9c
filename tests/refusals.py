"""The way tests assert a refusal: by its code and by what it is about, never by its sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slimx.errors import SlimxError


def refusal_fields(error: BaseException) -> list[str]:
    """Returns code, object and sentence of a refusal, for the test that started the process; else name and sentence."""
    named = [error.code, error.about] if isinstance(error, SlimxError) else [type(error).__name__, ""]
    return [*named, str(error)]


def numbers(message: object) -> list[float]:
    """Returns the numbers in a sentence, in their order: its values, whatever the words around them."""
    found = re.findall(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?(?!\d)", str(message))
    return [float(number.replace(",", "")) for number in found]


def cause[Kind: BaseException](error: BaseException, kind: type[Kind]) -> Kind:
    """Returns the first of an error's causes, itself among them, that is a `kind`."""
    while not isinstance(error, kind):
        assert error.__cause__ is not None, error
        error = error.__cause__
    return error


@contextmanager
def refused(
    code: str, *, about: str | None = None, kind: type[SlimxError] = SlimxError
) -> Iterator[pytest.ExceptionInfo]:
    """Asserts that the block is refused with `code`, and about the key or object `about`."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code, caught.value
    if about is not None:
        assert caught.value.about == about, caught.value


@contextmanager
def invalid(code: str, *, about: str | None = None) -> Iterator[pytest.ExceptionInfo]:
    """Asserts that the block validates a section, and is refused with `code` (perhaps among others), about `about`."""
    from pydantic import ValidationError  # tests of a GPU run without it

    from slimx.config.rule import Refusal

    with pytest.raises(ValidationError) as caught:
        yield caught
    causes = [item.get("ctx", {}).get("error") for item in caught.value.errors()]
    found = [refusal for cause in causes if isinstance(cause, Refusal) for refusal in cause.problems or (cause,)]
    assert code in [refusal.code for refusal in found], caught.value
    assert all("\n" not in str(refusal) for refusal in found), caught.value
    if about is not None:
        assert about in [refusal.about for refusal in found if refusal.code == code], caught.value

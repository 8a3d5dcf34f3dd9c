"""Integers in JSON from outside: 3.0 is converted to 3, and no other value is converted."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from slimx.errors import SlimxError


def as_whole[T](value: T) -> T | int:
    """Returns 3 for 3.0, and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_ids(token_ids: Sequence[int]) -> list[int]:
    """Returns token ids as Python integers. Raises SlimxError for a string, and for an entry that is not an integer."""
    if not isinstance(token_ids, str | bytes):
        try:
            return list(array("q", token_ids))
        except OverflowError:
            return [int(token) for token in token_ids]
        except TypeError:
            values = [as_whole(token) for token in token_ids]
            if all(isinstance(token, int) for token in values):
                return values
    wrong: object = token_ids
    if not isinstance(token_ids, str | bytes):
        wrong = next(value for value in values if not isinstance(value, int))
    raise SlimxError(
        f"token_ids has {wrong!r:.80}, but token ids are integers; encode texts with ctx.draft(prompt) or "
        "ctx.turn(text, after=ids)",
        code="tokens.ids",
        about="token_ids",
    )

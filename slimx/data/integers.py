"""Integers in JSON that other programs wrote: 3.0 is converted to 3, and no other value is converted."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from slimx.errors import SlimxError


def as_whole[T](value: T) -> T | int:
    """Returns an integral float as an int (3 for 3.0), and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_ids(token_ids: Sequence[int]) -> list[int]:
    """Returns token ids as Python ints; integral floats are converted. Raises SlimxError if `token_ids` is a string or
    has an entry that is not an integer."""
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
        f"token_ids has {wrong!r:.80}, which is not an integer; encode text with `ctx.draft(prompt)` or "
        "`ctx.turn(text, after=ids)`",
        code="tokens.ids",
        about="token_ids",
    )

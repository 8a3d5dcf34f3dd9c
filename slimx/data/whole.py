"""Values of JSON from outside: its 3.0 is 3, and nothing else becomes a whole number."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from slimx.errors import SlimxError

Json = dict[str, Any]
"""An object of JSON."""


def as_whole(value: Any) -> Any:
    """Returns 3 for 3.0, and any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_ids(token_ids: Sequence[Any]) -> list[int]:
    """Returns token ids as Python's integers. Raises SlimxError for a text, and for an entry that is none."""
    if not isinstance(token_ids, str | bytes):
        try:
            return list(array("q", token_ids))
        except OverflowError:
            return [int(token) for token in token_ids]
        except TypeError:
            whole = [as_whole(token) for token in token_ids]
            if all(isinstance(token, int) for token in whole):
                return whole
    given = token_ids if isinstance(token_ids, str | bytes) else next(t for t in whole if not isinstance(t, int))
    raise SlimxError(
        f"token_ids holds {given!r:.80}, and token ids are whole numbers; encode texts by ctx.draft(prompt) or "
        "ctx.turn(text, after=ids)",
        code="tokens.ids",
        about="token_ids",
    )

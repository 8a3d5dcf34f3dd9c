"""Recognizes hooks that were written for slime or Miles."""

from __future__ import annotations

import inspect

from slimx.dotted import imported
from slimx.errors import SlimxError

ROOTS = ("slime", "slime_plugins", "miles", "miles_plugins")


class NotServed(ImportError):
    """Raised when a hook imports a module or name from slime or Miles that slimx does not provide."""


def is_form_of(path: str) -> bool:
    """Returns True if the function at `path`, a dotted path without a prefix such as `slime:`, was written for slime or
    Miles: it belongs to one of these packages, it cannot be imported without them, or its first parameters are (args,
    sample)."""
    if path.partition(".")[0] in ROOTS:
        return True
    try:
        names = list(inspect.signature(imported("", path)).parameters)
    except SlimxError as error:
        return not_served(error) is not None or any(f"No module named '{root}'" in str(error) for root in ROOTS)
    except (TypeError, ValueError):
        return False
    return names[:1] == ["args"] and names[1:2] in (["sample"], ["samples"])


def not_served(error: BaseException) -> NotServed | None:
    """Returns the NotServed exception among the causes of `error`, at any depth; None if the import failed for another
    reason."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, NotServed):
        cause = cause.__cause__
    return cause

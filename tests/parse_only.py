"""Runs a program until its options are parsed: `python -m tests.parse_only -m MODULE ...` or `... FILE ...`.

It ends with status 0 there, unless the program refuses its options before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from typer.core import TyperCommand

from tests.warm.program import execute


def ending(parse: Callable[..., object]) -> Callable[..., NoReturn]:
    """Returns `parse` that ends the process once it has parsed."""

    def parse_and_end(*arguments: object, **named: object) -> NoReturn:
        parse(*arguments, **named)
        raise SystemExit(0)

    return parse_and_end


if __name__ == "__main__":
    for name in ("parse_args", "parse_intermixed_args"):
        setattr(argparse.ArgumentParser, name, ending(getattr(argparse.ArgumentParser, name)))
    TyperCommand.invoke = ending(lambda *_: None)
    execute(sys.argv[1:])

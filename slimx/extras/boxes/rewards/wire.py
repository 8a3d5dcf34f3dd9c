"""Values between the judge of a program and the program: JSON lines, and nothing that runs on arrival.

    None, bool, str, list                       as in JSON
    int, float                                  as in JSON; large integers as {"int": hexadecimal}
    dict                                        {"dict": [[key, value], ...]}
    tuple, set, frozenset, range                {"tuple": [...]} and so on
    bytes, complex                              {"bytes": hexadecimal}, {"complex": [real, imaginary]}
    an object of the program                    {"object": number}: the number under which the program keeps it
    a function of the judge                     {"function": number}

This file is copied into the sandbox, where slimx is not installed: it imports nothing but Python's own library.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, BinaryIO

EXACT = 2**53
COLLECTIONS = {"tuple": tuple, "set": set, "frozenset": frozenset}
PLAIN: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
}


def pack(value: Any, kept: Callable[[Any], dict[str, Any]]) -> Any:
    """`value` as JSON; `kept` makes the entry of an object that stays with its owner. Instances of subclasses travel as
    what they inherit from: a Counter arrives as a dict."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        number = int.__add__(value, 0)
        return number if -EXACT < number < EXACT else {"int": hex(number)}
    if isinstance(value, float):
        return float.__add__(value, 0.0)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, list):
        return [pack(each, kept) for each in list.__iter__(value)]
    if isinstance(value, dict):
        return {"dict": [[pack(key, kept), pack(each, kept)] for key, each in dict.items(value)]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    for name, kind in COLLECTIONS.items():
        if isinstance(value, kind):
            return {name: [pack(each, kept) for each in kind.__iter__(value)]}
    return kept(value)


def unpack(packed: Any, held: Callable[[str, Any], Any]) -> Any:
    """The value that `pack` made `packed` of; `held(kind, number)` gives what stands for an object."""
    if isinstance(packed, list):
        return [unpack(each, held) for each in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "dict":
        return {unpack(key, held): unpack(each, held) for key, each in content}
    if kind in COLLECTIONS:
        return COLLECTIONS[kind](unpack(each, held) for each in content)
    if kind in PLAIN:
        return PLAIN[kind](content)
    return held(kind, content)


def send(stream: BinaryIO, message: Any) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """The next message. Raises EOFError when the other side has gone."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return json.loads(line)

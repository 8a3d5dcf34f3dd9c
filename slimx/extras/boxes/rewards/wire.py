"""Encodes values that the judge and the program under test exchange, as lines of JSON; receiving them executes nothing.

    None, bool, str, list                       as in JSON
    int, float                                  as in JSON; large integers as {"int": hexadecimal}
    dict                                        {"dict": [[key, value], ...]}
    tuple, set, frozenset, range                {"tuple": [...]} and so on
    bytes, complex                              {"bytes": hexadecimal}, {"complex": [real, imaginary]}
    an object of the program                    {"object": index}: the index under which the program's side stores it
    a function of the judge                     {"function": index}

This file is copied into the sandbox, where slimx is not installed: it imports only the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, BinaryIO

EXACT = 2**53
COLLECTIONS = {"tuple": tuple, "set": set, "frozenset": frozenset}
PLAIN: dict[str, Callable[[Any], object]] = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
}


def pack(value: object, reference: Callable[[object], dict[str, int]]) -> Any:
    """Converts `value` to JSON.

    `reference`: function that returns the entry, such as {"object": index}, for a value that is not copied but stays in
    the sender's process. Instances of subclasses become instances of the plain type: a Counter arrives as a dict.
    """
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
        return [pack(item, reference) for item in list.__iter__(value)]
    if isinstance(value, dict):
        return {"dict": [[pack(key, reference), pack(item, reference)] for key, item in dict.items(value)]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    for name, kind in COLLECTIONS.items():
        if isinstance(value, kind):
            return {name: [pack(item, reference) for item in kind.__iter__(value)]}
    return reference(value)


def unpack(packed: Any, resolve: Callable[[str, Any], Any]) -> Any:
    """Returns the value that `pack` converted to `packed`.

    `resolve(kind, index)`: function that returns the object or function to which the entry {kind: index} refers.
    """
    if isinstance(packed, list):
        return [unpack(item, resolve) for item in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "dict":
        return {unpack(key, resolve): unpack(item, resolve) for key, item in content}
    if kind in COLLECTIONS:
        return COLLECTIONS[kind](unpack(item, resolve) for item in content)
    if kind in PLAIN:
        return PLAIN[kind](content)
    return resolve(kind, content)


def send(stream: BinaryIO, message: object) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """Returns the next message. Raises EOFError if the other side has closed the stream."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return json.loads(line)

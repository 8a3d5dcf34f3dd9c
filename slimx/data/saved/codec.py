"""Records as durable bytes: written into checkpoints, read back bit for bit, and refused when they are not understood.

Records are MessagePack maps with the names of their fields, so that a later release can tell what an older one wrote.
An array is extension 1 of MessagePack: a packed `(dtype, shape)` and the raw bytes behind it, NaN payloads included.
`metadata` and the like may hold what MessagePack holds (None, booleans, numbers, strings, bytes, lists, dicts) and
arrays; NumPy scalars come back as Python numbers, tuples as lists.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from slimx.data.records import SCHEMA_VERSION, Group
from slimx.digest import fingerprint
from slimx.durable import write_atomic
from slimx.errors import SlimxError

ARRAY = 1
"""Code of the MessagePack extension that holds an array."""
NUMERIC = re.compile(r"[<>|][biufc]\d{1,2}")
"""NumPy's names of the bool, int, unsigned, float and complex dtypes, whose raw bytes are their whole content."""
FORMAT = "slimx-groups-1"
"""First field of a file's header line."""


def encode(value: Any) -> bytes:
    """Bytes of a record, or of a container of records. Raises SlimxError naming the type that cannot be written."""
    try:
        return msgspec.msgpack.encode(value, enc_hook=_from_numpy)
    except (TypeError, NotImplementedError, OverflowError, ValueError, RecursionError) as error:
        raise SlimxError(
            f"a value cannot be written into a checkpoint ({error}); "
            "keep None, booleans, numbers, strings, lists, dicts and numeric arrays",
            code="data.value",
        ) from error


def decode[T](kind: type[T], data: bytes) -> T:
    """The `kind` that `encode` wrote; arrays are fresh and writable.

    Raises SlimxError for damaged bytes, for a field that `kind` does not have, for a value of the wrong type and for a
    `schema_version` that this release does not know.
    """
    try:
        tree = msgspec.msgpack.decode(data, ext_hook=_to_numpy)
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        # Beyond its own DecodeError, msgspec lets through what damaged strings, map keys and nesting raise.
        raise SlimxError(f"the bytes of a record are damaged ({error}); take another checkpoint") from error
    _check_schema(kind, tree, "record")
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise SlimxError(
            f"a record has a missing or wrong field ({error}); was it written by slimx?",
            code="data.field",
            about="record",
        ) from error


def encode_groups(groups: Sequence[Group]) -> bytes:
    """Bytes of `groups`. Raises SlimxError naming the group if one of its values cannot be written and read back."""
    parts = []
    for group in groups:
        try:
            part = encode(group)
            decode(Group, part)  # at once, because a checkpoint that cannot be read back is discovered too late
        except SlimxError as error:
            raise SlimxError(f"group {group.id!r}: {error}", code=error.code, about=group.id) from error
        parts.append(msgspec.Raw(part))
    return msgspec.msgpack.encode(parts)


def decode_groups(data: bytes) -> list[Group]:
    """The groups that `encode_groups` wrote; raises SlimxError as `decode` does."""
    return decode(list[Group], data)


def save_groups(path: str | Path, groups: Sequence[Group], about: Mapping[str, Any] | None = None) -> None:
    """Write `groups` to a file: a header line of JSON with length, checksum and what is said `about` them, then the
    bytes.

    The file at `path` is at all times absent, the previous one, or complete.
    """
    path = Path(path)
    payload = encode_groups(groups)
    header = {"format": FORMAT, "bytes": len(payload), "blake2b": fingerprint(payload)}
    if about is not None:
        header["about"] = about
    write_atomic(path, json.dumps(header).encode() + b"\n", payload)


def load_groups(path: str | Path) -> list[Group]:
    """The groups of a file.

    Raises SlimxError naming the file if it is missing, truncated, edited or of another format.
    """
    path = Path(path)
    with _opened(path) as file:
        header, payload = _header(path, file), file.read()
    if fingerprint(payload) != header["blake2b"]:
        raise SlimxError(
            f"{path}: was changed after it was written (its checksum differs); take another checkpoint",
            code="data.checksum",
            about=str(path),
        )
    try:
        return decode_groups(payload)
    except SlimxError as error:
        raise SlimxError(f"{path}: {error}", code=error.code, about=str(path)) from error


def read_about(path: str | Path) -> dict[str, Any]:
    """The header's notes about the groups of a file, without reading these; {} where it says nothing. Errors are those
    of `load_groups`, but for edited bytes."""
    path = Path(path)
    with _opened(path) as file:
        return _header(path, file).get("about", {})


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise SlimxError(
            f"{path}: cannot be read ({error.strerror}); take another checkpoint",
            code="data.unreadable",
            about=str(path),
        ) from error


def _header(path: Path, file: BinaryIO) -> dict[str, Any]:
    """The header of an open file, whose groups come next, all of them."""
    try:
        header = json.loads(file.readline())
        form, length = header["format"], header["bytes"]
        header["blake2b"]
    except (ValueError, TypeError, KeyError) as error:
        raise SlimxError(
            f"{path}: does not start with the header of a file of groups; take another one",
            code="data.header",
            about=str(path),
        ) from error
    if form != FORMAT:
        raise SlimxError(
            f"{path}: has format {form!r}, not {FORMAT!r}; read it with the release that wrote it",
            code="data.format",
            about=str(path),
        )
    rest = os.fstat(file.fileno()).st_size - file.tell()
    if rest != length:
        raise SlimxError(
            f"{path}: holds {rest} bytes, {length} were written; take another checkpoint",
            code="data.truncated",
            about=str(path),
        )
    return header


def _from_numpy(value: Any) -> Any:
    if isinstance(value, np.ndarray) and NUMERIC.fullmatch(value.dtype.str):
        head = msgspec.msgpack.encode((value.dtype.str, value.shape))
        return msgspec.msgpack.Ext(ARRAY, len(head).to_bytes(2, "little") + head + value.tobytes())
    if isinstance(value, np.generic) and type(value.item()) in (bool, int, float):
        return value.item()
    kind = type(value)
    what = f"array of {value.dtype}" if kind is np.ndarray else f"{kind.__module__}.{kind.__qualname__}"
    raise NotImplementedError(f"it is of type {what}")


def _to_numpy(code: int, data: memoryview) -> np.ndarray:
    try:
        if code != ARRAY:
            raise ValueError(f"unknown extension {code}")
        start = 2 + int.from_bytes(data[:2], "little")
        dtype, shape = msgspec.msgpack.decode(data[2:start], type=tuple[str, tuple[int, ...]])
        if not NUMERIC.fullmatch(dtype):
            raise ValueError(f"no numeric dtype {dtype!r}")
        return np.frombuffer(data[start:], dtype=dtype).reshape(shape).copy()  # a copy: the buffer is read-only
    except (ValueError, TypeError) as error:
        raise SlimxError(f"the bytes of an array are damaged ({error}); take another checkpoint") from error


def _check_schema(kind: Any, value: Any, where: str) -> None:
    """Refuse versions and fields of records that msgspec would accept or ignore; wrong types are left to msgspec."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        for option in typing.get_args(kind):
            _check_schema(option, value, where)
    elif origin is list and isinstance(value, list):
        for index, item in enumerate(value):
            _check_schema(typing.get_args(kind)[0], item, f"{where}[{index}]")
    elif dataclasses.is_dataclass(kind) and isinstance(value, dict):
        fields = _hints(kind)
        if "schema_version" in fields:
            _check_version(value.get("schema_version"), where)
        for name in value:
            if name not in fields:
                raise SlimxError(
                    f"{where} has a field {name!r} unknown to {kind.__name__}; was it written by slimx?",
                    code="data.field",
                    about=name,
                )
        for name in _nested(kind):
            _check_schema(fields[name], value.get(name), f"{where}.{name}")


def _check_version(version: Any, where: str) -> None:
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise SlimxError(
            f"{where} has schema_version {version}, newer than the known {SCHEMA_VERSION}; read it with a newer slimx",
            code="data.schema_version",
            about=where,
        )
    if not isinstance(version, int) or version < 1:
        raise SlimxError(
            f"{where} has schema_version {version!r}, which no release wrote; take another checkpoint",
            code="data.schema_version",
            about=where,
        )


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


@functools.cache
def _nested(kind: type) -> tuple[str, ...]:
    """Fields of `kind` that hold records; the others, long lists of integers among them, need no visit."""
    return tuple(name for name, hint in _hints(kind).items() if _holds_record(hint))


def _holds_record(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or any(_holds_record(argument) for argument in typing.get_args(hint))

"""Durable encoding of records for checkpoints: values are restored bit for bit, and unknown fields and versions are
refused.

Records are MessagePack maps with the names of their fields, so a later release can read the records of an older one. An
array is extension 1 of MessagePack: a packed `(dtype, shape)` followed by the raw bytes, including NaN payloads. Fields
such as `metadata` may have the types of MessagePack (None, booleans, numbers, strings, bytes, lists, dicts) and arrays;
NumPy scalars become Python numbers, tuples become lists.
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
from copy import copy
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from slimx.data.lazy import Lazy
from slimx.data.records import SCHEMA_VERSION, Group, Trajectory
from slimx.digest import fingerprint
from slimx.durable import write_atomic
from slimx.errors import SlimxError
from slimx.json_types import Json

ARRAY = 1
"""Type code of the MessagePack extension for arrays."""
NUMERIC = re.compile(r"[<>|][biufc]\d{1,2}")
"""Pattern that matches the type strings of NumPy's bool, int, unsigned, float and complex dtypes, whose arrays consist
only of raw bytes."""
FORMAT = "slimx-groups-1"
"""Value of `format` in a file's header line: name and version of the file format."""


def encode(value: object) -> bytes:
    """Encodes a record, or a list of records. Raises SlimxError naming a type that cannot be encoded."""
    try:
        return msgspec.msgpack.encode(_complete(value), enc_hook=_from_numpy)
    except (TypeError, NotImplementedError, OverflowError, ValueError, RecursionError) as error:
        raise SlimxError(
            f"a value cannot be written to a checkpoint ({error}); use only None, booleans, numbers, strings, lists, "
            "dicts and numeric arrays",
            code="data.value",
        ) from error


def decode[T](kind: type[T], data: bytes) -> T:
    """Decodes a record of class `kind` that `encode` wrote, with new, writable arrays.

    Raises SlimxError for damaged bytes, for a field that `kind` does not have, for a value of the wrong type and for an
    unknown `schema_version`.
    """
    try:
        tree = msgspec.msgpack.decode(data, ext_hook=to_numpy)
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        # Damaged strings, map keys and nesting raise errors other than msgspec's DecodeError.
        raise SlimxError(f"a saved record cannot be decoded ({error}); use an intact copy of the file") from error
    _check_schema(kind, tree, "record")
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise SlimxError(
            f"a saved record is invalid ({error}); use a file that slimx wrote",
            code="data.field",
            about="record",
        ) from error


def encode_groups(groups: Sequence[Group]) -> bytes:
    """Encodes groups, and decodes each one once as a check. If a value cannot be encoded and decoded, raises SlimxError
    naming its group."""
    parts = []
    for group in groups:
        try:
            part = encode(group)
            decode(Group, part)  # checked now, because a resuming run would find an unreadable checkpoint too late
        except SlimxError as error:
            raise SlimxError(f"group {group.id!r}: {error}", code=error.code, about=group.id) from error
        parts.append(msgspec.Raw(part))
    return msgspec.msgpack.encode(parts)


def decode_groups(data: bytes) -> list[Group]:
    """Decodes groups written by `encode_groups`. Raises SlimxError as `decode` does."""
    return decode(list[Group], data)


def save_groups(path: str | Path, groups: Sequence[Group], about: Mapping[str, object] | None = None) -> None:
    """Writes groups to a file: a JSON header line with format, length, checksum and the description `about`, followed
    by the encoded groups.

    The write is atomic: at any time `path` is absent, the previous file, or the complete new file.
    """
    path = Path(path)
    payload = encode_groups(groups)
    header: Json = {"format": FORMAT, "bytes": len(payload), "blake2b": fingerprint(payload)}
    if about is not None:
        header["about"] = about
    write_atomic(path, json.dumps(header).encode() + b"\n", payload)


def load_groups(path: str | Path) -> list[Group]:
    """Reads the groups from a file that `save_groups` wrote.

    Raises SlimxError naming the file if it is missing, truncated, edited or in another format.
    """
    path = Path(path)
    with _open(path) as file:
        header = _header(path, file)
        payload = file.read()
    if fingerprint(payload) != header["blake2b"]:
        raise SlimxError(
            f"{path}: the file was changed after it was written (its checksum differs); use an intact copy",
            code="data.checksum",
            about=str(path),
        )
    try:
        return decode_groups(payload)
    except SlimxError as error:
        raise SlimxError(f"{path}: {error}", code=error.code, about=str(path)) from error


def read_about(path: str | Path) -> Json:
    """Reads only the description `about` in the header of a file of groups; {} if the file has none. Raises SlimxError
    as `load_groups` does, but does not detect edited groups."""
    path = Path(path)
    with _open(path) as file:
        return _header(path, file).get("about", {})


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise SlimxError(
            f"{path}: the file cannot be read ({error.strerror}); make the file readable, or use another copy",
            code="data.unreadable",
            about=str(path),
        ) from error


def _header(path: Path, file: BinaryIO) -> Json:
    """Reads the header of an open file, and checks the file's format and length."""
    try:
        header = json.loads(file.readline())
        form = header["format"]
        length = header["bytes"]
        header["blake2b"]
    except (ValueError, TypeError, KeyError) as error:
        raise SlimxError(
            f"{path}: the file does not start with the header of saved groups; use a file that slimx wrote",
            code="data.header",
            about=str(path),
        ) from error
    if form != FORMAT:
        raise SlimxError(
            f"{path}: the file has format {form!r}, not {FORMAT!r}; read the file with the slimx release that wrote it",
            code="data.format",
            about=str(path),
        )
    rest = os.fstat(file.fileno()).st_size - file.tell()
    if rest != length:
        raise SlimxError(
            f"{path}: the file has {rest} bytes of groups, but {length} bytes were written; use a complete copy",
            code="data.truncated",
            about=str(path),
        )
    return header


def _complete(value: object) -> object:
    """Replaces lazy records in `value`, because msgspec leaves out fields that are lost."""
    if isinstance(value, list):
        return list(map(_complete, value))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    if isinstance(value, Lazy):
        return dataclasses.replace(copy(value))
    if isinstance(value, Trajectory):
        return value
    return dataclasses.replace(value, **{name: _complete(getattr(value, name)) for name in _nested(type(value))})


def _from_numpy(value: object) -> object:
    if isinstance(value, np.ndarray) and NUMERIC.fullmatch(value.dtype.str):
        head = msgspec.msgpack.encode((value.dtype.str, value.shape))
        return msgspec.msgpack.Ext(ARRAY, len(head).to_bytes(2, "little") + head + value.tobytes())
    if isinstance(value, np.generic) and type(value.item()) in (bool, int, float):
        return value.item()
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if type(value) is np.ndarray:
        name = f"array of {value.dtype}"
    raise NotImplementedError(f"it is of type {name}")


def to_numpy(code: int, data: memoryview) -> np.ndarray:
    """Returns the array in an extension of MessagePack. Raises SlimxError for damaged bytes."""
    try:
        if code != ARRAY:
            raise ValueError(f"unknown extension {code}")
        start = 2 + int.from_bytes(data[:2], "little")
        dtype, shape = msgspec.msgpack.decode(data[2:start], type=tuple[str, tuple[int, ...]])
        if not NUMERIC.fullmatch(dtype):
            raise ValueError(f"{dtype!r} is not a numeric dtype")
        return np.frombuffer(data[start:], dtype=dtype).reshape(shape).copy()  # a copy: the buffer is read-only
    except (ValueError, TypeError) as error:
        raise SlimxError(f"the bytes of an array are damaged ({error}); use another checkpoint") from error


def _check_schema(kind: object, value: object, where: str) -> None:
    """Raises SlimxError for unsupported record versions and for unknown fields, neither of which msgspec refuses,
    because it checks only types. `kind`: type of the decoded `value`; `where`: path of the value in the record, for
    errors."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        for option in typing.get_args(kind):
            _check_schema(option, value, where)
    elif origin is list and isinstance(value, list):
        for index, item in enumerate(value):
            _check_schema(typing.get_args(kind)[0], item, f"{where}[{index}]")
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        fields = _hints(kind)
        if "schema_version" in fields:
            _check_version(value.get("schema_version"), where)
        for name in value:
            if name not in fields:
                raise SlimxError(
                    f"{where} has the field {name!r}, which {kind.__name__} does not define; use a file that this "
                    "version of slimx wrote",
                    code="data.field",
                    about=name,
                )
        for name in _nested(kind):
            _check_schema(fields[name], value.get(name), f"{where}.{name}")


def _check_version(version: object, where: str) -> None:
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise SlimxError(
            f"{where} has schema_version {version}, above the supported {SCHEMA_VERSION}; install a newer slimx",
            code="data.schema_version",
            about=where,
        )
    if not isinstance(version, int) or version < 1:
        raise SlimxError(
            f"{where} has schema_version {version!r}, which no slimx release writes; use another checkpoint",
            code="data.schema_version",
            about=where,
        )


@functools.cache
def _hints(kind: type) -> dict[str, object]:
    return typing.get_type_hints(kind)


@functools.cache
def _nested(kind: type) -> tuple[str, ...]:
    """Returns the names of the fields of `kind` that contain records, which must be checked in turn. Other fields, such
    as long lists of integers, need no check."""
    names = []
    for name, hint in _hints(kind).items():
        if _contains_record(hint):
            names.append(name)
    return tuple(names)


def _contains_record(hint: object) -> bool:
    return dataclasses.is_dataclass(hint) or any(_contains_record(argument) for argument in typing.get_args(hint))

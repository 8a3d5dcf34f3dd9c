"""Command-line arguments of SGLang's server, with the fields of its ServerArgs read from its source.

The driver must not import sglang, because that takes seconds and initializes CUDA if present. The declarations are
parsed instead: since 0.5.23 ServerArgs is assembled from the classes in srt/arg_groups/fields, whose fields are
annotated `A[type, help or Arg(...)]`."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from slimx.errors import SlimxError
from slimx.json_types import Json


@dataclass(frozen=True, slots=True)
class Field:
    """One field of SGLang's ServerArgs that has a command-line flag."""

    name: str
    flag: str
    type: str
    """Type annotation as it is written in the source, such as "Optional[int]"."""
    whole: bool
    """True if a list or dict is passed as one JSON argument, which SGLang parses; False if each element is one
    argument."""
    default: object


# SGLang adds these flags in code: the declarations have none, or one that does not match the field's name.
BY_HAND = {
    "disable_cuda_graph": Field("disable_cuda_graph", "--disable-cuda-graph", "bool", False, False),
    "enable_dp_attention": Field("enable_dp_attention", "--enable-dp-attention", "bool", False, False),
    "sampling_backend": Field("sampling_backend", "--sampling-backend", "str", False, None),
    "reasoning_parser": Field("reasoning_parser", "--reasoning-parser", "str", False, None),
    "tool_call_parser": Field("tool_call_parser", "--tool-call-parser", "str", False, None),
}


ACCEPTED: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
"""Type annotation of a field -> Python types of the values that the field accepts."""


@functools.cache
def server_fields() -> dict[str, Field]:
    """Returns those fields of the installed SGLang's ServerArgs that have a command-line flag, by name."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise SlimxError(
            "sglang is not installed in this environment; run `make venv`",
        )
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "arg_groups" / "fields"
    fields: dict[str, Field] = {}
    for file in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and any(_assigns(item, "_NS_PATH") for item in node.body):
                declared = [_field(item) for item in node.body]
                fields.update({field.name: field for field in declared if field is not None})
    if len(fields) < 100:
        raise SlimxError(
            f"{folder} lacks most of SGLang's server arguments (found: {len(fields)}), so slimx does not support the "
            "installed SGLang; install sglang 0.5.23",
        )
    return fields | BY_HAND


def check_server_args(args: Json, where: str = "rollout.engines.sglang") -> None:
    """Raises SlimxError if `args`, field name -> value, contains a field that the installed SGLang does not have, or a
    value of the wrong type.

    `where`: the configuration key that contains `args`, for messages."""
    fields = server_fields()
    for name, value in args.items():
        if name not in fields:
            close = difflib.get_close_matches(name.lstrip("-").replace("-", "_"), fields, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else "see `python -m sglang.launch_server --help`"
            raise SlimxError(
                f"{where}.{name} is not an argument of the installed SGLang; {hint}",
                code="sglang.argument",
                about=f"{where}.{name}",
            )
        kind = fields[name].type.removeprefix("Optional[").removesuffix("]")
        if value is not None and kind in ACCEPTED and type(value) not in ACCEPTED[kind]:
            raise SlimxError(
                f"{where}.{name} is {value!r}, but SGLang requires the type {fields[name].type}; set a value of "
                "that type",
                code="sglang.type",
                about=f"{where}.{name}",
            )
        if kind == "bool" and value is False and fields[name].default is True:
            raise SlimxError(
                f"{where}.{name} cannot be disabled, because it is on by default and SGLang has no flag to disable "
                "it; remove the argument",
            )


def command_line(args: Json) -> list[str]:
    """Checks `args`, field name -> value, and converts them to command-line arguments. Values None and False are
    omitted, because they are SGLang's defaults."""
    check_server_args(args)
    out: list[str] = []
    for name, value in args.items():
        field = server_fields()[name]
        if value is None or value is False:
            continue
        out.append(field.flag)
        if isinstance(value, (list, tuple)) and not field.whole:
            out.extend(str(item) for item in value)
        elif isinstance(value, (dict, list, tuple)):
            out.append(json.dumps(value))
        elif value is not True:
            out.append(str(value))
    return out


def _assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == name for target in node.targets
    )


def _field(node: ast.stmt) -> Field | None:
    """Returns the field that the statement `name: A[type, help or Arg(...)] = default` declares; None for other
    statements."""
    if not (
        isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.annotation, ast.Subscript)
    ):
        return None
    if not (isinstance(node.annotation.value, ast.Name) and node.annotation.value.id == "A"):
        return None
    annotation = node.annotation.slice
    kind, *rest = annotation.elts if isinstance(annotation, ast.Tuple) else [annotation]
    options: dict[str, ast.expr] = {}
    for item in rest:
        if isinstance(item, ast.Call):
            options.update({keyword.arg: keyword.value for keyword in item.keywords if keyword.arg})
    if "no_cli" in options:
        return None
    name = node.target.id
    flag = "--" + name.replace("_", "-")
    if "cli_name" in options:
        flag = ast.literal_eval(options["cli_name"])
    default: object = None
    if isinstance(node.value, ast.Constant):
        default = node.value.value
    return Field(name, flag, ast.unparse(kind), "type_parser" in options or "action" in options, default)

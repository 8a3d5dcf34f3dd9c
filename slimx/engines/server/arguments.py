"""SGLang's arguments: the fields of its ServerArgs, read from its source, and command lines made from them.

The driver must not import sglang (it takes seconds, and initializes CUDA if present), so the declarations are parsed:
since 0.5.23 ServerArgs is assembled from the classes in srt/arg_groups/fields, whose fields are annotated `A[type, help
or Arg(...)]`.
"""

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
    """One field of ServerArgs that has a command line flag."""

    name: str
    flag: str
    type: str
    """Annotated type as written, e.g. "Optional[int]"."""
    whole: bool
    """True if a list or dict is one JSON argument (with a custom parser) rather than one argument per element."""
    default: object


# SGLang registers these by hand: their declarations have no flag, or the flag does not match the field's name.
BY_HAND = {
    "disable_cuda_graph": Field("disable_cuda_graph", "--disable-cuda-graph", "bool", False, False),
    "enable_dp_attention": Field("enable_dp_attention", "--enable-dp-attention", "bool", False, False),
    "sampling_backend": Field("sampling_backend", "--sampling-backend", "str", False, None),
    "reasoning_parser": Field("reasoning_parser", "--reasoning-parser", "str", False, None),
    "tool_call_parser": Field("tool_call_parser", "--tool-call-parser", "str", False, None),
}


ACCEPTED: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
"""Annotated type -> types of values that it accepts."""


@functools.cache
def server_fields() -> dict[str, Field]:
    """Returns the fields of the installed SGLang's ServerArgs that have a command-line flag, by name."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise SlimxError(
            "sglang is not installed in this environment; install the requirements of slimx",
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
            f"found only {len(fields)} argument fields in {folder}; this SGLang declares them elsewhere: "
            "adapt slimx.engines.server.arguments (written for sglang 0.5.23)",
        )
    return fields | BY_HAND


def check_server_args(args: Json, where: str = "rollout.engines.sglang") -> None:
    """Raises SlimxError for an unknown argument of the installed SGLang, or a value of the wrong type."""
    fields = server_fields()
    for name, value in args.items():
        if name not in fields:
            close = difflib.get_close_matches(name.lstrip("-").replace("-", "_"), fields, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else "see python -m sglang.launch_server --help"
            raise SlimxError(
                f"{where}.{name} is not an argument of the installed SGLang; {hint}",
                code="sglang.argument",
                about=f"{where}.{name}",
            )
        kind = fields[name].type.removeprefix("Optional[").removesuffix("]")
        if value is not None and kind in ACCEPTED and type(value) not in ACCEPTED[kind]:
            raise SlimxError(
                f"{where}.{name} is {value!r}, but SGLang's field is of type {fields[name].type}",
                code="sglang.type",
                about=f"{where}.{name}",
            )
        if kind == "bool" and value is False and fields[name].default is True:
            raise SlimxError(
                f"{where}.{name} cannot be disabled: it is on by default and SGLang has no flag to disable it",
            )


def command_line(args: Json) -> list[str]:
    """Returns flags for `args` (field name -> value). None and False are left out: they are SGLang's defaults."""
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
    """Returns the field declared by `name: A[type, help or Arg(...)] = default`, or None for any other statement."""
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

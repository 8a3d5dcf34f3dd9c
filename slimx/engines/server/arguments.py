"""SGLang's own arguments: the fields that its ServerArgs has, read from its source, and a command line made from them.

The driver must not import sglang (seconds, and CUDA where it exists), so the declarations are parsed: since 0.5.23
ServerArgs is assembled from the classes in srt/arg_groups/fields, whose fields are annotated `A[type, help or
Arg(...)]`.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimx.errors import SlimxError


@dataclass(frozen=True, slots=True)
class Field:
    """One field of ServerArgs that has a command line flag."""

    name: str
    flag: str
    type: str
    """The annotated type as it is written, e.g. "Optional[int]"."""
    whole: bool
    """True if a list or dict is one JSON argument (it has its own parser) and not one argument per element."""
    default: Any


# SGLang registers these by hand: their declarations have no flag, or the flag is spelled apart from the field.
BY_HAND = {
    "disable_cuda_graph": Field("disable_cuda_graph", "--disable-cuda-graph", "bool", False, False),
    "enable_dp_attention": Field("enable_dp_attention", "--enable-dp-attention", "bool", False, False),
    "sampling_backend": Field("sampling_backend", "--sampling-backend", "str", False, None),
    "reasoning_parser": Field("reasoning_parser", "--reasoning-parser", "str", False, None),
    "tool_call_parser": Field("tool_call_parser", "--tool-call-parser", "str", False, None),
}


@functools.cache
def server_fields() -> dict[str, Field]:
    """Every field of the installed SGLang's ServerArgs that can be given on its command line, by name."""
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
                fields.update({field.name: field for item in node.body if (field := _field(item))})
    if len(fields) < 100:
        raise SlimxError(
            f"found only {len(fields)} argument fields in {folder}; this SGLang declares them elsewhere: "
            "adapt slimx.engines.server.arguments (written for sglang 0.5.23)",
        )
    return fields | BY_HAND


def check_server_args(args: dict[str, Any], where: str = "rollout.engines.sglang") -> None:
    """Refuse a key that the installed SGLang does not know, or a value that its field cannot take."""
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
        accepted = {"bool": bool, "int": int, "float": (int, float), "str": str}.get(kind)
        if (
            accepted
            and value is not None
            and (not isinstance(value, accepted) or (kind != "bool" and isinstance(value, bool)))
        ):
            raise SlimxError(
                f"{where}.{name} is {value!r}, but SGLang's field is of type {fields[name].type}",
                code="sglang.type",
                about=f"{where}.{name}",
            )
        if kind == "bool" and value is False and fields[name].default is True:
            raise SlimxError(
                f"{where}.{name} cannot be switched off: it is on by default and SGLang has no flag for off",
            )


def command_line(args: dict[str, Any]) -> list[str]:
    """Flags for `args` (field name -> value). None and False are left out: they are SGLang's defaults."""
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
    """The field that `name: A[type, help or Arg(...)] = default` declares; None for any other statement."""
    if not (
        isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.annotation, ast.Subscript)
    ):
        return None
    if not (isinstance(node.annotation.value, ast.Name) and node.annotation.value.id == "A"):
        return None
    kind, *rest = (
        node.annotation.slice.elts if isinstance(node.annotation.slice, ast.Tuple) else [node.annotation.slice]
    )
    options: dict[str, ast.expr] = {}
    for item in rest:
        if isinstance(item, ast.Call):
            options.update({keyword.arg: keyword.value for keyword in item.keywords if keyword.arg})
    if "no_cli" in options:
        return None
    name = node.target.id
    flag = ast.literal_eval(options["cli_name"]) if "cli_name" in options else "--" + name.replace("_", "-")
    default = node.value.value if isinstance(node.value, ast.Constant) else None
    return Field(name, flag, ast.unparse(kind), "type_parser" in options or "action" in options, default)
